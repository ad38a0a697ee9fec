"""The kernels of the norms on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.norm import reference
from deltaserve.ops.norm.api import add_gemma_rms_norm, gated_rms_norm, gemma_rms_norm

pytestmark = pytest.mark.gpu
EPS = 1e-6
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TOKENS = [1, 2, 63, 64, 65, 127, 128, 1000]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [2048, 192, 7])
def test_norm_and_add_norm(width: int, tokens: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(tokens, width, device="cuda").to(dtype) for _ in range(2))
    weight = 1 + torch.randn(width, device="cuda")
    normed, total = add_gemma_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert error(normed, reference.gemma_rms_norm(total.double(), weight.double(), EPS)) <= LIMITS[dtype]
    assert (
        error(gemma_rms_norm(x, weight, EPS), reference.gemma_rms_norm(x.double(), weight.double(), EPS))
        <= (LIMITS[dtype])
    )


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_norm(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 32, 128, device="cuda").to(dtype)
    z = torch.randn(tokens, 12352, device="cuda").to(dtype)[:, 8192:12288].view(tokens, 32, 128)
    weight = torch.rand(128, device="cuda").to(dtype)
    expected = reference.gated_rms_norm(x.double(), z.double(), weight.double(), EPS)
    assert error(gated_rms_norm(x, z, weight, EPS), expected) <= LIMITS[dtype]


def test_heads_of_a_view_and_rows_of_nan() -> None:
    wide = torch.randn(65, 36, 256, device="cuda")
    weight = torch.rand(256, device="cuda")
    view = wide[:, 16:20]
    expected = reference.gemma_rms_norm(view.double(), weight.double(), EPS)
    wide[5] = torch.nan
    normed = gemma_rms_norm(view, weight, EPS)
    kept = [row for row in range(65) if row != 5]
    assert error(normed[kept], expected[kept]) <= 1e-5
    assert bool(normed[5].isnan().all())
