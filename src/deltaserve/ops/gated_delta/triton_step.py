"""Rows, token by token, through a whole gated delta net, in one launch: convolution, gates, recurrence, gated norm.
Knows no projections. Meant for few tokens of many rows; any number of them is computed all the same, in fp32.

One program per row and value head. It holds the head's state in registers, 64 KB at 128 x 128, over all tokens of the
row: the state is read once and written once for each token that keeps it, and these bytes are nearly all there are. At
batch 1 of the 80B model 32 programs move 4.2 MB; with 4 warps two programs share a multiprocessor, so that one loads
while the other stores.

Value heads of one key head each convolve its query and key, which costs a few hundred loads. Only one may write their
window, and not before all have read it, since a window may be kept where it was read: the last of them to arrive, by a
counter, writes it. What belongs to one value head alone is written by its program.

A kernel variant follows from the model's shapes, the dtypes, and whether rows have one token, several, or differ.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.layout import Layout, Segment
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs

TAPS = 4
"""Of the convolution; its window is in registers by name."""


@triton.jit
def log1p(x):
    """Accurate for small x, where 1 + x has lost most of it."""
    u = 1 + x
    d = u - 1
    return tl.where(d == 0, x, tl.log(u) * (x / tl.where(d == 0, 1.0, d)))


@triton.jit
def log_decay(a, A_log, dt_bias):
    """`-exp(A_log) * softplus(a + dt_bias)`"""
    x = a + dt_bias
    softplus = tl.where(x > 20, x, log1p(tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(A_log) * softplus


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """Of the four newest inputs, the oldest first; rounded to their dtype, and back to fp32."""
    y = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    return silu(y).to(x3.dtype).to(tl.float32)


@triton.jit(
    do_not_specialize=["token_start", "row_start", "length"],
    do_not_specialize_on_alignment=["read_slot", "write_slot", "cu_seqlens"],
)
def step_kernel(
    mixed,
    z,
    b,
    a,
    weight,
    A_log,
    dt_bias,
    norm_weight,
    conv_pool,
    state_pool,
    read_slot,
    write_slot,
    cu_seqlens,
    arrivals,
    out,
    token_start,
    row_start,
    length,
    mixed_stride,
    z_stride,
    b_stride,
    a_stride,
    eps: tl.constexpr,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ONE: tl.constexpr,
    RAGGED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid [value heads, rows]: the value heads of a key head are neighbours. Tokens of a row: ONE, or what cu_seqlens
    says if RAGGED, or `length`."""
    let_next_start(EARLY)
    C: tl.constexpr = 2 * KH * K + VH * V
    GROUP: tl.constexpr = VH // KH
    head = tl.program_id(0)
    row = tl.program_id(1)
    key_head = head // GROUP
    tokens = 1 if ONE else length
    first = token_start + row * tokens
    if RAGGED:
        before = tl.load(cu_seqlens + row)
        first = token_start + before
        tokens = tl.load(cu_seqlens + row + 1) - before
    first = first.to(tl.int64)

    slot = tl.load(read_slot + row_start + row)
    k_read = tl.where(slot >= 0, K, 0)  # a row without a state reads no key's row of it, and no channel of a window
    slot = tl.where(slot >= 0, slot, 0).to(tl.int64)

    # The state first: it takes longest to come.
    k_index = tl.arange(0, BK)
    v_index = tl.arange(0, BV)
    in_v = v_index < V
    place = k_index[:, None] * V + v_index[None, :]
    in_read = (k_index < k_read)[:, None] & in_v[None, :]
    state = tl.load(state_pool + (slot * VH + head) * (K * V) + place, mask=in_read, other=0).to(tl.float32)

    # Channels of query and key are interleaved: 2 * i is query's number i, 2 * i + 1 key's.
    qk = tl.arange(0, 2 * BK)
    in_qk = qk // 2 < K
    qk_channel = ((qk % 2) * KH + key_head) * K + qk // 2
    v_channel = 2 * KH * K + head * V + v_index
    window = conv_pool + slot * (3 * C)
    in_qk_read = qk // 2 < k_read
    in_v_read = v_index < tl.minimum(k_read * V, V)
    q0 = tl.load(window + qk_channel, mask=in_qk_read, other=0)
    q1 = tl.load(window + C + qk_channel, mask=in_qk_read, other=0)
    q2 = tl.load(window + 2 * C + qk_channel, mask=in_qk_read, other=0)
    v0 = tl.load(window + v_channel, mask=in_v_read, other=0)
    v1 = tl.load(window + C + v_channel, mask=in_v_read, other=0)
    v2 = tl.load(window + 2 * C + v_channel, mask=in_v_read, other=0)
    qw0 = tl.load(weight + qk_channel, mask=in_qk, other=0).to(tl.float32)
    qw1 = tl.load(weight + C + qk_channel, mask=in_qk, other=0).to(tl.float32)
    qw2 = tl.load(weight + 2 * C + qk_channel, mask=in_qk, other=0).to(tl.float32)
    qw3 = tl.load(weight + 3 * C + qk_channel, mask=in_qk, other=0).to(tl.float32)
    vw0 = tl.load(weight + v_channel, mask=in_v, other=0).to(tl.float32)
    vw1 = tl.load(weight + C + v_channel, mask=in_v, other=0).to(tl.float32)
    vw2 = tl.load(weight + 2 * C + v_channel, mask=in_v, other=0).to(tl.float32)
    vw3 = tl.load(weight + 3 * C + v_channel, mask=in_v, other=0).to(tl.float32)
    decay_rate = tl.load(A_log + head).to(tl.float32)
    decay_bias = tl.load(dt_bias + head).to(tl.float32)
    gain = tl.load(norm_weight + v_index, mask=in_v, other=0).to(tl.float32)

    wait_for_inputs(EARLY)
    keep = slot
    for i in range(tokens):
        token = first + i
        keep = tl.load(write_slot + token)
        q3 = tl.load(mixed + token * mixed_stride + qk_channel, mask=in_qk, other=0)
        v3 = tl.load(mixed + token * mixed_stride + v_channel, mask=in_v, other=0)
        gate = tl.load(z + token * z_stride + head * V + v_index, mask=in_v, other=0).to(tl.float32)
        decay = tl.exp(log_decay(tl.load(a + token * a_stride + head).to(tl.float32), decay_rate, decay_bias))
        beta = 1 / (1 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
        query, key = tl.split(tl.reshape(_convolved(q0, q1, q2, q3, qw0, qw1, qw2, qw3), [BK, 2]))
        value = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3)
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (K**-0.5))
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        # The output is S^T q after the update; taken before it, so that both sums over the state are one pass.
        along_key = tl.sum(state * key[:, None], 0) * decay
        along_query = tl.sum(state * query[:, None], 0) * decay
        update = beta * (value - along_key)
        o = along_query + update * tl.sum(query * key, 0)
        state = state * decay + key[:, None] * update[None, :]

        if keep >= 0:
            kept = state_pool + (keep.to(tl.int64) * VH + head) * (K * V) + place
            tl.store(kept, state.to(state_pool.dtype.element_ty), mask=(k_index < K)[:, None] & in_v[None, :])
        o = o.to(v3.dtype).to(tl.float32)
        scaled = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * gain * silu(gate)
        tl.store(out + (token * VH + head) * V + v_index, scaled.to(out.dtype.element_ty), mask=in_v)
        q0, q1, q2 = q1, q2, q3
        v0, v1, v2 = v1, v2, v3

    # Every window that this program reads has arrived: its outputs depend on it. So the counter orders nothing more.
    qk_write = 2 * BK
    if GROUP > 1:
        tl.debug_barrier()
        earlier = tl.atomic_add(arrivals + row * KH + key_head, 1, sem="relaxed")
        qk_write = tl.where(earlier % GROUP == GROUP - 1, 2 * BK, 0)
    if not ONE:
        q0 = tl.load(window + qk_channel, mask=in_qk_read, other=0)
        q1 = tl.load(window + C + qk_channel, mask=in_qk_read, other=0)
        q2 = tl.load(window + 2 * C + qk_channel, mask=in_qk_read, other=0)
        v0 = tl.load(window + v_channel, mask=in_v_read, other=0)
        v1 = tl.load(window + C + v_channel, mask=in_v_read, other=0)
        v2 = tl.load(window + 2 * C + v_channel, mask=in_v_read, other=0)
        tl.debug_barrier()
    for i in range(tokens):
        if not ONE:
            token = first + i
            keep = tl.load(write_slot + token)
            q0, q1, q2 = q1, q2, tl.load(mixed + token * mixed_stride + qk_channel, mask=in_qk, other=0)
            v0, v1, v2 = v1, v2, tl.load(mixed + token * mixed_stride + v_channel, mask=in_v, other=0)
        window = conv_pool + tl.where(keep >= 0, keep, 0).to(tl.int64) * (3 * C)
        in_write = in_qk & (qk < tl.where(keep >= 0, qk_write, 0))
        tl.store(window + qk_channel, q0, mask=in_write)
        tl.store(window + C + qk_channel, q1, mask=in_write)
        tl.store(window + 2 * C + qk_channel, q2, mask=in_write)
        in_write_v = v_index < tl.where(keep >= 0, V, 0)
        tl.store(window + v_channel, v0, mask=in_write_v)
        tl.store(window + C + v_channel, v1, mask=in_write_v)
        tl.store(window + 2 * C + v_channel, v2, mask=in_write_v)


def arrivals(layout: Layout, segment: Segment, key_heads: int) -> Tensor:
    """Counters, zero at first, that the layers of a step share: each layer adds a whole number of rounds to each.

    int32 [rows * Hk]. Through `Layout.once`, so that a graph zeroes them at every replay.
    """
    rows = segment.row_end - segment.row_start
    return torch.zeros(rows * key_heads, dtype=torch.int32, device=layout.read_slot.device)


def tile(k_dim: int, v_dim: int) -> dict[str, Any]:
    """Block widths and warps: 128 state registers a thread at 128 x 128. More warps are slower in every batch."""
    block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (k_dim, v_dim))
    return {"BK": block_k, "BV": block_v, "num_warps": min(8, max(1, block_k * block_v // 4096))}


def step(
    mixed_TC: Tensor,
    z_TVD: Tensor,
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
    segment: Segment,
    out_TVD: Tensor,
    **config: Any,
) -> None:
    """The facade's arguments, a segment of either kind, and where the outputs go: fills its tokens of `out`.

    mixed, z, b and a may be views with a row stride; out is contiguous. `config` replaces entries of `tile`.
    """
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    k_heads = (mixed_TC.shape[1] - v_heads * v_dim) // (2 * k_dim)
    options = {**tile(k_dim, v_dim), **config}
    step_kernel[(v_heads, segment.row_end - segment.row_start)](
        mixed_TC,
        z_TVD,
        b_TV,
        a_TV,
        conv_weight_CW,
        A_log_V,
        dt_bias_V,
        norm_weight_D,
        conv_pool_SWC,
        state_pool_SVKD,
        layout.read_slot,
        layout.write_slot,
        segment.cu_seqlens,
        layout.once(arrivals, segment, k_heads),
        out_TVD,
        segment.token_start,
        segment.row_start,
        segment.max_len,
        mixed_TC.stride(0),
        z_TVD.stride(0),
        b_TV.stride(0),
        a_TV.stride(0),
        eps=eps,
        KH=k_heads,
        VH=v_heads,
        K=k_dim,
        V=v_dim,
        ONE=segment.max_len == 1,
        RAGGED=not segment.is_step and segment.max_len > 1,
        **options,
        # Of several tokens, what is read before the wait does not fit the registers.
        **early_options(mixed_TC.device, None if segment.max_len == 1 else False),
    )
