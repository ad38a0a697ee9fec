"""Projections without bias, and how a layer gets its weights. Knows no checkpoint: a loader fills what is made here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.normed import Normed
from deltaserve.ops.linear.api import Ready, allocate, linear, linear_beside, scale_shape

FP8 = torch.float8_e4m3fn


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A weight not yet filled, for inference only."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def projection(out_width: int, in_width: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """The weight [out_width, in_width] of a `linear`, not yet filled, in memory as the device reads it fastest."""
    return nn.Parameter(allocate(out_width, in_width, dtype, device), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T`. Several projections of one input share one `Linear`: their rows stand one after the other.

    A quantised one has its weight in FP8 (e4m3) and in `weight_scale_inv` the factor of each 128 x 128 block of it;
    its input is quantised as it comes.
    """

    def __init__(
        self, in_width: int, out_width: int, dtype: torch.dtype, device: torch.device, quantized: bool = False
    ) -> None:
        super().__init__()
        self.weight = projection(out_width, in_width, FP8 if quantized else dtype, device)
        self.weight_scale_inv: nn.Parameter | None = None
        if quantized:
            scales = scale_shape((out_width, in_width))
            self.weight_scale_inv = weight(*scales, dtype=torch.float32, device=device)

    def forward(self, x_TI: Tensor | Normed, ready: Ready | None = None) -> Tensor:
        """[T, in_width] -> [T, out_width], in the input's dtype. `ready`: the input quantised, if that was done."""
        if isinstance(x_TI, Normed):
            return x_TI.project(self.weight, self.weight_scale_inv)[0]
        return linear(x_TI, self.weight, self.weight_scale_inv, ready=ready)

    def beside(self, x_TI: Tensor | Normed, other: Linear) -> tuple[Tensor, Tensor]:
        """What this projection and another, plain one make of one input."""
        if not isinstance(x_TI, Normed):
            return linear_beside(x_TI, self.weight, self.weight_scale_inv, other.weight)
        y_TO, y_TP = x_TI.project(self.weight, self.weight_scale_inv, other.weight)
        assert y_TP is not None
        return y_TO, y_TP
