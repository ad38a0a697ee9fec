"""Projections without bias, and how a layer gets its weights. Knows no checkpoint: a loader fills what is made here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.ops.linear.api import linear


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A weight not yet filled, for inference only."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T`. Several projections of one input share one `Linear`: their rows stand one after the other."""

    def __init__(self, in_width: int, out_width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight(out_width, in_width, dtype=dtype, device=device)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, in_width] -> [T, out_width], in the weight's dtype."""
        return linear(x_TI, self.weight)
