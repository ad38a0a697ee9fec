"""Sparse mixture of experts: routing, grouped products, and all of a layer at once. Knows no layer.

A shared expert that is as wide as the others may stand behind them in the same arrays: then it is one more expert, that
every token takes with a weight of its own.

Shape letters: T tokens, E experts, K experts per token, D hidden width, I inner width of an expert;
d, i the blocks of 128 of D and I.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.linear.api import Ready, linear, scale_shape
from deltaserve.ops.moe import cpu, reference


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token by softmax, the most probable first; of equals the lowest id.

    Name         Shape    Dtype       Meaning
    logits       [T, E]   any float   the router's output
    top_k        -        -           experts per token
    renormalize  -        -           divide the chosen weights by their sum
    returns      [T, K]   float32     weights (float64 for float64 input)
                 [T, K]   int64       expert ids
    """
    assert 1 <= top_k <= logits_TE.shape[1], f"moe: {top_k} experts per token of {logits_TE.shape[1]}"
    return reference.route(logits_TE, top_k, renormalize)


def sparse_moe(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    ready: Ready | None = None,
    adds_up: bool = True,
    shared: tuple[Tensor, Tensor] | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Routes each token and sums its experts, the shared one among them if the arrays hold it or it is given apart.

    Name         Shape         Dtype          Meaning
    x            [T, D]        any float      input
    scores       [T, E + 1]    any float      the router's output: one column per expert, then the shared one's gate
    w13, w2, w13_scale, w2_scale              as `experts`, of E experts, or of E + 1: the last is then the shared one
    ready        -             -              x quantised already, if it is and the weights are
    adds_up      -             -              if not, what is returned may be [T, G, D] of x's dtype or fp32: rows, of
                                              one expert or several, yet to be summed, as `add_gemma_rms_norm` does
    shared       -             as x           of a shared expert that is apart: gate and up [2S, D], down [D, S]
    place        [T]           int64          of a padded step: below 0 for padding, whose output does not matter. A GPU
                                              sends it where the step's first tokens go, so that no further experts are
                                              read for it; token 0 is none
    returns      [T, D]        as x           with the shared expert times `sigmoid(gate)` if there are E + 1 or it is
                                              given apart
    """
    if shared is not None:
        return _beside_shared(x_TD, scores_TF, w13, w2, top_k, renormalize, shared)
    num_experts, num_held = scores_TF.shape[1] - 1, w13.shape[0]
    assert num_held in (num_experts, num_experts + 1), f"moe: {num_experts} experts are scored, {num_held} given"
    if has_kernels(x_TD):
        from deltaserve.ops.moe import gpu

        _check(x_TD, w13, w2, w13_scale, w2_scale)
        held = w13, w2, top_k, renormalize, w13_scale, w2_scale
        return gpu.sparse_moe(x_TD, scores_TF, *held, ready, adds_up, place)
    weights_TK, ids_TK = route(scores_TF[:, :-1], top_k, renormalize)
    if num_held > num_experts:
        weights_TK = torch.cat([weights_TK, scores_TF[:, -1:].sigmoid().to(weights_TK.dtype)], 1)
        ids_TK = torch.cat([ids_TK, ids_TK.new_full((ids_TK.shape[0], 1), num_experts)], 1)
    return experts(x_TD, w13, w2, weights_TK, ids_TK, w13_scale, w2_scale)


def _beside_shared(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    shared: tuple[Tensor, Tensor],
) -> Tensor:
    if cpu.takes(x_TD, scores_TF, w13, w2, top_k, shared):
        return cpu.sparse_moe(x_TD, scores_TF, w13, w2, top_k, renormalize, shared)
    y_TD = sparse_moe(x_TD, scores_TF, w13, w2, top_k, renormalize)
    gate_TS, up_TS = linear(x_TD, shared[0]).chunk(2, dim=-1)
    return torch.addcmul(y_TD, linear(silu(gate_TS).mul_(up_TS), shared[1]), scores_TF[:, -1:].sigmoid())


def takes_shared(device: torch.device) -> bool:
    """Whether the shared expert is better kept with the others on this device."""
    return device.type == "cuda"


def allocate(
    num_experts: int, inner: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Weights not yet filled, w13 [E, 2I, D] and w2 [E, D, I]."""
    if device.type == "cuda":
        w13 = torch.empty(num_experts, 2 * inner, width, dtype=dtype, device=device)
        return w13, torch.empty(num_experts, width, inner, dtype=dtype, device=device)
    # [E, D, 2I] and [E, I, D] in memory: a row is what one number of an input is multiplied by.
    w13 = torch.empty(num_experts, width, 2 * inner, dtype=dtype, device=device).transpose(1, 2)
    return w13, torch.empty(num_experts, inner, width, dtype=dtype, device=device).transpose(1, 2)


def allocate_scales(num_experts: int, inner: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scales not yet filled, of quantised weights as `allocate` makes them: [E, 2i, d] and [E, d, i]."""
    rows, columns = scale_shape((inner, width))
    w13_scale = torch.empty(num_experts, 2 * rows, columns, device=device)
    return w13_scale, torch.empty(num_experts, columns, rows, device=device)


def experts(
    x_TD: Tensor,
    w13_E2ID: Tensor,
    w2_EDI: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
) -> Tensor:
    """Each token's experts, `w2 @ (silu(w1 @ x) * (w3 @ x))`, weighted and summed.

    Name       Shape        Dtype          Meaning
    x          [T, D]       any float      input
    w13        [E, 2I, D]   as x, or e4m3  rows of the gate projection, then of the up projection
    w2         [E, D, I]    as x, or e4m3  down projection
    weights    [T, K]       float32        from `route`
    ids        [T, K]       integers       from `route`; no id twice in a row
    w13_scale  [E, 2i, d]   float32        of e4m3 weights, see `linear`; the halves are quantised apart: i rows each
    w2_scale   [E, d, i]    float32        the same. What gate and up make is quantised like an input
    returns    [T, D]       as x
    """
    _check(x_TD, w13_E2ID, w2_EDI, w13_scale, w2_scale)
    assert weights_TK.shape == ids_TK.shape, f"moe: weights {tuple(weights_TK.shape)}, ids {tuple(ids_TK.shape)}"
    assert ids_TK.shape[0] == x_TD.shape[0], f"moe: {ids_TK.shape[0]} tokens are routed, {x_TD.shape[0]} given"
    return reference.experts(x_TD, w13_E2ID, w2_EDI, weights_TK, ids_TK, w13_scale, w2_scale)


def _check(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None) -> None:
    num_experts, double_inner, width = w13_E2ID.shape
    inner = double_inner // 2
    assert x_TD.shape[1] == width, f"moe: the input is {x_TD.shape[1]} wide, the experts expect {width}"
    assert w2_EDI.shape == (num_experts, width, inner), (
        f"moe: w13 {tuple(w13_E2ID.shape)} and w2 {tuple(w2_EDI.shape)} do not belong together"
    )
    if w13_scale is not None and w2_scale is not None:
        rows, columns = scale_shape((inner, width))
        assert (w13_scale.shape, w2_scale.shape) == (
            (num_experts, 2 * rows, columns),
            (num_experts, columns, rows),
        ), f"moe: scales {tuple(w13_scale.shape)} and {tuple(w2_scale.shape)} do not belong to these experts"
    else:
        assert w13_scale is w2_scale, "moe: the scales of w13 and of w2 come together"
