"""Sparse mixture of experts with one shared expert. Knows no device and no placement of experts.

Shape letters: T tokens, D hidden width, E experts, K experts per token, I inner width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.linear import Linear, weight
from deltaserve.layers.mlp import SwiGLU
from deltaserve.ops.moe.api import experts, route


class SparseMoe(nn.Module):
    """The chosen experts' weighted sum, plus `sigmoid(gate(x)) * shared(x)`."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        inner_size: int,
        shared_size: int,
        renormalize: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.router = Linear(hidden_size, num_experts + 1, dtype, device)
        """Rows: one per expert, then the shared expert's gate."""
        self.w13 = weight(num_experts, 2 * inner_size, hidden_size, dtype=dtype, device=device)
        # [E, D, I] in shape, [E, I, D] in memory: rows of several experts make one matrix.
        w2_EID = torch.empty(num_experts, inner_size, hidden_size, dtype=dtype, device=device)
        self.w2 = nn.Parameter(w2_EID.transpose(1, 2), requires_grad=False)
        self.shared_expert = SwiGLU(hidden_size, shared_size, dtype, device)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, hidden_size] -> the same."""
        scores_TF = self.router(x_TD)
        weights_TK, ids_TK = route(scores_TF[:, :-1], self.top_k, self.renormalize)
        routed_TD = experts(x_TD, self.w13, self.w2, weights_TK, ids_TK)
        return torch.addcmul(routed_TD, self.shared_expert(x_TD), scores_TF[:, -1:].sigmoid())
