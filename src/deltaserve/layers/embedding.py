"""Token ids to vectors, and vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltaserve.layers.linear import projection, weight
from deltaserve.ops.linear.api import linear


class Embedding(nn.Module):
    """One vector per token id. A tied model projects with the same vectors."""

    def __init__(
        self, vocab_size: int, width: int, dtype: torch.dtype, device: torch.device, only_projects: bool = False
    ) -> None:
        """`only_projects`: no vector is looked up."""
        super().__init__()
        make = projection if only_projects else weight
        self.weight = make(vocab_size, width, dtype=dtype, device=device)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """int64 [T] -> [T, width]."""
        return functional.embedding(token_ids_T, self.weight)

    def project(self, hidden_ND: Tensor, wide: bool = True) -> Tensor:
        """[N, width] -> logits [N, vocab_size], float32 (float64 in float64); not `wide`: as `hidden`."""
        logits_NV = linear(hidden_ND, self.weight)
        return logits_NV if not wide else logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
