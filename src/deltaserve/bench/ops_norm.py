"""The norms of the residual stream and of a gated delta net's heads, at the large model's shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.ops.norm.api import add_gemma_rms_norm, gated_rms_norm

HIDDEN, HEADS, VALUE = 2048, 32, 128
TOKENS = (1, 8, 32, 128, 256, 1024, 8192)
EPS = 1e-6


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def sets_of(num_bytes: float) -> int:
    return max(2, min(20, int(120e6 / num_bytes)))


def add_norm(tokens: int) -> Case:
    num_bytes = 4.0 * tokens * HIDDEN * 2

    def make() -> list[Callable[[], object]]:
        weight = torch.rand(HIDDEN, device="cuda")
        return [
            partial(add_gemma_rms_norm, noise(tokens, HIDDEN), noise(tokens, HIDDEN), weight, EPS)
            for _ in range(sets_of(num_bytes))
        ]

    return Case(f"add and norm {tokens}", make, num_bytes)


def gated_norm(tokens: int) -> Case:
    num_bytes = 3.0 * tokens * HEADS * VALUE * 2

    def make() -> list[Callable[[], object]]:
        weight = torch.rand(VALUE, device="cuda").bfloat16()
        return [
            partial(gated_rms_norm, noise(tokens, HEADS, VALUE), noise(tokens, HEADS, VALUE), weight, EPS)
            for _ in range(sets_of(num_bytes))
        ]

    return Case(f"gated norm {tokens}", make, num_bytes)


def gated_norm_quantized(tokens: int) -> Case:
    num_bytes = 3.5 * tokens * HEADS * VALUE * 2

    def make() -> list[Callable[[], object]]:
        from deltaserve.ops.norm.triton_norm import gated_norm_rows_quantized

        weight = torch.rand(VALUE, device="cuda").bfloat16()
        return [
            partial(gated_norm_rows_quantized, noise(tokens, HEADS, VALUE), noise(tokens, HEADS, VALUE), weight, EPS)
            for _ in range(sets_of(num_bytes))
        ]

    return Case(f"gated norm quantised {tokens}", make, num_bytes)


def cases() -> list[Case]:
    many = [tokens for tokens in TOKENS if tokens >= 1024]
    gated = [make(tokens) for make in (gated_norm, gated_norm_quantized) for tokens in many]
    return [*(add_norm(tokens) for tokens in TOKENS), *gated]
