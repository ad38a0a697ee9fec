"""The gated delta rule, and all that a gated delta net computes between its projections, which it does not know.

Shape letters: T tokens of the step, Hk key heads, Hv value heads, K and V widths of a key and a value head,
C = 2 * Hk * K + Hv * V channels and W taps of the convolution, S slots of the pools. Value head h reads key head
h // (Hv // Hk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.conv.api import causal_conv
from deltaserve.ops.gated_delta import cpu, reference
from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.layout import Layout
from deltaserve.ops.linear.api import Ready
from deltaserve.ops.norm.api import gated_rms_norm


def gated_delta_net(
    mixed_TC: Tensor,
    z_TX: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    conv_weight_CW: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    norm_weight_D: Tensor,
    eps: float,
    conv_pool_SWC: Tensor,
    state_pool_SVKD: Tensor,
    layout: Layout,
    quantizes: bool = False,
) -> tuple[Tensor, Ready | None]:
    """`gated_rms_norm(gated_delta(causal_conv(mixed)), z)`, which it is on a CPU, in as few launches as a GPU needs.

    Name          Shape            Dtype       Meaning
    mixed         [T, C]           any float   queries, keys and values before the convolution, heads side by side
    z             [T, Hv * V]      as mixed    gate of the norm before its activation
    b, a          [T, Hv]          any float   write strength and decay before their activations
    conv_weight   [C, W]           any float   oldest tap first; the transpose of a [W, C] tensor
    A_log         [Hv]             any float
    dt_bias       [Hv]             any float
    norm_weight   [V]              any float
    conv_pool     [S, W - 1, C]    as mixed    windows: see `causal_conv`
    state_pool    [S, Hv, K, V]    any float   states: see `gated_delta`
    quantizes     -                -           a product with a quantised weight follows
    returns       [T, Hv, V]       as mixed    where T is above `READY_ALONE` and the next is there it holds anything
                  [T, Hv * V]      -           the same quantised, where that was made

    mixed, z, b and a may be views with a row stride: parts of one projection's output. Intermediate results are rounded
    to mixed's dtype after the convolution and before the norm.

    In a chunk segment on a GPU, layout.write_slot may be set only after a token that ends a block (position % 64 is 63)
    or ends its row: elsewhere the window would be kept and the state not.
    """
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    if has_kernels(mixed_TC) and conv_weight_CW.shape[1] == 4:
        return _by_kernels(
            *(mixed_TC, z_TX, b_TV, a_TV, conv_weight_CW, A_log_V, dt_bias_V, norm_weight_D),
            *(eps, conv_pool_SWC, state_pool_SVKD, layout, quantizes),
        )
    parts = (mixed_TC, z_TX, b_TV, a_TV, conv_weight_CW, A_log_V, dt_bias_V, norm_weight_D)
    if cpu.takes(parts, conv_pool_SWC, state_pool_SVKD, layout):
        return cpu.net(parts, eps, conv_pool_SWC, state_pool_SVKD, layout), None
    keys = (mixed_TC.shape[1] - v_heads * v_dim) // 2
    mixed_TC = causal_conv(mixed_TC, conv_weight_CW, conv_pool_SWC, layout)
    q, k, v = mixed_TC.split_with_sizes([keys, keys, v_heads * v_dim], dim=-1)
    q_THK, k_THK = (part.view(part.shape[0], -1, k_dim) for part in (q, k))
    v_TVD, z_TVD = (part.view(part.shape[0], v_heads, v_dim) for part in (v, z_TX))
    o_TVD = gated_delta(q_THK, k_THK, v_TVD, a_TV, b_TV, A_log_V, dt_bias_V, state_pool_SVKD, layout)
    return gated_rms_norm(o_TVD, z_TVD, norm_weight_D, eps), None


def _by_kernels(
    mixed_TC: Tensor,
    z_TX: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    conv_weight_CW: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    norm_weight_D: Tensor,
    eps: float,
    conv_pool_SWC: Tensor,
    state_pool_SVKD: Tensor,
    layout: Layout,
    quantizes: bool = False,
) -> tuple[Tensor, Ready | None]:
    """A step segment in one launch; a chunk segment in five: windows, convolution, chunks, states, norm. The last one
    quantises the outputs where there is no other segment.

    Only bf16 and fp16 are worth the chunks: rows of fp32 take the launch of a step, token by token.
    """
    from deltaserve.ops.conv import triton_conv
    from deltaserve.ops.gated_delta import triton_chunk, triton_step
    from deltaserve.ops.linear.triton_fp8 import new_quantized
    from deltaserve.ops.norm.triton_norm import gated_norm_rows_quantized

    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    (tokens, channels), values = mixed_TC.shape, v_heads * v_dim
    k_heads = (channels - values) // (2 * k_dim)
    assert tokens == layout.write_slot.shape[0], "gated delta net: the input and the layout differ in tokens"
    assert channels == 2 * k_heads * k_dim + values, f"gated delta net: {channels} channels do not make heads"
    assert z_TX.shape == (tokens, values), f"gated delta net: the gate is {tuple(z_TX.shape)}"
    assert conv_pool_SWC.dtype == mixed_TC.dtype, "gated delta net: windows and input differ in dtype"
    assert conv_weight_CW.stride() == (1, channels), "gated delta net: the taps are to be the transpose of [W, C]"
    assert all(part.stride(1) == 1 for part in (mixed_TC, z_TX, b_TV, a_TV)), "gated delta net: rows have gaps"
    z_TVD = z_TX.view(tokens, v_heads, v_dim)
    out_TVD = torch.empty(tokens, v_heads, v_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    has_chunks = mixed_TC.dtype != torch.float32 or not mixed_TC.is_cuda
    quantizes = quantizes and len(layout.segments) == 1 and triton_step.can_quantize(v_dim)
    ready = None
    if quantizes and (layout.segments[0].is_step or not has_chunks):
        ready = new_quantized(tokens, values, mixed_TC.device)
    for segment in layout.segments:
        if segment.is_step or not has_chunks:
            triton_step.step_of(state_pool_SVKD, segment)(
                *(mixed_TC, z_TVD, b_TV, a_TV, conv_weight_CW, A_log_V, dt_bias_V, norm_weight_D),
                *(eps, conv_pool_SWC, state_pool_SVKD, layout, segment, out_TVD, ready),
            )
            continue
        heads = (k_heads, k_dim, v_dim)
        convolved_TC = triton_conv.conv(mixed_TC, conv_weight_CW, conv_pool_SWC, layout, segment, heads)
        o_TVD = triton_chunk.chunk(convolved_TC, b_TV, a_TV, A_log_V, dt_bias_V, state_pool_SVKD, layout, segment)
        if quantizes:
            return gated_norm_rows_quantized(o_TVD, segment.cut(z_TVD), norm_weight_D, eps)
        o_TVD = gated_rms_norm(o_TVD, segment.cut(z_TVD), norm_weight_D, eps)
        if len(layout.segments) == 1:
            return o_TVD, None
        segment.cut(out_TVD).copy_(o_TVD)
    return out_TVD, ready


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
