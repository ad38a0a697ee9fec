"""Several layers of the 80B model in a row, but for what mixes tokens: kernels that wait for each other, as in a step.

Beside the sum of the ops on their own this tells what early launches save. The input of `out_proj` comes quantised, as
the gated delta step leaves it. Weights have both signs and a size that keeps numbers near one, so that tokens stay
unlike each other and are routed to experts that nobody prefers: `touched` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.bench.ops_moe import EXPERT_BYTES, EXPERTS, INNER, TOP_K, WIDTH
from deltaserve.ops.linear import gpu
from deltaserve.ops.linear.api import Ready, linear, norm_linear
from deltaserve.ops.moe.api import route, sparse_moe

LAYERS, QKVZ, VALUES, BA = 8, 12288, 4096, 64
EPS = 1e-6
INSIDE = "", " router's norm inside"


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    width: int = WIDTH
    qkvz: int = QKVZ
    values: int = VALUES
    ba: int = BA
    experts: int = EXPERTS
    inner: int = INNER
    top_k: int = TOP_K


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
    top_k: int


def quantized(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """Of both signs, so large that products with numbers near one are near one."""
    *batch, rows, columns = shape
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    scale = torch.rand(*batch, rows // 128, columns // 128, device=device) + 0.5
    return weight, scale / math.sqrt(columns)


def plain(device: torch.device, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / math.sqrt(columns)


def make_layer(sizes: Sizes, device: torch.device) -> Layer:
    held = sizes.experts + 1
    return Layer(
        norm=torch.rand(sizes.width, device=device) + 0.5,
        in_proj=quantized(device, sizes.qkvz, sizes.width),
        ba=plain(device, sizes.ba, sizes.width),
        out_proj=quantized(device, sizes.width, sizes.values),
        router=plain(device, held, sizes.width),
        w13=quantized(device, held, 2 * sizes.inner, sizes.width),
        w2=quantized(device, held, sizes.width, sizes.inner),
        top_k=sizes.top_k,
    )


@dataclass(frozen=True)
class Ways:
    """How the chain is computed."""

    early: bool = True
    inside: int = 1
    """Of one token: 0, 1 or 2 norms inside products; the second in the first layer alone, as experts leave rows."""
    ahead: bool = True
    """Whether products in matrix units bring their weights near."""
    pairs: int = 2
    """Tokens up to which experts go pair by pair."""
    gemv: int = 3
    """Tokens up to which quantised inputs go to `triton_gemv`."""
    cut: dict[str, Any] = field(default_factory=dict)
    """Fields of the experts' `Tiles` that are not those chosen."""
    cut_linear: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The same of the projections', by their outputs."""


@contextmanager
def chosen(ways: Ways) -> Iterator[None]:
    """Within it ops go these ways."""
    from deltaserve.ops.linear import triton_early, triton_gemm
    from deltaserve.ops.moe import triton_groups, triton_pairs

    def by_height(tokens: int, height: int, *others: object) -> dict[str, Any]:
        return ways.cut_linear.get(height, {})

    settings: list[tuple[Any, str, object]] = [
        (triton_early, "MAX_TOKENS", triton_early.MAX_TOKENS if ways.early else -1),
        (gpu, "NORMS_INSIDE", {False: ways.inside > 0, True: ways.inside > 1}),
        (gpu, "READY_GEMV", ways.gemv),
        (triton_gemm, "AHEAD", range(65) if ways.ahead else range(0)),
        (triton_pairs, "MAX_TOKENS", ways.pairs),
        (triton_groups, "choose_tiles", _changed(triton_groups.choose_tiles, lambda *sizes: ways.cut)),
        (triton_gemm, "choose_tiles", _changed(triton_gemm.choose_tiles, by_height)),
    ]
    before = [getattr(module, name) for module, name, _ in settings]
    for module, name, value in settings:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(settings, before, strict=True):
            setattr(module, name, value)


def _changed(choose: Callable[..., Any], cut: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    return lambda *sizes: replace(choose(*sizes), **cut(*sizes))


def run(
    layers: Sequence[Layer],
    x: Tensor,
    mixed: Tensor,
    mixed_ready: Ready | None,
    ways: Ways,
    scored: Callable[[Layer, Tensor], None] = lambda layer, scores: None,
) -> Tensor:
    """`scored` is told of each layer's scores [T, E + 1]."""
    residual = x
    with chosen(ways):
        for layer in layers:
            _, _, _, residual, _ = norm_linear(x, residual, layer.norm, EPS, *layer.in_proj, layer.ba)
            x = linear(mixed, *layer.out_proj, ready=mixed_ready)
            scores, _, x, residual, ready = norm_linear(x, residual, layer.norm, EPS, layer.router, quantizes=True)
            scored(layer, scores)
            (w13, w13_scale), (w2, w2_scale) = layer.w13, layer.w2
            x = sparse_moe(x, scores, w13, w2, layer.top_k, True, w13_scale, w2_scale, ready, adds_up=False)
    return x


def touched(layers: Sequence[Layer], x: Tensor, mixed: Tensor, mixed_ready: Ready | None = None) -> list[int]:
    """How many different experts each layer's tokens are routed to."""
    found: list[int] = []

    def count(layer: Layer, scores: Tensor) -> None:
        found.append(len(set(route(scores[:, :-1].float(), layer.top_k, True)[1].flatten().tolist())))

    run(layers, x, mixed, mixed_ready, Ways(), count)
    return found


def make(tokens: int, ways: Ways) -> Sequence[Callable[[], object]]:
    from deltaserve.ops.linear.triton_fp8 import quantize_rows

    sizes, device = Sizes(), torch.device("cuda", 0)
    layers, calls = [make_layer(sizes, device) for _ in range(LAYERS)], []
    for _ in range(4):
        x = torch.randn(tokens, sizes.width, device=device).bfloat16()
        mixed = torch.randn(tokens, sizes.values, device=device).bfloat16()
        calls.append(partial(run, layers, x, mixed, quantize_rows(mixed), ways))
    return calls


def ways_of(tokens: int) -> dict[str, Ways]:
    """By name. What is worth a comparison at one size is not at another."""
    found = {"": Ways(early=False), " early": Ways()}
    if tokens == 1:
        return {f"{name}{INSIDE[i]}": replace(ways, inside=i) for name, ways in found.items() for i in range(2)}
    found[" early, no weights ahead"] = Ways(ahead=False)
    if tokens <= 4:
        del found[""], found[" early, no weights ahead"]
        found[" early, gemv"] = Ways(gemv=4)
        if tokens == 2:
            found[" early, groups"] = Ways(pairs=1)
        else:
            found[" early, gemv, pairs"] = Ways(gemv=4, pairs=4)
    return found


def floor_bytes(tokens: int) -> float:
    """That must move in one call: weights of the experts that are chosen, if nobody prefers any, and of all else."""
    distinct = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens) + 1
    dense = QKVZ * WIDTH + WIDTH * VALUES + 2 * (BA + EXPERTS + 1) * WIDTH
    return LAYERS * (distinct * EXPERT_BYTES + dense)


def cases() -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 2, 3, 4, 8, 32):
        for name, ways in ways_of(tokens).items():
            label = f"chain {LAYERS} layers{name} T={tokens}"
            found.append(Case(label, partial(make, tokens, ways), floor_bytes(tokens)))
    return found
