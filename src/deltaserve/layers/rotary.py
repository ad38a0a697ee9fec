"""Rotary positions for queries and keys. One table, shared by all attention layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltaserve.ops.rope.api import apply_rope, rope_table


class Rotary(nn.Module):
    """Rotates the first `rotary_dim` dimensions of every head by its token's position."""

    cos_sin: Tensor

    def __init__(
        self,
        max_position: int,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        table = rope_table(max_position, rotary_dim, theta, scaling, device=device)
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, q_THD: Tensor, k_TGD: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated q and k; positions below `max_position`."""
        return apply_rope(q_THD, k_TGD, position_T, self.cos_sin)
