"""The Gemma norm of the residual stream and of queries and keys. Its weight is held as 1 + w, in fp32 at least."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.linear import weight
from deltaserve.layers.normed import Normed
from deltaserve.ops.norm.api import add_gemma_rms_norm, gemma_rms_norm


class GemmaNorm(nn.Module):
    """`x / rms(x) * (1 + w)` over the last dimension."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight_plus_one = weight(width, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., width] -> the same."""
        return gemma_rms_norm(x_D, self.weight_plus_one, self.eps)

    def later(self, x_TD: Tensor, residual_TD: Tensor, quantizes: bool = False) -> Normed:
        """As `add`, but computed by whoever needs it first; `quantizes` as in `Normed`."""
        return Normed(x_TD, residual_TD, self.weight_plus_one, self.eps, quantizes)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and that sum."""
        return add_gemma_rms_norm(x_TD, residual_TD, self.weight_plus_one, self.eps)
