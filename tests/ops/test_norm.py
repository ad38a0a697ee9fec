"""The norms against float64 by hand, and against transformers where the order of casts matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from deltaserve.ops.norm.api import add_gemma_rms_norm, gated_rms_norm, gemma_rms_norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 192), (5, 7), (3, 4, 64), (2, 1)]
EPS = 1e-6


def naive(x: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS)


def close(actual: Tensor, expected: Tensor) -> None:
    """One rounding to the output's dtype, and a few of the computation's."""
    rounding = torch.finfo(actual.dtype).eps
    computing = torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps
    eps = float(rounding if rounding > computing else 8 * computing)
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps / 8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (3 * torch.randn(shape)).to(dtype), 1 + torch.randn(shape[-1])
    output = gemma_rms_norm(x, weight, EPS)
    assert output.dtype == dtype
    close(output, naive(x) * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gemma_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype), 1 + torch.randn(32)
    before = residual.clone()
    normed, stream = add_gemma_rms_norm(x, residual, weight, EPS)
    assert normed.dtype == stream.dtype == dtype
    assert torch.equal(stream, x + residual)
    assert torch.equal(residual, before)
    close(normed, naive(stream) * weight.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, z, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    output = gated_rms_norm(x, z, weight, EPS)
    assert output.dtype == dtype
    close(output, naive(x) * weight.double() * z.double() / (1 + torch.exp(-z.double())))


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-3, 1e4])
def test_tiny_and_large_inputs(scale: float) -> None:
    x, weight = scale * torch.randn(4, 16), torch.ones(16)
    close(gemma_rms_norm(x, weight, EPS), naive(x))
    close(gated_rms_norm(x, torch.ones(4, 16), weight, EPS), naive(x) / (1 + torch.exp(torch.tensor(-1.0).double())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rms_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    """Once, after the product with the weight: another order would differ in many elements."""
    x, weight = torch.randn(200, 64).to(dtype), torch.randn(64).to(dtype)
    theirs = Qwen3NextRMSNorm(64, EPS).to(dtype)
    theirs.weight.data = weight
    ours, expected = gemma_rms_norm(x, 1 + weight.float(), EPS), theirs(x)
    if dtype != torch.float32:
        assert (ours != expected).float().mean() < 1e-3
    torch.testing.assert_close(ours, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gated_rms_norm_is_as_near_as_transformers(dtype: torch.dtype) -> None:
    """Transformers rounds to the model's dtype before the gate; here nothing is rounded before the end."""
    x, z, weight = (torch.randn(shape).to(dtype) for shape in ((200, 64), (200, 64), (64,)))
    theirs = Qwen3NextRMSNormGated(64, EPS).to(dtype)
    theirs.weight.data = weight
    ours, exact = gated_rms_norm(x, z, weight, EPS), naive(x) * weight.double() * z.double().sigmoid() * z.double()
    torch.testing.assert_close(ours, theirs(x, z), rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
    assert (ours - exact).abs().mean() <= 1.01 * (theirs(x, z) - exact).abs().mean()


@pytest.mark.parametrize("norm", [gemma_rms_norm, lambda x, w, eps: gated_rms_norm(x, torch.ones_like(x), w, eps)])
def test_heads_are_normed_one_by_one_also_in_a_view(norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    wide = torch.randn(5, 4, 32)
    view, weight = wide[:, 1:3, :16], torch.rand(16)
    output = norm(view, weight, EPS)
    for head in range(2):
        torch.testing.assert_close(output[:, head], norm(view[:, head].contiguous(), weight, EPS))


def test_a_row_of_nan_stays_alone() -> None:
    x = torch.randn(3, 16)
    expected = gemma_rms_norm(x, torch.ones(16), EPS)
    x[1] = torch.nan
    assert torch.equal(gemma_rms_norm(x, torch.ones(16), EPS)[[0, 2]], expected[[0, 2]])


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(AssertionError, match="8 wide"):
        gemma_rms_norm(x, torch.zeros(7), EPS)
    with pytest.raises(AssertionError, match="the residual"):
        add_gemma_rms_norm(x, torch.zeros(1, 8), torch.zeros(8), EPS)
    with pytest.raises(AssertionError, match="the gate"):
        gated_rms_norm(x, torch.zeros(2, 7), torch.zeros(8), EPS)
