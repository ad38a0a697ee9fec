"""The kernels of the norms, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear.triton_fp8 import READY_ALONE, quantize_rows
from deltaserve.ops.moe import triton_members
from deltaserve.ops.norm import reference, triton_norm
from tests.ops.guarded import guarded

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(actual: Tensor, expected: Tensor) -> None:
    eps = max(4e-6, float(torch.finfo(actual.dtype).eps))
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 192), (65, 64), (3, 5, 32), (2, 2048), (1, 1), (0, 64)])
def test_gemma_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), 1 + torch.randn(shape[-1])
    normed = triton_norm.norm_rows(x, weight, EPS)
    assert normed.dtype == dtype
    close(normed, reference.gemma_rms_norm(x.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128])
def test_add_gemma_norm(dtype: torch.dtype, tokens: int) -> None:
    wide = torch.randn(tokens, 200).to(dtype)
    x, residual, weight = wide[:, :96], torch.randn(tokens, 96).to(dtype), 1 + torch.randn(96)
    normed, total = triton_norm.add_norm_rows(x, residual, weight, EPS)
    assert normed.dtype == total.dtype == dtype
    if dtype == torch.bfloat16:  # the interpreter cuts where a GPU rounds
        torch.testing.assert_close(total, x + residual, rtol=2**-7, atol=0)
    else:
        assert torch.equal(total, x + residual)
    close(normed, reference.gemma_rms_norm(total.double(), weight.double(), EPS))


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float16, torch.float32), (torch.float16, torch.float16)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 96), (5, 96), (5, 2048)])
def test_add_rows_and_norm(tokens: int, width: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(tokens, 3, width).to(wide),
        torch.randn(tokens, width).to(dtype),
        torch.rand(width),
    )
    x[:, 1:] *= 1e6 if wide == torch.float32 else 1e3
    x[:, 2] = -x[:, 1]  # the order of the sum shows: what the first row loses to the second does not come back
    added = reference.add_up(x, dtype)
    assert torch.equal(triton_members.add_up(x, dtype), added)
    with guarded():
        found = triton_norm.add_norm_rows(x, residual, weight, EPS)
    for actual, expected in zip(found, triton_norm.add_norm_rows(added, residual, weight, EPS), strict=True):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_gated_norm(dtype: torch.dtype, tokens: int) -> None:
    x = torch.randn(tokens, 3, 32).to(dtype)
    z = torch.randn(tokens, 300).to(dtype)[:, 100:196].view(tokens, 3, 32)
    weight = torch.randn(32).to(dtype)
    out = triton_norm.gated_norm_rows(x, z, weight, EPS)
    close(out, reference.gated_rms_norm(x.double(), z.double(), weight.double(), EPS))
    flat = triton_norm.gated_norm_rows(x.reshape(-1, 32), z.reshape(-1, 32), weight, EPS)
    assert torch.equal(flat, out.view(-1, 32))


@pytest.mark.parametrize("tokens", [READY_ALONE - 1, READY_ALONE, READY_ALONE + 1])
def test_a_gated_norm_that_quantises(tokens: int) -> None:
    """Many tokens leave nothing but what the product after it reads."""
    x, z, weight = torch.randn(tokens, 1, 128).half(), torch.randn(tokens, 1, 128).half(), torch.randn(128)
    plain = triton_norm.gated_norm_rows(x, z, weight, EPS)
    with guarded():
        out, ready = triton_norm.gated_norm_rows_quantized(x, z, weight, EPS)
    for found, expected in zip(ready, quantize_rows(plain.flatten(1)), strict=True):
        assert torch.equal(found.float(), expected.float())
    assert torch.equal(out, plain) if tokens <= READY_ALONE else out.isnan().all()


def test_heads_of_a_view_and_rows_of_nan() -> None:
    wide = torch.randn(5, 7, 32)
    view, weight = wide[:, 1:3, :24], torch.rand(24)
    expected = reference.gemma_rms_norm(view.double(), weight.double(), EPS)
    wide[2] = torch.nan
    normed = triton_norm.norm_rows(view, weight, EPS)
    close(normed[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert bool(normed[2].isnan().all())


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e4])
def test_tiny_and_large(scale: float) -> None:
    x, weight = scale * torch.randn(4, 16), torch.ones(16)
    close(triton_norm.norm_rows(x, weight, EPS), reference.gemma_rms_norm(x.double(), weight.double(), EPS))
