"""Several layers of the 80B model in a row, but for what mixes tokens: kernels that wait for each other, as in a step.

Beside the sum of the ops on their own this tells what early launches save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.bench.ops_moe import EXPERT_BYTES, EXPERTS, INNER, TOP_K, WIDTH
from deltaserve.ops.linear import gpu
from deltaserve.ops.linear.api import linear, norm_linear
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


def run(layers: Sequence[Layer], x: Tensor, mixed: Tensor, early: bool, inside: int, ahead: bool) -> Tensor:
    from deltaserve.ops.linear import triton_early, triton_gemm

    before = triton_early.MAX_TOKENS, gpu.NORMS_INSIDE, triton_gemm.AHEAD
    triton_early.MAX_TOKENS, gpu.NORMS_INSIDE = before[0] if early else -1, {False: inside > 0, True: inside > 1}
    triton_gemm.AHEAD = range(65) if ahead else range(0)
    residual = x
    for layer in layers:
        _, _, _, residual, _ = norm_linear(x, residual, layer.norm, EPS, *layer.in_proj, layer.ba)
        x = linear(mixed, *layer.out_proj)
        scores, _, x, residual, ready = norm_linear(x, residual, layer.norm, EPS, layer.router, quantizes=True)
        (w13, w13_scale), (w2, w2_scale) = layer.w13, layer.w2
        x = sparse_moe(x, scores, w13, w2, TOP_K, True, w13_scale, w2_scale, ready, adds_up=False)
    triton_early.MAX_TOKENS, gpu.NORMS_INSIDE, triton_gemm.AHEAD = before
    return x


def make(tokens: int, early: bool, inside: int, ahead: bool) -> Sequence[Callable[[], object]]:
    layers = [make_layer() for _ in range(LAYERS)]
    return [
        partial(
            run,
            layers,
            torch.randn(tokens, WIDTH, device="cuda").bfloat16(),
            torch.randn(tokens, VALUES, device="cuda").bfloat16(),
            early,
            inside,
            ahead,
        )
        for _ in range(4)
    ]


def cases() -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 2, 4, 8, 32):
        touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens) + 1
        dense = QKVZ * WIDTH + WIDTH * VALUES + 2 * (BA + EXPERTS + 1) * WIDTH
        num_bytes = LAYERS * (touched * EXPERT_BYTES + dense)
        for early in (False, True):
            for inside in (0, 1, 2) if tokens == 1 else (0,):
                name = f"chain {LAYERS} layers{' early' if early else ''}{INSIDE[inside]} T={tokens}"
                found.append(Case(name, partial(make, tokens, early, inside, False), num_bytes))
        if tokens > 1:
            name = f"chain {LAYERS} layers early, weights ahead T={tokens}"
            found.append(Case(name, partial(make, tokens, True, 0, True), num_bytes))
    return found
