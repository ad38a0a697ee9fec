"""The dense SwiGLU: whole layers without experts, and the expert that all tokens share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.linear import Linear
from deltaserve.layers.normed import Normed


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(
        self, hidden_size: int, inner_size: int, dtype: torch.dtype, device: torch.device, quantized: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * inner_size, dtype, device, quantized)
        self.down_proj = Linear(inner_size, hidden_size, dtype, device, quantized)

    def forward(self, x_TD: Tensor | Normed, context: ForwardContext | None = None) -> Tensor:
        """[T, hidden_size] -> the same."""
        gate_TI, up_TI = torch.chunk(self.gate_up_proj(x_TD), 2, dim=-1)
        out_TD: Tensor = self.down_proj(functional.silu(gate_TI).mul_(up_TI))
        return out_TD
