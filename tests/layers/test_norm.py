"""The Gemma norm holds 1 + w, never narrower than float32, and joins the residual stream."""

from __future__ import annotations

import pytest
import torch

from deltaserve.layers.norm import GemmaNorm
from tests.layers.filled import CPU, F64, filled


@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)]
)
def test_the_weight_is_wide(dtype: torch.dtype, held: torch.dtype) -> None:
    assert GemmaNorm(4, 1e-6, dtype, CPU).weight_plus_one.dtype == held


def test_the_weight_is_used_as_it_stands() -> None:
    layer = filled(GemmaNorm(6, 1e-3, F64, CPU))
    x_D = torch.randn(2, 3, 6, dtype=F64)
    expected = x_D / (x_D.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight_plus_one
    torch.testing.assert_close(layer(x_D), expected)


def test_add() -> None:
    layer = filled(GemmaNorm(6, 1e-3, F64, CPU))
    x_TD, residual_TD = torch.randn(2, 3, 6, dtype=F64)
    normed, stream = layer.add(x_TD, residual_TD)
    torch.testing.assert_close(stream, x_TD + residual_TD)
    torch.testing.assert_close(normed, layer(x_TD + residual_TD))
