"""How a mixture of experts is computed on a GPU, by its sizes. Knows no kernel's inside.

Up to MAX_TOKENS of `triton_pairs`, pair by pair (3 launches with routing, 4 with adding up); beyond, in groups of one
expert (3 to 7: one more each for more than 16 tokens, for many pairs, for inputs that are not quantised yet, and for
adding up).
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.linear.api import Ready


def sparse_moe(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    ready: Ready | None = None,
    adds_up: bool = True,
    place_T: Tensor | None = None,
) -> Tensor:
    """As api.sparse_moe, for T of at least 0. Weights must be contiguous."""
    from deltaserve.ops.moe import triton_groups, triton_members, triton_pairs, triton_route

    assert w13.is_contiguous(), f"moe: w13 has strides {w13.stride()}"
    assert w2.is_contiguous(), f"moe: w2 has strides {w2.stride()}"
    tokens = x_TD.shape[0]
    if tokens == 0:
        return x_TD.new_empty(x_TD.shape)
    shared = w13.shape[0] == scores_TF.shape[1]
    if tokens <= triton_pairs.MAX_TOKENS:
        if w13_scale is None or ready is not None:
            weights_TK, ids_TK, _ = triton_route.route(scores_TF, top_k, renormalize, shared, None, place_T)
        else:
            routed = triton_route.route_and_quantize(scores_TF, x_TD, top_k, renormalize, shared, None, place_T)
            weights_TK, ids_TK, _, ready = routed
        h_PI = triton_pairs.gate_up(x_TD, w13, w13_scale, ids_TK, shared, ready=ready)
        y_TKD = triton_pairs.down(h_PI, w2, w2_scale, weights_TK, ids_TK)
    else:
        weights_TK, ids_TK, count = triton_route.route(scores_TF, top_k, renormalize, shared, None, place_T)
        held = w13, w2, w13_scale, w2_scale
        y_TKD = triton_groups.grouped(x_TD, *held, weights_TK, ids_TK, count, shared=shared, ready=ready)
    return triton_members.add_up(y_TKD, x_TD.dtype) if adds_up and y_TKD.dim() == 3 else y_TKD
