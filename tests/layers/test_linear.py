"""A projection is a product with its weight, which needs no gradient."""

from __future__ import annotations

import torch

from deltaserve.layers.linear import Linear, weight
from tests.layers.filled import CPU, F64, filled


def test_projection() -> None:
    layer = filled(Linear(5, 3, F64, CPU))
    x_TI = torch.randn(4, 5, dtype=F64)
    torch.testing.assert_close(layer(x_TI), x_TI @ layer.weight.T)


def test_a_weight_waits_to_be_filled() -> None:
    fresh = weight(2, 3, dtype=torch.bfloat16, device=CPU)
    assert (fresh.shape, fresh.dtype, fresh.requires_grad) == ((2, 3), torch.bfloat16, False)
    assert fresh.isnan().all(), "fresh memory is NaN in tests"
