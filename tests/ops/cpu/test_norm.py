"""Norms by kernels on a CPU against float64."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.norm import api, numba_norm, reference
from tests.ops.guarded import guarded, relative

EPS = 1e-6


@pytest.mark.parametrize("shape", [(1, 8), (3, 192), (2, 5, 16), (0, 8)], ids=str)
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.rand(shape[-1]) + 0.5
    with guarded():
        norm = numba_norm.norm(x, weight, EPS)
        added, total = numba_norm.add_norm(x, residual, weight, EPS)
    assert norm.shape == added.shape == total.shape == shape
    if x.numel():
        assert relative(norm, reference.gemma_rms_norm(x.double(), weight.double(), EPS)) < 1e-6
        exact, _ = reference.add_gemma_rms_norm(x.double(), residual.double(), weight.double(), EPS)
        assert relative(added, exact) < 1e-6
    assert torch.equal(total, x + residual)


def test_small_and_zero_rows() -> None:
    x = torch.cat([torch.zeros(1, 16), torch.full((1, 16), 1e-4), torch.full((1, 16), 1e6)])
    weight = torch.ones(16)
    exact = reference.gemma_rms_norm(x.double(), weight.double(), EPS)
    torch.testing.assert_close(numba_norm.norm(x, weight, EPS).double(), exact, rtol=1e-6, atol=0)


def test_a_row_of_zeros_without_eps_is_not_a_number() -> None:
    x, weight = torch.stack([torch.zeros(16), torch.ones(16)]), torch.ones(16)
    found = numba_norm.norm(x, weight, 0.0)
    assert found[0].isnan().all()
    assert torch.equal(found[1], x[1])


def test_a_weight_with_gaps() -> None:
    x, weight = torch.randn(3, 16), torch.rand(32)[::2]
    expected = reference.gemma_rms_norm(x, weight, EPS)
    torch.testing.assert_close(api.gemma_rms_norm(x, weight, EPS), expected)
    torch.testing.assert_close(api.add_gemma_rms_norm(x, torch.zeros(3, 16), weight, EPS)[0], expected)


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = torch.randn(3, 16), torch.rand(16)
    expected = numba_norm.norm(x, weight, EPS)
    x[1, 3] = torch.nan
    found = numba_norm.norm(x, weight, EPS)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("width", [16, 12])
def test_the_facade(width: int) -> None:
    """Also where there are no whole vectors, gaps, and rows that are yet to be added up."""
    x, residual, weight = torch.randn(4, 3, width), torch.randn(4, width), torch.rand(width) + 0.5
    exact, exact_total = api.add_gemma_rms_norm(x.double(), residual.double(), weight.double(), EPS)
    for found, right in zip(api.add_gemma_rms_norm(x, residual, weight, EPS), (exact, exact_total), strict=True):
        assert relative(found, right) < 1e-6
    gaps = x[:, 1]
    assert relative(api.gemma_rms_norm(gaps, weight, EPS), api.gemma_rms_norm(gaps.double(), weight.double(), EPS)) < (
        1e-6
    )
    found, total = api.add_gemma_rms_norm(gaps, residual, weight, EPS)
    exact, _ = api.add_gemma_rms_norm(gaps.double(), residual.double(), weight.double(), EPS)
    assert relative(found, exact) < 1e-6
    assert torch.equal(total, gaps + residual)
