"""Several layers of the 80B model in a row, but for what mixes tokens: kernels that wait for each other, as in a step.

Beside the sum of the ops on their own this tells what early launches save. The input of `out_proj` comes quantised, as
the gated delta step leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.bench.ops_moe import EXPERT_BYTES, EXPERTS, INNER, TOP_K, WIDTH
from deltaserve.ops.linear import gpu
from deltaserve.ops.linear.api import Ready, linear, norm_linear
from deltaserve.ops.moe.api import sparse_moe

LAYERS, QKVZ, VALUES, BA = 8, 12288, 4096, 64
EPS = 1e-6
INSIDE = "", " router's norm inside", " norms inside"


@dataclass(frozen=True)
class Layer:
    """Weights e4m3 with scales, or bf16."""

    norm: Tensor
    in_proj: tuple[Tensor, Tensor]
    ba: Tensor
    out_proj: tuple[Tensor, Tensor]
    router: Tensor
    w13: tuple[Tensor, Tensor]
    w2: tuple[Tensor, Tensor]


def quantized(*shape: int) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = shape
    weight = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    weight.view(torch.uint8).random_(0, 0x60)  # numbers up to 16
    return weight, torch.rand(*batch, rows // 128, columns // 128, device="cuda") / 64


def make_layer() -> Layer:
    return Layer(
        norm=torch.rand(WIDTH, device="cuda"),
        in_proj=quantized(QKVZ, WIDTH),
        ba=torch.randn(BA, WIDTH, device="cuda").bfloat16(),
        out_proj=quantized(WIDTH, VALUES),
        router=torch.randn(EXPERTS + 1, WIDTH, device="cuda").bfloat16(),
        w13=quantized(EXPERTS + 1, 2 * INNER, WIDTH),
        w2=quantized(EXPERTS + 1, WIDTH, INNER),
    )


@dataclass(frozen=True)
class Ways:
    """How the chain is computed."""

    early: bool = True
    inside: int = 1
    """Of one token: 0, 1 or 2 norms inside products."""
    ahead: bool = False
    """Whether products in matrix units bring their weights near."""
    down_ahead: bool = False
    """Whether the experts' down projection does, in groups."""
    pairs: int = 2
    """Tokens up to which experts go pair by pair."""
    gemv: int = 1
    """Tokens up to which quantised inputs go to `triton_gemv`."""


@contextmanager
def chosen(ways: Ways) -> Iterator[None]:
    """Within it ops go these ways."""
    from deltaserve.ops.linear import triton_early, triton_gemm
    from deltaserve.ops.moe import triton_groups, triton_pairs

    settings: list[tuple[Any, str, object]] = [
        (triton_early, "MAX_TOKENS", triton_early.MAX_TOKENS if ways.early else -1),
        (gpu, "NORMS_INSIDE", {False: ways.inside > 0, True: ways.inside > 1}),
        (gpu, "READY_GEMV", ways.gemv),
        (triton_gemm, "AHEAD", range(65) if ways.ahead else range(0)),
        (triton_groups, "AHEAD", range(65) if ways.down_ahead else range(0)),
        (triton_pairs, "MAX_TOKENS", ways.pairs),
    ]
    before = [getattr(module, name) for module, name, _ in settings]
    for module, name, value in settings:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(settings, before, strict=True):
            setattr(module, name, value)


def run(layers: Sequence[Layer], x: Tensor, mixed: Tensor, mixed_ready: Ready, ways: Ways) -> Tensor:
    residual = x
    with chosen(ways):
        for layer in layers:
            _, _, _, residual, _ = norm_linear(x, residual, layer.norm, EPS, *layer.in_proj, layer.ba)
            x = linear(mixed, *layer.out_proj, ready=mixed_ready)
            scores, _, x, residual, ready = norm_linear(x, residual, layer.norm, EPS, layer.router, quantizes=True)
            (w13, w13_scale), (w2, w2_scale) = layer.w13, layer.w2
            x = sparse_moe(x, scores, w13, w2, TOP_K, True, w13_scale, w2_scale, ready, adds_up=False)
    return x


def make(tokens: int, ways: Ways) -> Sequence[Callable[[], object]]:
    from deltaserve.ops.linear.triton_fp8 import quantize_rows

    layers, calls = [make_layer() for _ in range(LAYERS)], []
    for _ in range(4):
        x = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
        mixed = torch.randn(tokens, VALUES, device="cuda").bfloat16()
        calls.append(partial(run, layers, x, mixed, quantize_rows(mixed), ways))
    return calls


def ways_of(tokens: int) -> dict[str, Ways]:
    """By name. What is worth a comparison at one size is not at another."""
    found = {"": Ways(early=False), " early": Ways()}
    if tokens == 1:
        return {f"{name}{INSIDE[i]}": replace(ways, inside=i) for name, ways in found.items() for i in range(3)}
    found[" early, weights ahead"] = Ways(ahead=True)
    found[" early, both weights ahead"] = Ways(ahead=True, down_ahead=True)
    if tokens <= 4:
        del found[""]
        found[" early, gemv"] = Ways(gemv=4)
        found[" early, gemv, groups, down ahead"] = Ways(gemv=4, pairs=1, down_ahead=True)
        if tokens == 2:
            del found[" early, weights ahead"], found[" early, both weights ahead"]
            found[" early, groups"] = Ways(pairs=1)
            found[" early, groups, down ahead"] = Ways(pairs=1, down_ahead=True)
        else:
            found[" early, gemv, pairs"] = Ways(gemv=4, pairs=4)
    return found


def cases() -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 2, 3, 4, 8, 32):
        touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens) + 1
        dense = QKVZ * WIDTH + WIDTH * VALUES + 2 * (BA + EXPERTS + 1) * WIDTH
        num_bytes = LAYERS * (touched * EXPERT_BYTES + dense)
        for name, ways in ways_of(tokens).items():
            found.append(Case(f"chain {LAYERS} layers{name} T={tokens}", partial(make, tokens, ways), num_bytes))
    return found
