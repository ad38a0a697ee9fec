"""Rows, token by token, through a whole gated delta net, in one launch: convolution, gates, recurrence, gated norm.
Knows no projections. Meant for few tokens of many rows; any number of them is computed all the same, in fp32.

One program per row and value head. It holds the head's state in registers, 64 KB at 128 x 128, over all tokens of the
row: the state is read once and written once for each token that keeps it, and these bytes are nearly all there are. At
batch 1 of the 80B model 32 programs move 4.2 MB; two programs share a multiprocessor, so that one loads while the other
stores. A warp holds whole columns, so that sums over keys, two in one pass over the state, end inside it.

Value heads of one key head each convolve its query and key, which costs a few hundred loads. Only one may write their
window, and not before all have read it, since a window may be kept where it was read: the last of them to arrive, by a
counter, writes it. What belongs to one value head alone is written by its program. Query and key are one
vector, of as many numbers as there are threads: of fewer, the compiler has every thread compute all that it needs.

A kernel variant follows from the model's shapes, the dtypes, and whether rows have one token, several, or differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import Layout, Segment
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, quantize, stored

RING = 64
"""Rows of one token from which `triton_ring` is faster."""
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
def _window(window, channel, mask, C: tl.constexpr):
    """The three inputs that it holds, the oldest first."""
    oldest = tl.load(window + channel, mask=mask, other=0)
    older = tl.load(window + C + channel, mask=mask, other=0)
    return oldest, older, tl.load(window + 2 * C + channel, mask=mask, other=0)


@triton.jit
def _taps(weight, channel, mask, C: tl.constexpr):
    """Of the four inputs, the oldest first."""
    w0 = tl.load(weight + channel, mask=mask, other=0).to(tl.float32)
    w1 = tl.load(weight + C + channel, mask=mask, other=0).to(tl.float32)
    w2 = tl.load(weight + 2 * C + channel, mask=mask, other=0).to(tl.float32)
    return w0, w1, w2, tl.load(weight + 3 * C + channel, mask=mask, other=0).to(tl.float32)


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """Of the four newest inputs, the oldest first; rounded to their dtype, and back to fp32."""
    y = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    return silu(y).to(x3.dtype).to(tl.float32)


@triton.jit
def _over_keys(x, OUTER_FIRST: tl.constexpr):
    """Sums of [BK / SK, BV / SV, SK, SV], those within threads first."""
    return tl.sum(tl.sum(x, 0), 1) if OUTER_FIRST else tl.sum(tl.sum(x, 2), 0)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit(
    do_not_specialize=["token_start", "row_start", "length", "q_stride"],
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
    q_out,
    q_scale,
    token_start,
    row_start,
    length,
    mixed_stride,
    z_stride,
    b_stride,
    a_stride,
    q_stride,
    eps: tl.constexpr,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SK: tl.constexpr,
    SV: tl.constexpr,
    OUTER_FIRST: tl.constexpr,
    ONE: tl.constexpr,
    RAGGED: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid [value heads, rows]: the value heads of a key head are neighbours. Tokens of a row: ONE, or what cu_seqlens
    says if RAGGED, or `length`. FP8: whether, and how, outputs are stored quantised as well: V is then 128 times a
    power of two, and scales are [blocks, q_stride]."""
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

    # The state first: it takes longest to come. Its indices are [BK / SK, BV / SV, SK, SV]: see `tile`.
    k_outer = tl.arange(0, BK // SK)
    k_inner = tl.arange(0, SK)
    v_outer = tl.arange(0, BV // SV)
    v_inner = tl.arange(0, SV)
    in_k = (k_outer[:, None] * SK + k_inner[None, :])[:, None, :, None] < K
    v_index = v_outer[:, None] * SV + v_inner[None, :]
    in_v = v_index < V
    in_state = in_k & in_v[None, :, None, :]
    place = (k_inner * V)[None, None, :, None] + v_index[None, :, None, :]
    ahead = (k_outer * (SK * V))[:, None, None, None]
    read = state_pool + (slot * VH + head) * (K * V) + place
    in_v_read = v_index < tl.minimum(k_read * V, V)
    state = tl.load(read + ahead, mask=in_k & in_v_read[None, :, None, :], other=0).to(tl.float32)

    # Query and key side by side.
    pair_index = tl.arange(0, 2 * BK)
    is_pair = pair_index % BK < K
    pair_channel = (pair_index // BK) * (KH * K) + key_head * K + pair_index % BK
    v_channel = 2 * KH * K + head * V + v_index
    window = conv_pool + slot * (3 * C)
    p0, p1, p2 = _window(window, pair_channel, pair_index % BK < k_read, C)
    v0, v1, v2 = _window(window, v_channel, in_v_read, C)
    pw0, pw1, pw2, pw3 = _taps(weight, pair_channel, is_pair, C)
    vw0, vw1, vw2, vw3 = _taps(weight, v_channel, in_v, C)
    decay_rate = tl.load(A_log + head).to(tl.float32)
    decay_bias = tl.load(dt_bias + head).to(tl.float32)
    gain = tl.load(norm_weight + v_index, mask=in_v, other=0).to(tl.float32)

    wait_for_inputs(EARLY)
    lane = tl.arange(0, BK)
    earlier = tl.zeros([BK], tl.int32)
    keep = slot
    token = first if ONE else tl.where(tokens > 0, first, tl.maximum(first - 1, 0))  # any, if the row has none
    next_keep = tl.load(write_slot + token)
    next_p = tl.load(mixed + token * mixed_stride + pair_channel, mask=is_pair, other=0)
    next_v = tl.load(mixed + token * mixed_stride + v_channel, mask=in_v, other=0)
    next_gate = tl.load(z + token * z_stride + head * V + v_index, mask=in_v, other=0)
    next_forget = tl.load(a + token * a_stride + head)
    next_write = tl.load(b + token * b_stride + head)
    for i in range(tokens):
        token = first + i
        keep = next_keep
        p3, v3, gate, forget, write = next_p, next_v, next_gate, next_forget, next_write
        decay = tl.exp(log_decay(forget.to(tl.float32), decay_rate, decay_bias))
        beta = 1 / (1 + tl.exp(-write.to(tl.float32)))
        pair = _convolved(p0, p1, p2, p3, pw0, pw1, pw2, pw3)
        query, key = tl.split(tl.trans(tl.reshape(pair, [2, BK])))
        value = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3)
        # S^T q of the state after the update is taken before it: so the state is passed over once for both sums, which
        # end in each warp. What makes lengths 1 is made up for afterwards.
        of_query, of_key, alike = tl.reduce((query * query, key * key, query * key), 0, _add_three)
        if GROUP > 1:
            # The sums hold all of query's and key's windows that this program reads: all have come before it counts.
            # One thread does, and what it learns is needed at the end of the first token only.
            counts = tl.where(of_query + of_key < 0, 0, 1) + tl.zeros([BK], tl.int32)
            counter = arrivals + row * KH + key_head + tl.zeros([BK], tl.int32)
            counted = tl.atomic_add(counter, counts, mask=(lane == 0) & (i == 0), sem="relaxed")
            earlier = tl.where(i == 0, counted, earlier)
        of_query = tl.rsqrt(of_query + 1e-6) * (K**-0.5)
        of_key = tl.rsqrt(of_key + 1e-6)
        alike *= of_query * of_key
        query = tl.reshape(query, [BK // SK, SK])[:, None, :, None]
        key = tl.reshape(key, [BK // SK, SK])[:, None, :, None]
        along_key = _over_keys(state * key, OUTER_FIRST) * (of_key * decay)
        along_query = _over_keys(state * query, OUTER_FIRST) * (of_query * decay)
        update = beta * (value - along_key)
        o = along_query + update * alike
        state = state * decay + key * (update * of_key)[None, :, None, :]

        if not ONE:
            # The next token's, which come while this one is stored; after the last, the last one's again.
            ahead_token = tl.minimum(token + 1, first + tokens - 1)
            next_keep = tl.load(write_slot + ahead_token)
            next_p = tl.load(mixed + ahead_token * mixed_stride + pair_channel, mask=is_pair, other=0)
            next_v = tl.load(mixed + ahead_token * mixed_stride + v_channel, mask=in_v, other=0)
            next_gate = tl.load(z + ahead_token * z_stride + head * V + v_index, mask=in_v, other=0)
            next_forget = tl.load(a + ahead_token * a_stride + head)
            next_write = tl.load(b + ahead_token * b_stride + head)
        if keep >= 0:
            kept = state_pool + (keep.to(tl.int64) * VH + head) * (K * V) + place
            tl.store(kept + ahead, state.to(state_pool.dtype.element_ty), mask=in_state)
        o = o.to(v3.dtype).to(tl.float32)
        mean = tl.sum(tl.sum(o * o, 1), 0) / V
        scaled = o * tl.rsqrt(mean + eps) * gain * silu(gate.to(tl.float32))
        rounded = scaled.to(out.dtype.element_ty)
        tl.store(out + (token * VH + head) * V + v_index, rounded, mask=in_v)
        if FP8 != 0:
            q, q_scales = quantize(tl.reshape(rounded.to(tl.float32), (BV // 128, 128)), FP8)
            at = q_out + (token * VH + head) * V + tl.arange(0, BV)
            tl.store(at, stored(tl.reshape(q, (BV,)), FP8))
            block = head * (V // 128) + tl.arange(0, BV // 128)
            tl.store(q_scale + block.to(tl.int64) * q_stride + token, q_scales)
        p0, p1, p2 = p1, p2, p3
        v0, v1, v2 = v1, v2, v3

        key_write = K
        if GROUP > 1:
            order = tl.sum(tl.where(lane == 0, earlier, 0), 0)
            key_write = tl.where(order % GROUP == GROUP - 1, K, 0)
        window = conv_pool + tl.where(keep >= 0, keep, 0).to(tl.int64) * (3 * C)
        is_written = pair_index % BK < tl.where(keep >= 0, key_write, 0)
        tl.store(window + pair_channel, p0, mask=is_written)
        tl.store(window + C + pair_channel, p1, mask=is_written)
        tl.store(window + 2 * C + pair_channel, p2, mask=is_written)
        is_written_v = v_index < tl.where(keep >= 0, V, 0)
        tl.store(window + v_channel, v0, mask=is_written_v)
        tl.store(window + C + v_channel, v1, mask=is_written_v)
        tl.store(window + 2 * C + v_channel, v2, mask=is_written_v)


def arrivals(layout: Layout, segment: Segment, key_heads: int) -> Tensor:
    """Counters, zero at first, that the layers of a step share: each layer adds a whole number of rounds to each.

    int32 [rows * Hk]. Through `Layout.once`, so that a graph zeroes them at every replay.
    """
    rows = segment.row_end - segment.row_start
    return torch.zeros(rows * key_heads, dtype=torch.int32, device=layout.read_slot.device)


def tile(k_dim: int, v_dim: int, state_bytes: int) -> dict[str, Any]:
    """Block widths, warps, and how the state lies in them: each warp holds SV columns, whole, and so ends their sums.

    A load of a warp is a few rows of SV columns, 16 bytes a thread: 128 bytes of fp32 a row. At 128 x 128 four warps
    hold 128 numbers a thread; more warps are slower in every batch. Triton gives the threads of a warp the last axis
    and then, among equals, the last again, versions before 3.9 the first: so the few rows are the axis that it takes.
    OUTER_FIRST: the other one, which lies within threads, is the outer.
    """
    block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (k_dim, v_dim))
    columns = min(block_v, 32, max(4, 4096 // block_k))
    lanes = 32 if torch.version.hip is None else 64
    rows = min(block_k, max(1, lanes * 16 // (columns * state_bytes)))
    takes_last = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
    return {
        "BK": block_k,
        "BV": block_v,
        "SK": rows if takes_last else block_k // rows,
        "SV": columns,
        "OUTER_FIRST": takes_last,
        "num_warps": min(16, block_v // columns),
    }


def can_quantize(v_dim: int) -> bool:
    """Whether a head's outputs are whole blocks of 128, and all of a program's numbers."""
    return v_dim % 128 == 0 and v_dim & (v_dim - 1) == 0


def step_of(state_pool_SVKD: Tensor, segment: Segment) -> Callable[..., None]:
    """`step`, or `triton_ring.step` for many rows of one token and heads of 128 x 128 on Hopper."""
    is_many = segment.is_step and segment.max_len == 1 and segment.row_end - segment.row_start >= RING
    fits = state_pool_SVKD.shape[2:] == (128, 128) and state_pool_SVKD.element_size() in (2, 4)
    if not (is_many and fits and state_pool_SVKD.is_contiguous() and properties(state_pool_SVKD.device).is_hopper):
        return step
    from deltaserve.ops.gated_delta import triton_ring

    return triton_ring.step


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
    ready: tuple[Tensor, Tensor] | None = None,
    **config: Any,
) -> None:
    """The facade's arguments, a segment of either kind, and where the outputs go: fills its tokens of `out`, and of
    `ready`, made by `new_quantized` for [T, Hv * V] where `can_quantize(V)`.

    mixed, z, b and a may be views with a row stride; out is contiguous. `config` replaces entries of `tile`.
    """
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    k_heads = (mixed_TC.shape[1] - v_heads * v_dim) // (2 * k_dim)
    options = {**tile(k_dim, v_dim, state_pool_SVKD.element_size()), **config}
    (q_out, way), q_scale = (out_TVD, 0) if ready is None else fp8_way(*ready), out_TVD if ready is None else ready[1]
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
        q_out,
        q_scale,
        segment.token_start,
        segment.row_start,
        segment.max_len,
        mixed_TC.stride(0),
        z_TVD.stride(0),
        b_TV.stride(0),
        a_TV.stride(0),
        q_scale.stride(1),
        eps=eps,
        KH=k_heads,
        VH=v_heads,
        K=k_dim,
        V=v_dim,
        ONE=segment.max_len == 1,
        RAGGED=not segment.is_step and segment.max_len > 1,
        FP8=way,
        **options,
        **early_options(mixed_TC.device, tokens=0 if segment.max_len == 1 else segment.token_end - segment.token_start),
    )
