"""Mixture of experts in torch, in three forms: one token gathers its experts' weights, few tokens add up their rows,
many are sorted by expert. Quantised experts take one form, the loop.

Shape letters beyond api.py's: P = T * K pairs of a token and one of its experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear, silu

from deltaserve.ops.linear import reference as projection
from deltaserve.ops.numeric import cast, wide_dtype

CALL_WORK = 1 << 17
"""Multiplications by one of an expert's three matrices that products make faster than sums of rows by the time that
calling them takes."""


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    wide_TE = cast(logits_TE, wide_dtype(logits_TE.dtype))
    ranked_TE, id_TE = wide_TE.sort(dim=-1, descending=True, stable=True)
    chosen_TK, id_TK = ranked_TE[:, :top_k], id_TE[:, :top_k]
    if renormalize:
        # Dividing by the sum of the chosen cancels everything the others add to the softmax.
        return chosen_TK.softmax(-1), id_TK
    return (chosen_TK - wide_TE.logsumexp(-1, keepdim=True)).exp(), id_TK


def experts(
    x_TD: Tensor,
    w13_E2ID: Tensor,
    w2_EDI: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
) -> Tensor:
    (tokens, top_k), (num_experts, width, inner) = ids_TK.shape, w2_EDI.shape
    if w13_scale is not None and w2_scale is not None:
        return quantized_experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK, w13_scale, w2_scale)
    if tokens * top_k * width * inner > CALL_WORK * min(num_experts, tokens * top_k):
        return grouped_experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK)
    if tokens > 1:
        return summed_rows(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK)
    return gathered_experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK)


def gathered_experts(x_1D: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_1K: Tensor, ids_1K: Tensor) -> Tensor:
    """One token: its experts' weights are copied next to one another."""
    id_K, top_k, width = ids_1K.view(-1), ids_1K.shape[1], w2_EDI.shape[1]
    w13_KD2I, w2_KID = (weight.transpose(1, 2).index_select(0, id_K) for weight in (w13_E2ID, w2_EDI))
    hidden_KI = torch.bmm(x_1D.expand(top_k, 1, -1), w13_KD2I).squeeze(1)
    active_KI = _swiglu(hidden_KI, weights_1K.view(-1, 1))
    return torch.mm(cast(active_KI, x_1D.dtype).view(1, -1), w2_KID.view(-1, width))


def summed_rows(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Few tokens: their experts' rows are added up where they lie, each times one number of the input."""
    (tokens, top_k), (_, width, inner) = ids_TK.shape, w2_EDI.shape
    id_P1 = ids_TK.reshape(-1, 1)
    x_PD = x_TD[:, None].expand(-1, top_k, -1).reshape(-1, width)
    hidden_PI = _sum_rows(x_PD, w13_E2ID, id_P1 * width + torch.arange(width, device=x_TD.device))
    active_PI = cast(_swiglu(hidden_PI, weights_TK.reshape(-1, 1)), x_TD.dtype)
    row_PI = id_P1 * inner + torch.arange(inner, device=x_TD.device)
    return _sum_rows(active_PI.view(tokens, -1), w2_EDI, row_PI.view(tokens, -1))


def _sum_rows(x_BR: Tensor, weight_EYX: Tensor, row_BR: Tensor) -> Tensor:
    """Sums of R of the [E * X] rows of Y numbers that all experts' weights have, times `x`: [B, Y]."""
    rows = weight_EYX.transpose(1, 2).reshape(-1, weight_EYX.shape[1])
    return embedding_bag(row_BR, rows, mode="sum", per_sample_weights=x_BR)


def grouped_experts(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    num_experts, top_k = w2_EDI.shape[0], ids_TK.shape[1]
    order_P = ids_TK.flatten().argsort(stable=True)
    counts = torch.bincount(ids_TK.flatten(), minlength=num_experts).tolist()

    def project(input_PX: Tensor, weight_EYX: Tensor) -> Tensor:
        groups = enumerate(input_PX.split_with_sizes(counts))
        return torch.cat([linear(group, weight_EYX[expert]) for expert, group in groups if counts[expert]])

    hidden_PI = project(x_TD.index_select(0, order_P // top_k), w13_E2ID)
    active_PI = _swiglu(hidden_PI, weights_TK.flatten().index_select(0, order_P)[:, None])
    y_PD = project(cast(active_PI, x_TD.dtype), w2_EDI)
    y_TKD = torch.empty_like(y_PD).index_copy_(0, order_P, y_PD).view(x_TD.shape[0], top_k, -1)
    return y_TKD.sum(1)


def quantized_experts(
    x_TD: Tensor,
    w13_E2ID: Tensor,
    w2_EDI: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
) -> Tensor:
    """One expert after the other; gate and up have scales of their own, and so has what they make."""
    wide = wide_dtype(x_TD.dtype)
    inner, rows = w2_EDI.shape[2], w13_scale.shape[1] // 2
    out_TKD = torch.empty(*ids_TK.shape, x_TD.shape[1], dtype=wide, device=x_TD.device)
    for expert in torch.unique(ids_TK).tolist():
        token_P, place_P = torch.nonzero(ids_TK == expert, as_tuple=True)
        x_PD, w13_2ID, scale = x_TD[token_P], w13_E2ID[expert], w13_scale[expert]
        gate_PI = projection.linear(x_PD, w13_2ID[:inner], scale[:rows], wide)
        up_PI = projection.linear(x_PD, w13_2ID[inner:], scale[rows:], wide)
        active_PI = cast(silu(gate_PI).mul_(up_PI), x_TD.dtype)
        y_PD = projection.linear(active_PI, w2_EDI[expert], w2_scale[expert], wide)
        out_TKD[token_P, place_P] = y_PD * weights_TK[token_P, place_P, None]
    return cast(out_TKD.sum(1), x_TD.dtype)


def _swiglu(hidden: Tensor, weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight`, in the weights' dtype."""
    gate, up = cast(hidden, weights.dtype).chunk(2, dim=-1)
    return silu(gate).mul_(up).mul_(weights)
