"""The convolution of a chunk and what `triton_chunk.prepare_kernel` makes of it, without a trip to memory between.

One program per chunk and key head, which serves all value heads that read it: q and k are convolved, brought to length
and multiplied once. As in triton_conv.py a tile is cut into groups of 8 tokens, which are walked through side by side,
and the windows that rows start from are copied before the launch, since a slot may be read and kept at once. What the
steps of a walk leave is put in the order of tokens in registers. A variant follows from the model's shapes and the
dtypes of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.conv.chunks import CHUNK, chunk_table
from deltaserve.ops.conv.triton_conv import conv, fast_way, inputs, output, starting_windows, taps
from deltaserve.ops.gated_delta.triton_chunk import carry, chunk, gates_of, inverse_of_chunk, room_for_chunks
from deltaserve.ops.layout import Layout, Segment


@triton.jit
def _in_order(y0, y1, y2, y3, y4, y5, y6, y7):
    """[8 N, channels] from the steps of groups [N, channels] each."""
    low = tl.join(tl.join(y0, y1), tl.join(y2, y3))
    high = tl.join(tl.join(y4, y5), tl.join(y6, y7))
    steps = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    return tl.reshape(steps, (8 * y0.shape[0], y0.shape[1]))


@triton.jit
def _walked(
    x,
    weight,
    windows,
    first,
    end,
    x_stride,
    channel_stride,
    tap_stride,
    channel,
    scale,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    START: tl.constexpr,
    NORMALISED: tl.constexpr,
    FAST: tl.constexpr,
):
    """DTYPE [CHUNK, channels]: see `_convolved`. START: whether inputs may be a window's."""
    all_channels = tl.full(channel.shape, True, tl.int1)
    i = tl.arange(0, CHUNK // 8) * 8
    w0 = taps(weight, channel, all_channels, channel_stride, tap_stride, 3, 4)
    w1 = taps(weight, channel, all_channels, channel_stride, tap_stride, 2, 4)
    w2 = taps(weight, channel, all_channels, channel_stride, tap_stride, 1, 4)
    w3 = taps(weight, channel, all_channels, channel_stride, tap_stride, 0, 4)
    x0 = inputs(x, windows, i - 3, first, end, x_stride, channel, all_channels, 4, C, START)
    x1 = inputs(x, windows, i - 2, first, end, x_stride, channel, all_channels, 4, C, START)
    x2 = inputs(x, windows, i - 1, first, end, x_stride, channel, all_channels, 4, C, START)
    x3 = inputs(x, windows, i, first, end, x_stride, channel, all_channels, 4, C, START)
    x4 = inputs(x, windows, i + 1, first, end, x_stride, channel, all_channels, 4, C, START)
    x5 = inputs(x, windows, i + 2, first, end, x_stride, channel, all_channels, 4, C, START)
    x6 = inputs(x, windows, i + 3, first, end, x_stride, channel, all_channels, 4, C, START)
    x7 = inputs(x, windows, i + 4, first, end, x_stride, channel, all_channels, 4, C, START)
    x8 = inputs(x, windows, i + 5, first, end, x_stride, channel, all_channels, 4, C, START)
    x9 = inputs(x, windows, i + 6, first, end, x_stride, channel, all_channels, 4, C, START)
    x10 = inputs(x, windows, i + 7, first, end, x_stride, channel, all_channels, 4, C, START)
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    y0 = output(x0, x1, x2, x3, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x4 = x4.to(tl.float32)
    y1 = output(x1, x2, x3, x4, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x5 = x5.to(tl.float32)
    y2 = output(x2, x3, x4, x5, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x6 = x6.to(tl.float32)
    y3 = output(x3, x4, x5, x6, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x7 = x7.to(tl.float32)
    y4 = output(x4, x5, x6, x7, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x8 = x8.to(tl.float32)
    y5 = output(x5, x6, x7, x8, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    x9 = x9.to(tl.float32)
    y6 = output(x6, x7, x8, x9, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    y7 = output(x7, x8, x9, x10.to(tl.float32), w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
    return _in_order(y0, y1, y2, y3, y4, y5, y6, y7)


@triton.jit
def _convolved(
    x,
    weight,
    windows,
    first,
    end,
    x_stride,
    channel_stride,
    tap_stride,
    channel,
    scale,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISED: tl.constexpr,
    FAST: tl.constexpr,
):
    """DTYPE [CHUNK, channels], as triton_conv.py computes it with four taps; anything in rows that are not the row's,
    which begins at `first` and ends before `end`, counted from the chunk's first as x is."""
    if first > -3:
        y = _walked(
            *(x, weight, windows, first, end, x_stride, channel_stride, tap_stride, channel, scale),
            *(DTYPE, C, CHUNK, True, NORMALISED, FAST),
        )
    else:
        y = _walked(
            *(x, weight, windows, first, end, x_stride, channel_stride, tap_stride, channel, scale),
            *(DTYPE, C, CHUNK, False, NORMALISED, FAST),
        )
    return y


@triton.jit
def _keep(x, windows, window, last, first, x_stride, channel, C: tl.constexpr):
    """window = the inputs of the three tokens of which `last` is the newest."""
    for tap in tl.static_range(3):
        i = last - 2 + tap
        is_old = tl.zeros(channel.shape, tl.int32) + i < first
        old = tl.load(windows + (i - first + 3) * C + channel, mask=is_old, other=0)
        new = tl.load(x + i * x_stride + channel, mask=~is_old, other=0)
        tl.store(window + tap * C + channel, tl.where(is_old, old, new))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["write_slot"])
def conv_prepare_kernel(
    x,
    weight,
    windows,
    pool,
    write_slot,
    b,
    a,
    A_log,
    dt_bias,
    table,
    mixed,
    w,
    p,
    gates,
    tokens,
    x_stride,
    channel_stride,
    tap_stride,
    b_stride,
    a_stride,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    FAST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid [key heads, chunks]. Writes q, k and u to `mixed`. SIZE as in `inverse_of`."""
    C: tl.constexpr = 2 * KH * K + VH * V
    GROUP: tl.constexpr = VH // KH
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    DOT: tl.constexpr = tl.float32 if EXACT else DTYPE
    key_head = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    row = tl.load(entry).to(tl.int64)
    base = tl.load(entry + 1)
    first = tl.load(entry + 2) - base
    end = tl.load(entry + 3) - base
    if end == first:
        return
    i = tl.arange(0, CHUNK)
    in_row = (i >= first) & (i < end)
    in_out = in_row[:, None]
    wide = base.to(tl.int64)
    x += wide * x_stride
    mixed += wide * C
    windows += row * (3 * C)
    last = tl.minimum(end, CHUNK) - 1
    slot = tl.load(write_slot + wide + last)
    window = pool + tl.where(slot >= 0, slot, 0).to(tl.int64) * (3 * C)

    channel = key_head * K + tl.arange(0, K)
    place = mixed + i[:, None] * C + channel[None, :]
    query = _convolved(
        *(x, weight, windows, first, end, x_stride, channel_stride, tap_stride, channel, K**-0.5),
        *(DTYPE, C, CHUNK, True, FAST),
    )
    query = tl.where(in_out, query, 0)
    tl.store(place, query, mask=in_out)
    key = _convolved(
        *(x, weight, windows, first, end, x_stride, channel_stride, tap_stride, channel + KH * K, 1.0),
        *(DTYPE, C, CHUNK, True, FAST),
    )
    key = tl.where(in_out, key, 0)
    tl.store(place + KH * K, key, mask=in_out)
    if slot >= 0:
        _keep(x, windows, window, last, first, x_stride, channel, C)
        _keep(x, windows, window, last, first, x_stride, channel + KH * K, C)
    asked = tl.dot(query.to(DOT), tl.trans(key.to(DOT)), input_precision="ieee")
    products = tl.dot(key.to(DOT), tl.trans(key.to(DOT)), input_precision="ieee")

    for member in range(GROUP):
        head = key_head * GROUP + member
        total, beta = gates_of(
            *(b, a, A_log, dt_bias, gates, base, i, in_row, last, head, tokens, b_stride, a_stride, FAST)
        )
        p_place = p + wide * (VH * CHUNK) + ((i[:, None] * VH + head) * CHUNK + i[None, :])
        for_u, for_w = inverse_of_chunk(asked, products, total, beta, p_place, in_row, EXACT, FAST, SIZE)
        corrected = tl.dot(for_w.to(DOT), key.to(DOT), input_precision="ieee")
        w_place = w + wide * (VH * K) + ((i[:, None] * VH + head) * K + tl.arange(0, K)[None, :])
        tl.store(w_place, corrected.to(w.dtype.element_ty), mask=in_out)
        channel = 2 * KH * K + head * V + tl.arange(0, V)
        value = _convolved(
            *(x, weight, windows, first, end, x_stride, channel_stride, tap_stride, channel, 1.0),
            *(DTYPE, C, CHUNK, False, FAST),
        )
        value = tl.where(in_out, value, 0).to(DOT)
        u = tl.dot(for_u.to(DOT), value, input_precision="ieee")
        tl.store(mixed + i[:, None] * C + channel[None, :], u.to(DTYPE), mask=in_out)
        if slot >= 0:
            _keep(x, windows, window, last, first, x_stride, channel, C)


def is_able(conv_weight_CW: Tensor, k_dim: int, v_dim: int) -> bool:
    """Whether `conv_prepare_kernel` has these sizes: four taps, and heads that fill a program's tiles."""
    return conv_weight_CW.shape[1] == 4 and all(16 <= dim <= 128 and dim & (dim - 1) == 0 for dim in (k_dim, v_dim))


def conv_chunk(
    mixed_TC: Tensor,
    conv_weight_CW: Tensor,
    conv_pool_SWC: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    state_pool_SVKD: Tensor,
    layout: Layout,
    segment: Segment,
    **config: Any,
) -> Tensor:
    """`triton_chunk.chunk` of what `triton_conv.conv` makes of a segment, [tokens, Hv, V]: in four launches, or three.

    All inputs hold the step's tokens, and may be views with a row stride. `config` as for `chunk`; "inside", if not
    False, has the convolution done inside, and holds what replaces the launch options of `conv_prepare_kernel`.
    """
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    channels = mixed_TC.shape[1]
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    inside = config.pop("inside", False)
    if inside is False or not is_able(conv_weight_CW, k_dim, v_dim):
        heads = (k_heads, k_dim, v_dim)
        convolved_TC = conv(mixed_TC, conv_weight_CW, conv_pool_SWC, layout, segment, heads)
        return chunk(convolved_TC, b_TV, a_TV, A_log_V, dt_bias_V, state_pool_SVKD, layout, segment, **config)
    tokens, dtype, device = segment.token_end - segment.token_start, mixed_TC.dtype, mixed_TC.device
    table = layout.once(chunk_table, segment)
    made_TC = torch.empty(tokens, channels, dtype=dtype, device=device)
    w_TVK, p_TVC, gates_VT2 = room_for_chunks(tokens, v_heads, k_dim, dtype, device)
    conv_prepare_kernel[(k_heads, table.shape[0])](
        segment.cut(mixed_TC),
        conv_weight_CW,
        starting_windows(conv_pool_SWC, layout, segment),
        conv_pool_SWC,
        segment.cut(layout.write_slot),
        segment.cut(b_TV),
        segment.cut(a_TV),
        A_log_V,
        dt_bias_V,
        table,
        made_TC,
        w_TVK,
        p_TVC,
        gates_VT2,
        tokens,
        mixed_TC.stride(0),
        conv_weight_CW.stride(0),
        conv_weight_CW.stride(1),
        b_TV.stride(0),
        a_TV.stride(0),
        KH=k_heads,
        VH=v_heads,
        K=k_dim,
        V=v_dim,
        CHUNK=CHUNK,
        EXACT=device.type == "cpu",
        FAST=fast_way(mixed_TC),
        num_stages=1,
        **{"SIZE": 2 if torch.version.hip is not None else 16, "num_warps": 4, **inside},
    )
    return carry(made_TC, w_TVK, p_TVC, gates_VT2, state_pool_SVKD, layout, segment, config)
