"""Attention between its projections at the large model's shapes: one layer, whole and part by part."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.ops.attention.api import gated_attention
from deltaserve.ops.layout import BLOCK, Layout

NUM_Q, NUM_KV, WIDTH, ROTARY, EPS = 16, 2, 256, 64, 1e-6
SCALE = WIDTH**-0.5
KEY_BYTES = 2 * NUM_KV * WIDTH * 2
TOKEN_BYTES = (2 * NUM_Q + 2 * NUM_KV + NUM_Q) * WIDTH * 2 + KEY_BYTES
"""What one token brings and leaves: queries, gate, keys, values, output; its entry."""
DECODE = [(1, 640), (1, 4096), (1, 262_144), (8, 640), (8, 4096), (32, 640), (128, 640), (128, 4096), (256, 640)]
RAGGED = 128
STEP_CONFIGS = [
    (32, 4, 3, 4), (32, 4, 3, 3), (32, 4, 3, 8), (32, 4, 4, 4), (32, 4, 4, 8), (64, 4, 2, 4), (64, 4, 2, 8),
    (64, 4, 3, 4), (64, 8, 3, 4), (64, 8, 2, 4),
]  # fmt: skip
"""Keys, warps, stages, units per multiprocessor."""
CHUNK_CONFIGS = [
    ("ChunkConfig", (128, 64, 8, 2)), ("HopperConfig", (2, 2, 0, 0)), ("HopperConfig", (2, 2, 8, 0)),
    ("HopperConfig", (2, 2, 8, 64)), ("HopperConfig", (2, 2, 8, 128)), ("HopperConfig", (3, 2, 8, 0)),
]  # fmt: skip
"""As `triton_chunk` defines them."""
CHUNKS = [(0, 1024), (0, 8192), (24_576, 8192)]
"""Tokens before the chunk and in it."""


class Inputs:
    """One layer's; sequences of the given tokens before the step and in it, in blocks that lie anywhere."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], num_step: int) -> None:
        needs = [-(-(start + length) // BLOCK) for start, length in zip(starts, lengths, strict=True)]
        ids = random.sample(range(sum(needs)), sum(needs))
        blocks = [[ids.pop() for _ in range(need)] for need in needs]
        self.layout = Layout.from_rows(lengths, num_step=num_step, starts=starts, blocks=blocks, device="cuda")
        tokens = sum(lengths)
        widths = [NUM_Q * WIDTH, NUM_Q * WIDTH, NUM_KV * WIDTH, NUM_KV * WIDTH]
        projected = torch.randn(tokens, sum(widths), dtype=torch.bfloat16, device="cuda")
        q, self.gate, k, v = torch.split(projected, widths, dim=1)
        self.q, self.k, self.v = (x.view(tokens, -1, WIDTH) for x in (q, k, v))
        self.weight = torch.rand(WIDTH, device="cuda") + 0.5
        self.cos_sin = torch.rand(max(starts) + max(lengths) + 1, ROTARY, device="cuda")
        self.pool = torch.randn(2, sum(needs), BLOCK, NUM_KV, WIDTH, dtype=torch.bfloat16, device="cuda")

    def whole(self) -> Tensor:
        q, k, v, weight = self.q, self.k, self.v, self.weight
        return gated_attention(
            q, self.gate, k, v, weight, weight, EPS, self.cos_sin, self.pool, self.layout, SCALE
        )  # fmt: skip

    def enter(self, heads: int | None = None) -> Tensor:
        from deltaserve.ops.attention.triton_entry import enter

        layout = self.layout
        weights = (self.weight, self.weight, EPS, self.cos_sin)
        return enter(self.q, self.k, self.v, *weights, layout.position, self.pool, layout.kv_index, heads)

    def step(self, config: tuple[int, int, int, int]) -> Callable[[], None]:
        from deltaserve.ops.attention import triton_step

        q = self.enter()
        out, layout = torch.empty_like(q), self.layout
        chosen = triton_step.StepConfig(*config)
        return lambda: triton_step.step(q, self.gate, out, self.pool, layout, layout.segments[0], SCALE, chosen)

    def chunk(self, kind: str, config: tuple[int, int, int, int]) -> Callable[[], None]:
        from deltaserve.ops.attention import triton_chunk

        q = self.enter()
        out, layout = torch.empty_like(q), self.layout
        chosen = getattr(triton_chunk, kind)(*config)
        return lambda: triton_chunk.chunk(q, self.gate, out, self.pool, layout, layout.segments[0], SCALE, chosen)


def flops_of(starts: Sequence[int], lengths: Sequence[int]) -> float:
    pairs = sum(length * start + length * (length + 1) / 2 for start, length in zip(starts, lengths, strict=True))
    return 4.0 * NUM_Q * WIDTH * pairs


def case_of(
    name: str,
    starts: Sequence[int],
    lengths: Sequence[int],
    num_step: int,
    call: Callable[[Inputs], Callable[[], object]],
) -> Case:
    keys = sum(starts) + sum(lengths)
    num_bytes = float(keys * KEY_BYTES + sum(lengths) * TOKEN_BYTES)
    sets = max(2, min(20, int(120e6 / num_bytes)))

    def make() -> list[Callable[[], object]]:
        return [call(Inputs(starts, lengths, num_step)) for _ in range(sets)]

    return Case(name, make, num_bytes, flops_of(starts, lengths))


def ragged_starts() -> list[int]:
    """One long context, and the rest from short to middling."""
    rng = random.Random(0)
    return [30_000, *(rng.randrange(100, 4000) for _ in range(RAGGED - 1))]


def cases() -> list[Case]:
    found = []
    for rows, context in DECODE:
        starts, lengths = [context - 1] * rows, [1] * rows
        found.append(case_of(f"attention step {rows} x {context}", starts, lengths, rows, lambda inputs: inputs.whole))
    ragged = ragged_starts()
    found.append(case_of("attention step ragged", ragged, [1] * RAGGED, RAGGED, lambda inputs: inputs.whole))
    found.append(case_of("attention step 32 x 4 of 640", [636] * 32, [4] * 32, 32, lambda inputs: inputs.whole))
    for tokens in (1024, 8192):
        found.append(case_of(f"attention chunk {tokens}", [0], [tokens], 0, lambda inputs: inputs.whole))
    found.append(case_of("attention chunk 1024 behind 16384", [16384], [1024], 0, lambda inputs: inputs.whole))
    for tokens in (1, 128, 8192):
        for heads in (4, 8, 16):
            title = f"attention entry {tokens} heads={heads}"
            starts, lengths = [0] * tokens, [1] * tokens
            found.append(case_of(title, starts, lengths, tokens, lambda x, heads=heads: partial(x.enter, heads)))  # type: ignore[misc]
    for config in STEP_CONFIGS:
        name = "keys={} w{} s{} units={}".format(*config)
        for rows, context in ((1, 640), (1, 262_144), (128, 4096), (128, 640)):
            title = f"step look-back {rows} x {context} {name}"
            starts, lengths = [context - 1] * rows, [1] * rows
            found.append(case_of(title, starts, lengths, rows, lambda x, config=config: x.step(config)))  # type: ignore[misc]
    for kind, config in CHUNK_CONFIGS:
        name = "{} {},{},{},{}".format(kind, *config)
        for start, tokens in CHUNKS:
            title = f"chunk look-back {tokens} behind {start} {name}"
            found.append(case_of(title, [start], [tokens], 0, lambda x, how=(kind, config): x.chunk(*how)))  # type: ignore[misc]
    return found
