"""Dense projection in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return functional.linear(x_TI, weight_OI)
