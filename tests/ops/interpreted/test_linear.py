"""Kernels of the projection, interpreted: against the reference in float64, between margins, over fresh NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear import gpu, reference
from deltaserve.ops.linear.triton_fp8 import READY_ALONE, quantize_rows
from deltaserve.ops.linear.triton_gemm import Tiles, gemm, gemm_beside
from deltaserve.ops.linear.triton_gemv import gemv, gemv_beside, norm_gemv
from deltaserve.ops.norm.reference import add_gemma_rms_norm, add_up
from deltaserve.ops.norm.triton_norm import add_norm_rows_quantized
from tests.ops.guarded import guarded, relative

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}


def expected_of(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return x.double() @ weight.double().T
    x_q, x_scale = reference.quantize_rows(x)
    x = reference.dequantize_rows(x_q, x_scale, torch.float64)
    return x @ reference.dequantize_weight(weight, scale, torch.float64).T


def operands(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, quantized: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs) / inputs**0.5
    x[-1, :128] = 0
    if quantized:
        return (x, *reference.quantize_weight(weight))
    return x, weight.to(dtype), None


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_plain_weight_beside_another(tokens: int, quantized: bool) -> None:
    x, beside = torch.randn(tokens, 256), torch.randn(9, 256)
    weight: Tensor = torch.randn(130, 256)
    scale: Tensor | None = None
    if quantized:
        weight, scale = reference.quantize_weight(weight)
    with guarded():
        outputs = gemv_beside(x, weight, scale, beside, rows=4)
    expected = reference.linear(x, weight, scale), x.double() @ beside.double().t()
    for output, exact in zip(outputs, expected, strict=True):
        assert relative(output, exact) < 1e-5


@pytest.mark.parametrize("width", [64, 200, 256])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_before_the_product(width: int, quantized: bool, dtype: torch.dtype) -> None:
    x, residual, gain = torch.randn(1, width).to(dtype), torch.randn(1, width).to(dtype), torch.rand(width)
    weight: Tensor = torch.randn(130, width)
    scale: Tensor | None = None
    weight, scale = reference.quantize_weight(weight) if quantized else (weight.to(dtype), None)
    expected_norm, expected_total = add_gemma_rms_norm(x, residual, gain, 1e-6)
    for beside in (None, torch.randn(9, width).to(dtype)):
        with guarded():
            output, other, norm, total = norm_gemv(x, residual, gain, 1e-6, weight, scale, beside, rows=4)
        assert torch.equal(total, expected_total)
        assert relative(norm, expected_norm) < (1e-6 if dtype == torch.float32 else 1e-3)
        limit = 1e-5 if dtype == torch.float32 else 2e-3
        assert relative(output, reference.linear(norm, weight, scale, torch.float64)) < limit
        assert (other is None) == (beside is None)
        if other is not None and beside is not None:
            assert relative(other, norm.double() @ beside.double().t()) < limit


@pytest.mark.parametrize("width", [64, 200, 256])
def test_a_norm_that_quantises(width: int) -> None:
    x, residual, gain = torch.randn(1, width), torch.randn(1, width), torch.rand(width)
    weight, scale = reference.quantize_weight(torch.randn(130, width))
    with guarded():
        norm, total, ready = add_norm_rows_quantized(x, residual, gain, 1e-6)
        output = gemv(norm, weight, scale, torch.float32, ready=ready)
        same = gemv_beside(norm, weight, scale, torch.randn(5, width), ready=ready)[0]
    expected_norm, expected_total = add_gemma_rms_norm(x, residual, gain, 1e-6)
    assert torch.equal(total, expected_total)
    assert relative(norm, expected_norm) < 1e-6
    for found, expected in zip(ready, reference.quantize_rows(norm), strict=True):
        assert torch.equal(found[:1].float(), expected.float())
    assert relative(output, expected_of(norm, weight, scale)) < 1e-6
    assert torch.equal(same, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "addends"), [(1, 0), (3, 2), (5, 0), (70, 0)])
def test_products_with_what_a_norm_has_quantised(tokens: int, addends: int, dtype: torch.dtype) -> None:
    """They are those with what is quantised alone, bit for bit."""
    width = 200
    x = torch.randn(*((tokens, addends, width) if addends else (tokens, width))).to(dtype)
    residual, gain, beside = torch.randn(tokens, width).to(dtype), torch.rand(width), torch.randn(9, width).to(dtype)
    weight, scale = reference.quantize_weight(torch.randn(130, width))
    with guarded():
        output, other, norm, total, ready = gpu.norm_linear(x, residual, gain, 1e-6, weight, scale, beside, False)
        plain, none, same, _, also_ready = gpu.norm_linear(x, residual, gain, 1e-6, beside, None, None, tokens > 1)
    assert ready is not None
    assert torch.equal(total, add_up(x, dtype) + residual if addends else x + residual)
    own = quantize_rows(norm)
    for found, expected in zip(ready, own, strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found.float(), expected.float())
    assert torch.equal(output, gpu.linear(norm, weight, scale, dtype, own))
    assert other is not None
    assert torch.equal(other, gpu.linear(norm, beside, None, dtype))
    assert none is None
    assert relative(plain, other) < 2e-3
    assert relative(same, norm) < 2e-3
    assert (also_ready is None) == (tokens == 1), "the norm of one token is inside its plain product"


def test_a_norm_for_experts_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales stand row by row."""
    monkeypatch.setattr(gpu, "GATHERED", 4)
    x, residual, gain, router = torch.randn(5, 200), torch.randn(5, 200), torch.rand(200), torch.randn(9, 200)
    with guarded():
        *_, norm, _, ready = gpu.norm_linear(x, residual, gain, 1e-6, router, None, None, True)
    assert ready is not None
    assert ready[1].is_contiguous()
    for found, expected in zip(ready, quantize_rows(norm), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(1, 70, 300), (2, 17, 128), (3, 130, 48), (4, 20, 256), (2, 5, 4300)]
)
def test_gemv(tokens: int, outputs: int, inputs: int, quantized: bool, dtype: torch.dtype) -> None:
    x, weight, scale = operands(tokens, outputs, inputs, dtype, quantized)
    with guarded():
        output = gemv(x, weight, scale, dtype)
        wide = gemv(x, weight, scale, torch.float32, rows=4)
    expected = expected_of(x, weight, scale)
    assert (output.dtype, wide.dtype) == (dtype, torch.float32)
    assert relative(output, expected) < LIMITS[dtype]
    assert relative(wide, expected) < 1e-6


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [64, 200, 256])
def test_a_gemv_of_tokens_that_come_quantised(width: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of tokens that it quantises itself; what stands in a fourth row for three goes nowhere."""
    x, beside = torch.randn(tokens, width), torch.randn(9, width)
    weight, scale = reference.quantize_weight(torch.randn(130, width))
    x_q, x_scale = quantize_rows(x)
    x_scale[tokens:] = torch.nan
    with guarded():
        output, other = gemv_beside(x, weight, scale, beside, ready=(x_q, x_scale))
        expected, expected_other = gemv_beside(x, weight, scale, beside)
    assert torch.equal(output, expected)
    assert torch.equal(other, expected_other)
    monkeypatch.setattr(gpu, "READY_GEMV", 4)
    assert torch.equal(gpu.linear(x, weight, scale, x.dtype, (x_q, x_scale)), output)
    for found, whole in zip(gpu.linear_beside(x, weight, scale, beside, (x_q, x_scale)), (output, other), strict=True):
        assert torch.equal(found, whole)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 17, 63, 64, 65, 127, 128])
def test_gemm(tokens: int, quantized: bool) -> None:
    x, weight, scale = operands(tokens, 150, 200, torch.float32, quantized)
    with guarded():
        output = gemm(x, weight, scale, torch.float32)
    assert relative(output, expected_of(x, weight, scale)) < 1e-6


@pytest.mark.parametrize(("quantized", "dtype"), [(False, torch.float16), (True, torch.float32)])
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(64, 16, split=3),
        Tiles(64, 32, split=2, ready=True),
        Tiles(32, 64, split=4),
        Tiles(64, 64, split=4, ready=True),
        Tiles(16, 64, split=4),
        Tiles(128, 128, ready=True),
    ],
)
def test_cuts_of_a_gemm(tiles: Tiles, quantized: bool, dtype: torch.dtype) -> None:
    x, weight, scale = operands(21, 140, 520, dtype, quantized)
    for _ in range(2):  # the counters of a split are zero again
        with guarded():
            output = gemm(x, weight, scale, dtype, tiles)
        assert relative(output, expected_of(x, weight, scale)) < LIMITS[dtype]


@pytest.mark.parametrize(("quantized", "dtype"), [(False, torch.float16), (True, torch.float32)])
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(64, 16, split=2, held=2),
        Tiles(64, 16, split=2, ready=True, held=2),
        Tiles(64, 64, split=4, held=1),
        Tiles(64, 16, held=1),
    ],
)
def test_blocks_that_are_held_change_nothing(tiles: Tiles, quantized: bool, dtype: torch.dtype) -> None:
    x, weight, scale = operands(21, 140, 512, dtype, quantized)
    with guarded():
        output = gemm(x, weight, scale, dtype, tiles)
        loaded = gemm(x, weight, scale, dtype, replace(tiles, held=0))
    assert torch.equal(output, loaded)
    assert relative(output, expected_of(x, weight, scale)) < LIMITS[dtype]


@pytest.mark.parametrize(("width", "held"), [(512, 2), (520, 2), (512, 0), (128, 0)])
@pytest.mark.parametrize("tokens", [5, 21])
def test_a_plain_weight_beside_a_quantised_one(tokens: int, width: int, held: int) -> None:
    x, weight, scale = operands(tokens, 140, width, torch.float32, True)
    _, beside, _ = operands(tokens, 70, width, torch.float32, False)
    tiles = Tiles(64, 16, split=2, held=held)
    for _ in range(2):  # the counters of both are zero again
        with guarded():
            output, other = gemm_beside(x, weight, scale, beside, tiles)
            come_ready, same = gemm_beside(x, weight, scale, beside, tiles, ready=quantize_rows(x))
            apart = gemm(x, weight, scale, torch.float32, tiles)
        assert torch.equal(output, apart)
        assert torch.equal(come_ready, output)
        assert torch.equal(other, same)
        assert relative(other, x.double() @ beside.double().T) < 1e-6


def test_inputs_with_strides() -> None:
    x, weight, _ = operands(6, 40, 300, torch.float32, False)
    for tokens in (2, 6):
        part = x[:tokens, 100:228]
        product = gemv if tokens == 2 else gemm
        assert relative(product(part, weight[:, :128], None, torch.float32), part @ weight[:, :128].T) < 1e-6


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("width", [128, 300, 2200])
def test_quantised_rows_are_the_references(width: int, tokens: int) -> None:
    x = torch.randn(tokens, width) * torch.logspace(-8, 8, width)
    x[0, :128] = 0
    with guarded():
        x_q, scale = quantize_rows(x)
    expected_q, expected_scale = reference.quantize_rows(x)
    padded = -(-tokens // 4) * 4
    assert (x_q.shape, scale.shape, scale.stride()) == ((padded, width), (padded, -(-width // 128)), (1, padded))
    assert torch.equal(scale[:tokens], expected_scale)
    assert (x_q[tokens:].float() == 0).all()
    # A division and a product with the inverse round apart now and then, by one step of e4m3.
    differ = x_q[:tokens].float() != expected_q.float()
    assert differ.float().mean() < 1e-3
    assert (x_q[:tokens].float() - expected_q.float()).norm() <= 1e-3 * expected_q.float().norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_of_nan_stays_alone() -> None:
    x, weight, scale = operands(20, 70, 256, torch.float32, True)
    whole = gemm(x, weight, scale, torch.float32)
    x[3] = torch.nan
    output = gemm(x, weight, scale, torch.float32)
    keep = torch.arange(20) != 3
    assert torch.equal(output[keep], whole[keep])


def test_many_tokens_need_only_their_quantised_form() -> None:
    x, weight, scale = operands(READY_ALONE + 1, 130, 256, torch.float16, True)
    ready = quantize_rows(x)
    expected = gpu.linear(x, weight, scale, torch.float16, ready)
    found = gpu.linear(torch.full_like(x, torch.nan), weight, scale, torch.float16, ready)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("height", [513, 519])
def test_rows_behind_an_uneven_weight(height: int) -> None:
    memory = torch.randn(520, 16).bfloat16()
    found = gpu.with_rows_behind(memory[:height])
    assert found is not None
    assert torch.equal(found, memory)
    assert gpu.with_rows_behind(memory[:height].clone()) is None
    assert gpu.with_rows_behind(memory[520 - height % 8 :]) is None
    assert gpu.with_rows_behind(memory[:, :8]) is None
