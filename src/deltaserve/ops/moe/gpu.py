"""How a mixture of experts is computed on a GPU, by its sizes. Knows no kernel's inside."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.moe import reference


def sparse_moe(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
) -> Tensor:
    """As api.sparse_moe."""
    weights_TK, ids_TK = reference.route(scores_TF[:, :-1], top_k, renormalize)
    if w13.shape[0] == scores_TF.shape[1]:
        weights_TK = torch.cat([weights_TK, scores_TF[:, -1:].sigmoid().to(weights_TK.dtype)], 1)
        ids_TK = torch.cat([ids_TK, ids_TK.new_full((ids_TK.shape[0], 1), w13.shape[0] - 1)], 1)
    return reference.experts(x_TD, w13, w2, weights_TK, ids_TK, w13_scale, w2_scale)
