"""Sparse mixture of experts. Knows routing and grouped products, not the shared expert beside them.

Shape letters: T tokens, E experts, K experts per token, D hidden width, I inner width of an expert;
d, i the blocks of 128 of D and I.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.linear.api import scale_shape
from deltaserve.ops.moe import reference


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
