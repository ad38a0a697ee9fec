"""The gated delta rule with its gating and normalisation. Knows the recurrence, not the projections around it.

Shape letters: T tokens of the step, Hk key heads, Hv value heads, K and V widths of a key and a value head,
S slots of the pool. Value head h reads key head h // (Hv // Hk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.gated_delta import reference
from deltaserve.ops.layout import Layout


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TVD: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    pool_SVKD: Tensor,
    layout: Layout,
) -> Tensor:
    """Per value head, from the state S [K, V] before a token to the state after it (arXiv 2412.06464):

        g = -exp(A_log) * softplus(a + dt_bias)        beta = sigmoid(b)
        q = q / sqrt(|q|^2 + 1e-6) / sqrt(K)           k = k / sqrt(|k|^2 + 1e-6)
        S = exp(g) * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q

    Name       Shape            Dtype       Meaning
    q, k       [T, Hk, K]       any float   after the convolution, before normalisation; rows without padding
    v          [T, Hv, V]       as q
    a, b       [T, Hv]          any float   decay and write strength before their activations
    A_log      [Hv]             any float
    dt_bias    [Hv]             any float
    pool       [S, Hv, K, V]    any float   states. Read at layout.read_slot (-1: zeros). Written at layout.write_slot
                                            after any token (-1: not kept); nothing else of it changes
    returns    [T, Hv, V]       as v        computed in fp32 (fp64 for fp64 input)

    All reads of a row come before its writes: the same slot may be both. A slot that one row writes is read and
    written by no other row of the step.
    """
    tokens, key_heads, _ = q_THK.shape
    value_heads = v_TVD.shape[1]
    assert q_THK.shape == k_THK.shape, f"gated delta: q is {tuple(q_THK.shape)}, k {tuple(k_THK.shape)}"
    assert tokens == v_TVD.shape[0] == layout.write_slot.shape[0], "gated delta: q, v and the layout differ in tokens"
    assert a_TV.shape == b_TV.shape == (tokens, value_heads), "gated delta: a and b need one number per token and head"
    assert value_heads % key_heads == 0, f"gated delta: {value_heads} value heads on {key_heads} key heads"
    assert pool_SVKD.shape[1:] == (value_heads, q_THK.shape[2], v_TVD.shape[2]), (
        f"gated delta: pool {tuple(pool_SVKD.shape)} does not hold {value_heads} x {q_THK.shape[2]} x {v_TVD.shape[2]}"
    )
    x = reference.prepare(q_THK, k_THK, v_TVD, a_TV, b_TV, A_log_V, dt_bias_V)
    parts = [
        (reference.step if segment.is_step else reference.chunk)(x, pool_SVKD, layout, segment)
        for segment in layout.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
