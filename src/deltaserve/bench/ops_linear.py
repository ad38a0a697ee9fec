"""Cases of the projections of the 80B model, small numbers of tokens and large, and other cuts of the same products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.ops.linear import gpu
from deltaserve.ops.linear.api import linear

SHAPES = {"in_qkvz": (12288, 2048), "out": (2048, 4096), "attn_in": (9216, 2048)}
PLAIN = {"router": (513, 2048), "ba": (64, 2048), "lm_head": (151936, 2048)}
L2_BYTES = 200 << 20
"""Of all input sets together, or two sets."""

Product = Callable[[Tensor, Tensor, Tensor | None], object]


def make(tokens: int, outputs: int, inputs: int, quantized: bool, product: Product) -> Sequence[Callable[[], object]]:
    """Input sets with weights of their own."""
    device = torch.device("cuda", 0)
    num_bytes = outputs * inputs * (1 if quantized else 2)
    sets = min(20, max(2, -(-L2_BYTES // num_bytes)))
    calls: list[Callable[[], object]] = []
    for _ in range(sets):
        x = torch.randn(tokens, inputs, device=device).bfloat16()
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        scale = None
        if quantized:
            weight = weight.to(torch.float8_e4m3fn)
            scale = torch.rand(-(-outputs // 128), -(-inputs // 128), device=device)
        calls.append(partial(product, x, weight, scale))
    return calls


def case(name: str, tokens: int, shape: tuple[int, int], quantized: bool, product: Product, out_bytes: int = 2) -> Case:
    outputs, inputs = shape
    return Case(
        f"linear {name} T={tokens}",
        partial(make, tokens, outputs, inputs, quantized, product),
        outputs * inputs * (1 if quantized else 2) + tokens * (2 * inputs + out_bytes * outputs),
        2.0 * tokens * outputs * inputs,
        quantized,
    )


def logits(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    return linear(x, weight, scale, torch.float32)


def torch_dense(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def vendor(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    assert scale is not None
    return gpu.blockwise(x, weight, scale)


def quantize_only(x: Tensor, weight: Tensor, scale: Tensor | None) -> object:
    from deltaserve.ops.linear.triton_fp8 import quantize_rows

    return quantize_rows(x)


def gemv_of(rows: int, warps: int, early: bool = False) -> Product:
    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        from deltaserve.ops.linear.triton_gemv import gemv

        return gemv(x, weight, scale, torch.bfloat16, rows, warps, early)

    return product


def norm_gemv_of(rows: int, warps: int, early: bool) -> Product:
    gain = torch.ones(2048)
    beside = torch.ones(64, 2048, dtype=torch.bfloat16)

    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> object:
        nonlocal gain, beside
        from deltaserve.ops.linear.triton_gemv import norm_gemv

        gain, beside = gain.to(x.device), beside.to(x.device)
        return norm_gemv(x, x, gain, 1e-6, weight, scale, beside, rows, warps, early)

    return product


def ready_gemv_of(rows: int, warps: int, early: bool) -> Product:
    beside = torch.ones(64, 2048, dtype=torch.bfloat16)
    q, q_scale = torch.ones(1, 2048).to(torch.float8_e4m3fn), torch.ones(1, 16)

    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> object:
        nonlocal q, q_scale, beside
        from deltaserve.ops.linear.triton_gemv import gemv_beside

        q, q_scale, beside = q.to(x.device), q_scale.to(x.device), beside.to(x.device)
        return gemv_beside(x, weight, scale, beside, rows, warps, early, (q, q_scale))

    return product


def quantised_before(width: int, is_gemv: bool) -> Product:
    """Of an input that comes quantised, in either way; early launches."""
    q, q_scale = torch.ones(4, width).to(torch.float8_e4m3fn), torch.ones(width // 128, 4)

    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        nonlocal q, q_scale
        from deltaserve.ops.linear.triton_gemm import gemm
        from deltaserve.ops.linear.triton_gemv import gemv

        q, q_scale = q.to(x.device), q_scale.to(x.device)
        return (gemv if is_gemv else gemm)(x, weight, scale, torch.bfloat16, ready=(q, q_scale.t()))

    return product


def gemm_of(outputs: int, tokens: int, split: int, warps: int, stages: int, ready: bool) -> Product:
    def product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        from deltaserve.ops.linear.triton_gemm import Tiles, gemm

        return gemm(x, weight, scale, torch.bfloat16, Tiles(outputs, tokens, split, warps, stages, ready))

    return product


def cases() -> list[Case]:
    found: list[Case] = []
    for name, shape in SHAPES.items():
        for tokens in (1, 2, 4, 8, 32, 64, 128, 256, 1024, 8192):
            found.append(case(name, tokens, shape, True, linear))
        for tokens in (2, 4):
            for way in ("gemv", "gemm"):
                product = quantised_before(shape[1], way == "gemv")
                found.append(case(f"{name} quantised before {way}", tokens, shape, True, product))
        for rows, warps in ((4, 4), (8, 4), (8, 8), (16, 4), (16, 8)):
            found.append(case(f"{name} gemv BO={rows} w{warps}", 1, shape, True, gemv_of(rows, warps)))
        for rows, warps in ((4, 4), (8, 4), (16, 8)):
            found.append(case(f"{name} early gemv BO={rows} w{warps}", 1, shape, True, gemv_of(rows, warps, True)))
            if shape[1] == 2048:
                for early in (False, True):
                    label = f"{' early' if early else ''} BO={rows} w{warps}"
                    inside, ready = norm_gemv_of(rows, warps, early), ready_gemv_of(rows, warps, early)
                    found.append(case(f"{name} + ba, norm inside,{label}", 1, shape, True, inside))
                    found.append(case(f"{name} + ba, quantised before,{label}", 1, shape, True, ready))
        for split in (1, 2, 4, 8):
            for stages in (3, 5):
                product = gemm_of(64, 16, split, 4, stages, False)
                found.append(case(f"{name} gemm BO=64 BT=16 split={split} s{stages}", 8, shape, True, product))
        found.append(case(f"{name} gemm BO=64 BT=16", 4, shape, True, gemm_of(64, 16, 4, 4, 4, False)))
        for split in (1, 2, 4):
            product = gemm_of(64, 32, split, 4, 4, True)
            found.append(case(f"{name} gemm BO=64 BT=32 split={split}", 32, shape, True, product))
        for tokens in (128, 256):
            found.append(case(f"{name} vendor", tokens, shape, True, vendor))
            for split in (1, 2, 4, 8):
                product = gemm_of(128, 64, split, 4, 3, True)
                found.append(case(f"{name} gemm BO=128 BT=64 split={split}", tokens, shape, True, product))
    for tokens in (128, 8192):
        found.append(case("quantize rows", tokens, (1, 2048), True, quantize_only))
    for tokens, cuts in ((32, ((64, 32, 4), (64, 32, 16))), (128, ((64, 64, 4), (64, 64, 8), (64, 128, 8)))):
        for outputs, narrow, split in cuts:
            label = f"router gemm BO={outputs} BT={narrow} split={split}"
            found.append(case(label, tokens, PLAIN["router"], False, gemm_of(outputs, narrow, split, 4, 3, False)))
    for tokens in (1024, 8192):
        for outputs, narrow, split, warps in ((64, 64, 1, 4), (64, 128, 1, 4), (64, 128, 2, 4), (128, 128, 1, 8)):
            label = f"router gemm BO={outputs} BT={narrow} split={split} w{warps}"
            found.append(case(label, tokens, PLAIN["router"], False, gemm_of(outputs, narrow, split, warps, 3, False)))
        found.append(case("padded router torch", tokens, (520, 2048), False, torch_dense))
    for name, shape in PLAIN.items():
        product, out_bytes = (logits, 4) if name == "lm_head" else (linear, 2)
        for tokens in (1, 2, 4, 8, 32, 64, 128, 256) if name == "lm_head" else (1, 2, 4, 8, 32, 128, 256, 1024, 8192):
            found.append(case(name, tokens, shape, False, product, out_bytes))
        for tokens in (1, 8, 32, 64):
            found.append(case(f"{name} torch", tokens, shape, False, torch_dense))
        for rows, warps in ((1, 4), (2, 4), (4, 4), (8, 4), (8, 8)):
            found.append(case(f"{name} gemv BO={rows} w{warps}", 1, shape, False, gemv_of(rows, warps)))
    return found
