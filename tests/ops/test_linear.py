"""The projection against float64, and quantised weights against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear.api import dequantize_weight, linear, quantize_rows, quantize_weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_linear(tokens: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 48).to(dtype), torch.randn(10, 48).to(dtype)
    output = linear(x, weight)
    assert output.dtype == dtype
    eps = max(1e-12, 16 * float(torch.finfo(dtype).eps))
    expected = torch.einsum("ti,oi->to", x.double(), weight.double())
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=eps)


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(AssertionError, match="48 wide, the weight expects 47"):
        linear(torch.zeros(1, 48), torch.zeros(3, 47))


def blockwise(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The definition, block by block, in float64."""
    output = torch.zeros(len(x), len(weight)).double()
    for start in range(0, x.shape[1], 128):
        part = x[:, start : start + 128]
        amax = part.float().abs().amax(1, keepdim=True)
        x_scale = torch.where(amax == 0, 1.0, amax / 448)
        x_q = (part.float() / x_scale).to(torch.float8_e4m3fn)
        partial = x_q.double() @ weight[:, start : start + 128].double().T
        output += partial * x_scale * scale[:, start // 128].repeat_interleave(128)[: len(weight)]
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 128, 128), (3, 256, 384), (5, 200, 70), (2, 48, 130)])
def test_quantised_linear(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs)
    x[0, : min(inputs, 128)] = 0
    weight_q, scale = quantize_weight(weight)
    output = linear(x, weight_q, scale)
    assert output.dtype == dtype
    eps = 16 * float(torch.finfo(dtype).eps)
    torch.testing.assert_close(output.double(), blockwise(x, weight_q, scale), rtol=eps, atol=eps * inputs**0.5)
    assert linear(x, weight_q, scale, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("shape", [(128, 128), (3, 200, 70), (2, 2, 130, 300)])
def test_a_quantised_weight_stands_for_the_weight(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * torch.rand(shape[-1])
    weight[..., :128, :128] = 0
    weight_q, scale = quantize_weight(weight)
    assert (weight_q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert (scale[..., 0, 0] == 1).all()
    again = dequantize_weight(weight_q, scale, torch.float32)
    step = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    error = (again - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, step * 2**-10) * 1.001).all()


def test_quantised_rows_reach_the_largest_number_and_keep_zero() -> None:
    x = torch.randn(4, 300)
    x[1], x[2, 5] = 0, 1e4
    x_q, scale = quantize_rows(x)
    assert (x_q.shape, scale.shape) == ((4, 300), (4, 3))
    assert x_q[2, 5].float() == 448
    assert (scale[1] == 1).all()
    assert (x_q[1].float() == 0).all()


def test_scales_that_do_not_belong_are_refused() -> None:
    weight, scale = quantize_weight(torch.randn(130, 48))
    with pytest.raises(AssertionError, match="has no scales"):
        linear(torch.zeros(1, 48), weight, scale[:1])
