"""Mixture of experts in torch: few tokens go through all experts at once, many are sorted by expert.

Shape letters beyond api.py's: P = T * K pairs of a token and one of its experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

CALL_WORK = 1 << 17
"""Multiplications that cost about as much as the calls for one expert."""


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    ranked_TE, id_TE = wide_TE.sort(dim=-1, descending=True, stable=True)
    chosen_TK, id_TK = ranked_TE[:, :top_k], id_TE[:, :top_k]
    if renormalize:
        # Dividing by the sum of the chosen cancels everything the others add to the softmax.
        return chosen_TK.softmax(-1), id_TK
    return (chosen_TK - wide_TE.logsumexp(-1, keepdim=True)).exp(), id_TK


def experts(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    num_experts, width, inner = w2_EDI.shape
    num_hit = min(num_experts, ids_TK.numel())
    if len(x_TD) * num_experts * width * inner <= num_hit * CALL_WORK:
        return all_experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK)
    return grouped_experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK)


def all_experts(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    num_experts, width, inner = w2_EDI.shape
    hidden_TEI = linear(x_TD, w13_E2ID.view(-1, width)).view(-1, num_experts, 2 * inner)
    weights_TE1 = weights_TK.new_zeros(len(x_TD), num_experts).scatter_(1, ids_TK, weights_TK)[..., None]
    # An expert that was not chosen may overflow; zero times infinity would be NaN.
    active_TEI = _swiglu(hidden_TEI, weights_TE1).masked_fill_(weights_TE1 == 0, 0)
    return torch.bmm(active_TEI.to(x_TD.dtype).transpose(0, 1), w2_EDI.transpose(1, 2)).sum(0)


def grouped_experts(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    num_experts, top_k = len(w2_EDI), ids_TK.shape[1]
    order_P = ids_TK.flatten().argsort(stable=True)
    counts = torch.bincount(ids_TK.flatten(), minlength=num_experts).tolist()

    def project(input_PX: Tensor, weight_EYX: Tensor) -> Tensor:
        output_PY = input_PX.new_empty(len(input_PX), weight_EYX.shape[1])
        first = 0
        for expert, count in enumerate(counts):
            if count:
                here = slice(first, first + count)
                output_PY[here] = linear(input_PX[here], weight_EYX[expert])
                first += count
        return output_PY

    hidden_PI = project(x_TD.index_select(0, order_P // top_k), w13_E2ID)
    active_PI = _swiglu(hidden_PI, weights_TK.flatten().index_select(0, order_P)[:, None])
    y_PD = project(active_PI.to(x_TD.dtype), w2_EDI)
    y_TKD = torch.empty_like(y_PD).index_copy_(0, order_P, y_PD).view(len(x_TD), top_k, -1)
    return y_TKD.sum(1)


def _swiglu(hidden: Tensor, weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight`, in the weights' dtype."""
    gate, up = hidden.to(weights.dtype).chunk(2, dim=-1)
    return silu(gate).mul_(up).mul_(weights)
