"""Cases of the gated delta net at the 80B model's shapes: steps of one token and of several, prompts, and parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deltaserve.bench.ops import Case
from deltaserve.ops.layout import Layout

K_HEADS, V_HEADS, WIDTH, HIDDEN_PARTS = 16, 32, 128, 12352
CHANNELS, VALUES = 8192, 4096
STATE = V_HEADS * WIDTH * WIDTH
L2_BYTES = 50 << 20


def layer(layout: Layout, slots: int, state: torch.dtype) -> dict[str, Any]:
    """Arguments of the facade: one layer's weights, pools and inputs."""
    tokens = layout.write_slot.shape[0]
    projected = torch.randn(tokens, HIDDEN_PARTS, device="cuda", dtype=torch.bfloat16)
    mixed, z, b, a = projected.split_with_sizes([CHANNELS, VALUES, V_HEADS, V_HEADS], dim=-1)
    return {
        "mixed_TC": mixed,
        "z_TX": z,
        "b_TV": b,
        "a_TV": a,
        "conv_weight_CW": torch.randn(4, CHANNELS, device="cuda", dtype=torch.bfloat16).t(),
        "A_log_V": torch.randn(V_HEADS, device="cuda"),
        "dt_bias_V": torch.randn(V_HEADS, device="cuda"),
        "norm_weight_D": torch.ones(WIDTH, device="cuda"),
        "eps": 1e-6,
        "conv_pool_SWC": torch.zeros(slots, 3, CHANNELS, device="cuda", dtype=torch.bfloat16),
        "state_pool_SVKD": torch.zeros(slots, V_HEADS, WIDTH, WIDTH, device="cuda", dtype=state),
        "layout": layout,
    }


def step_layout(rows: int, length: int) -> Layout:
    """Rows kept in place after their last token, and elsewhere after the others."""
    write = [[rows + row * (length - 1) + t for t in range(length - 1)] + [row] for row in range(rows)]
    return Layout.from_rows(
        [length] * rows, num_step=rows, starts=[7] * rows, read_slots=range(rows), write_slots=write, device="cuda"
    )


def steps(rows: int, length: int, state: torch.dtype, config: dict[str, Any]) -> Sequence[Callable[[], object]]:
    from deltaserve.ops.gated_delta import triton_step

    layout = step_layout(rows, length)
    size = rows * STATE * state.itemsize
    sets = [layer(layout, rows * length, state) for _ in range(max(2, min(50, -(-2 * L2_BYTES // size))))]
    for arguments in sets:
        arguments["z_TVD"] = arguments.pop("z_TX").unflatten(1, (V_HEADS, WIDTH))
        arguments["out_TVD"] = torch.empty(rows * length, V_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    segment = layout.segments[0]
    step = triton_step.step if config else triton_step.step_of(sets[0]["state_pool_SVKD"], segment)
    return [partial(step, **arguments, segment=segment, **config) for arguments in sets]


def step_bytes(rows: int, length: int, state: torch.dtype) -> float:
    tokens, window = rows * length, 3 * CHANNELS * 2
    return (rows + tokens) * (STATE * state.itemsize + window) + tokens * 2 * (HIDDEN_PARTS + VALUES)


def prompt_layout(lengths: Sequence[int]) -> Layout:
    write = [[-1] * (length - 1) + [row] for row, length in enumerate(lengths)]
    return Layout.from_rows(lengths, write_slots=write, device="cuda")


def prompts(lengths: Sequence[int]) -> Sequence[Callable[[], object]]:
    from deltaserve.ops.gated_delta.api import gated_delta_net

    layout = prompt_layout(lengths)
    return [partial(gated_delta_net, **layer(layout, len(lengths), torch.float32)) for _ in range(2)]


def prompt_part(lengths: Sequence[int], part: str, config: dict[str, Any]) -> Sequence[Callable[[], object]]:
    """The convolution with its windows, launched as `config` says, or the rule without it."""
    from deltaserve.ops.conv import triton_conv
    from deltaserve.ops.gated_delta import triton_chunk

    layout = prompt_layout(lengths)
    segment = layout.segments[0]
    calls: list[Callable[[], object]] = []
    for _ in range(2):
        given = layer(layout, len(lengths), torch.float32)
        mixed, weight, pool = (given[name] for name in ("mixed_TC", "conv_weight_CW", "conv_pool_SWC"))
        rule = {name: given[name] for name in ("b_TV", "a_TV", "A_log_V", "dt_bias_V", "state_pool_SVKD", "layout")}
        conv = partial(triton_conv.conv, mixed, weight, pool, layout, segment, (K_HEADS, WIDTH, WIDTH), **config)
        if part == "conv":
            calls.append(conv)
        else:
            calls.append(partial(triton_chunk.chunk, conv(), **rule, segment=segment))
    return calls


def rule_flops(tokens: int) -> float:
    """Four products of a chunk with its state and six in preparing it, counting inversion as two."""
    per_chunk = 64 * WIDTH * WIDTH * 3 + 64 * 64 * WIDTH * 5 + 2 * 64 * 64 * 64
    return 2.0 * V_HEADS * tokens / 64 * per_chunk


def cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    found = []
    configs: dict[str, dict[str, Any]] = {
        "": {},
        " w8": {"SK": 16, "SV": 16, "num_warps": 8},
        " w8 128 registers": {"SK": 16, "SV": 16, "num_warps": 8, "maxnreg": 128},
    }
    for rows in (1, 8, 32, 64, 128, 256):
        for name, config in configs.items():
            call = partial(steps, rows, 1, fp32, config)
            found.append(Case(f"gdn step fp32 B={rows}{name}", call, step_bytes(rows, 1, fp32)))
        found.append(Case(f"gdn step bf16 B={rows}", partial(steps, rows, 1, bf16, {}), step_bytes(rows, 1, bf16)))
    for rows in (1, 32, 128):
        call = partial(steps, rows, 4, fp32, {})
        found.append(Case(f"gdn step fp32 B={rows} L=4", call, step_bytes(rows, 4, fp32)))
    prompt_lengths = {
        "1x1024": [1024],
        "1x8192": [8192],
        "1x32768": [32768],
        "16x512": [512] * 16,
        "16x2048": [2048] * 16,
    }
    for name, lengths in prompt_lengths.items():
        tokens, flops = sum(lengths), rule_flops(sum(lengths))
        num_bytes = tokens * 2.0 * (HIDDEN_PARTS + VALUES)
        found.append(Case(f"gdn prompt {name}", partial(prompts, lengths), num_bytes, flops))
        found.append(Case(f"gdn conv {name}", partial(prompt_part, lengths, "conv", {}), tokens * 4.0 * CHANNELS))
        for groups, registers in ((8, 168), (16, 96)):
            call = partial(prompt_part, lengths, "conv", {"num_groups": groups, "registers": registers})
            found.append(Case(f"gdn conv {name} groups={groups} r{registers}", call, tokens * 4.0 * CHANNELS))
        rule_bytes = tokens * 2.0 * (CHANNELS + 2 * V_HEADS + VALUES)
        found.append(Case(f"gdn rule {name}", partial(prompt_part, lengths, "rule", {}), rule_bytes, flops))
    return found
