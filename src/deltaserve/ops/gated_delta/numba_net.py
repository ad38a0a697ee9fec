"""A gated delta net between its projections in one pass over memory, in numba, for rows of any length.

Row by row: the convolution of its tokens, their gates and lengths; then head by head the recurrence, token after token.
A head's state is read where the token before left it and written where the token after finds it, in a slot or in a work
space: no state is copied. What comes out is normed and gated.

Shape letters as in api.py; R rows of a segment, N its tokens.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from deltaserve.ops.cpu import floats
from deltaserve.ops.layout import Layout, Segment, plain
from deltaserve.ops.norm.numba_norm import inverse_root
from deltaserve.ops.numba_kernel import device, kernel
from deltaserve.ops.numba_lanes import (
    BYTES,
    add,
    add_product,
    load,
    multiply,
    read_float,
    read_int32,
    read_int64,
    room,
    silu,
    splat,
    store,
    subtract,
    total,
    write_float,
    write_int64,
)

ZERO, ONE = np.float32(0), np.float32(1)
LENGTH_EPS = np.float32(1e-6)
LINEAR_FROM = 20.0
"""From here on softplus is the identity, as in torch."""


@device
def _convolve(x, x_stride, window, weight, sources_W, pool, write_slot, work, work_stride, tokens, taps, width):
    """The row's inputs, convolved, into `work`; its windows into their slots. `window`: the inputs before the row."""
    for token in range(tokens):
        for tap in range(taps):
            number = token - taps + 1 + tap
            source = x + number * x_stride if number >= 0 else window + (taps - 1 + number) * width
            write_int64(sources_W + 8 * tap, source)
        for place in range(0, width, BYTES):
            y = multiply(load(read_int64(sources_W) + place), load(weight + place))
            for tap in range(1, taps):
                y = add_product(load(read_int64(sources_W + 8 * tap) + place), load(weight + tap * width + place), y)
            store(work + place, silu(y))
        slot = read_int64(write_slot + 8 * token)
        if slot >= 0:
            for tap in range(1, taps):
                goal = pool + (slot * (taps - 1) + tap - 1) * width
                for place in range(0, width, BYTES):
                    store(goal + place, load(read_int64(sources_W + 8 * tap) + place))
        work += work_stride


@device
def _shorten(head, width, scale):
    """One head's query or key to length `scale`, in place."""
    squares = splat(ZERO)
    for place in range(head, head + 4 * width, BYTES):
        squares = add_product(load(place), load(place), squares)
    factor = splat(scale / np.float32(math.sqrt(total(squares) + LENGTH_EPS)))
    for place in range(head, head + 4 * width, BYTES):
        store(place, multiply(load(place), factor))


@device
def _gate(a, b, rates, dt_bias, gates, heads):
    """Each head's decay and write strength of one token, one after the other."""
    for head in range(heads):
        x = float(read_float(a + 4 * head)) + float(read_float(dt_bias + 4 * head))
        soft = x if x > LINEAR_FROM else math.log1p(math.exp(x))
        write_float(gates + 8 * head, np.float32(math.exp(-float(read_float(rates + 4 * head)) * soft)))
        strength = 1.0 / (1.0 + math.exp(-float(read_float(b + 4 * head))))
        write_float(gates + 8 * head + 4, np.float32(strength))


@device
def _advance(q, k, v, decay, strength, before, after, out, k_dim, v_dim):
    """One token of one head: the state [K, V] at `before` to that at `after`, which may be the same; `out` [V]."""
    stride = 4 * v_dim
    decay, strength = splat(decay), splat(strength)
    for column in range(0, stride, BYTES):
        s, d = before + column, after + column
        p0 = p1 = p2 = p3 = splat(ZERO)
        for i in range(0, k_dim, 4):
            p0 = add_product(splat(read_float(k + 4 * i)), load(s), p0)
            p1 = add_product(splat(read_float(k + 4 * i + 4)), load(s + stride), p1)
            p2 = add_product(splat(read_float(k + 4 * i + 8)), load(s + 2 * stride), p2)
            p3 = add_product(splat(read_float(k + 4 * i + 12)), load(s + 3 * stride), p3)
            s += 4 * stride
        known = multiply(decay, add(add(p0, p1), add(p2, p3)))
        u = multiply(strength, subtract(load(v + column), known))
        s = before + column
        p0 = p1 = splat(ZERO)
        for i in range(0, k_dim, 2):
            state = add_product(splat(read_float(k + 4 * i)), u, multiply(decay, load(s)))
            p0 = add_product(splat(read_float(q + 4 * i)), state, p0)
            store(d, state)
            state = add_product(splat(read_float(k + 4 * i + 4)), u, multiply(decay, load(s + stride)))
            p1 = add_product(splat(read_float(q + 4 * i + 4)), state, p1)
            store(d + stride, state)
            s, d = s + 2 * stride, d + 2 * stride
        store(out + column, add(p0, p1))


@device
def _recur(work, work_stride, gates, read, pool, write_slot, spare, out, tokens, head, k_heads, v_heads, k_dim, v_dim):
    """All tokens of a row, one head. `spare` [K, V] holds the state where no slot does."""
    key_head = head // (v_heads // k_heads)
    state_bytes = 4 * k_dim * v_dim
    state = pool + (read * v_heads + head) * state_bytes
    if read < 0:
        state = spare
        for place in range(spare, spare + state_bytes, BYTES):
            store(place, splat(ZERO))
    q, k = work + 4 * key_head * k_dim, work + 4 * (k_heads + key_head) * k_dim
    v = work + 4 * (2 * k_heads * k_dim + head * v_dim)
    for token in range(tokens):
        slot = read_int64(write_slot + 8 * token)
        after = pool + (slot * v_heads + head) * state_bytes if slot >= 0 else spare
        gate = gates + 8 * (token * v_heads + head)
        _advance(
            q, k, v, read_float(gate), read_float(gate + 4), state, after,
            out + 4 * (token * v_heads + head) * v_dim, k_dim, v_dim,
        )  # fmt: skip
        state, q, k, v = after, q + work_stride, k + work_stride, v + work_stride


@device
def _norm_and_gate(o, z, weight, width, eps):
    """One head of one token, in place."""
    factor = splat(inverse_root(o, width, eps))
    for place in range(0, 4 * width, BYTES):
        normed = multiply(multiply(load(o + place), factor), load(weight + place))
        store(o + place, multiply(normed, silu(load(z + place))))


@kernel(29, 1)
def _net(
    x, x_stride, z, z_stride, b, b_stride, a, a_stride, conv_weight, A_log, dt_bias, norm_weight, conv_pool, state_pool,
    read_slot, write_slot, bounds, work, gates, spare, window, out,
    rows, taps, k_heads, v_heads, k_dim, v_dim, width, eps,
):  # fmt: skip
    """One segment: tensors from its first token on. `width`: bytes of a token in `work`."""
    scale = ONE / np.float32(math.sqrt(np.float32(k_dim)))
    sources_W, rates = room(8 * taps), room(4 * v_heads)
    for head in range(v_heads):
        write_float(rates + 4 * head, np.float32(math.exp(float(read_float(A_log + 4 * head)))))
    for row in range(rows):
        first = read_int32(bounds + 4 * row)
        tokens, read = read_int32(bounds + 4 * row + 4) - first, read_int64(read_slot + 8 * row)
        for place in range(0, (taps - 1) * width, BYTES):
            kept = conv_pool + read * (taps - 1) * width + place
            store(window + place, load(kept) if read >= 0 else splat(ZERO))
        place, slots = work + first * width, write_slot + 8 * first
        _convolve(
            x + first * x_stride, x_stride, window, conv_weight, sources_W, conv_pool, slots,
            place, width, tokens, taps, width,
        )  # fmt: skip
        for token in range(first, first + tokens):
            for head in range(2 * k_heads):
                _shorten(work + token * width + 4 * head * k_dim, k_dim, scale if head < k_heads else ONE)
            _gate(a + token * a_stride, b + token * b_stride, rates, dt_bias, gates + 8 * token * v_heads, v_heads)
        o = out + 4 * first * v_heads * v_dim
        for head in range(v_heads):
            _recur(
                place, width, gates + 8 * first * v_heads, read, state_pool, slots, spare, o,
                tokens, head, k_heads, v_heads, k_dim, v_dim,
            )  # fmt: skip
        for token in range(tokens):
            for head in range(v_heads):
                gate = z + (first + token) * z_stride + 4 * head * v_dim
                _norm_and_gate(o + 4 * (token * v_heads + head) * v_dim, gate, norm_weight, v_dim, eps)


def net(
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
) -> Tensor:
    """As `api.gated_delta_net`, all in float32; rows and pools without gaps."""
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    (tokens, channels), taps = mixed_TC.shape, conv_weight_CW.shape[1]
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    out_TVD = floats(tokens, v_heads, v_dim)
    # Of the convolved tokens, their gates, a state and a window.
    sizes = (tokens * channels, tokens * v_heads * 2, k_dim * v_dim, (taps - 1) * channels)
    space = floats(sum(sizes))
    work, gates, spare, window = (space.data_ptr() + 4 * sum(sizes[:part]) for part in range(4))
    layout = layout.once(plain)
    for segment in layout.segments:
        first = segment.token_start
        _net(
            *(_at(mixed_TC, first), 4 * mixed_TC.stride(0), _at(z_TX, first), 4 * z_TX.stride(0)),
            *(_at(b_TV, first), 4 * b_TV.stride(0), _at(a_TV, first), 4 * a_TV.stride(0)),
            *(conv_weight_CW.data_ptr(), A_log_V.data_ptr(), dt_bias_V.data_ptr(), norm_weight_D.data_ptr()),
            *(conv_pool_SWC.data_ptr(), state_pool_SVKD.data_ptr()),
            *_slots(layout, segment),
            *(work, gates, spare, window, _at(out_TVD, first)),
            *(segment.row_end - segment.row_start, taps, k_heads, v_heads, k_dim, v_dim, 4 * channels, eps),
        )
    return out_TVD


def _at(x: Tensor, row: int) -> int:
    return x.data_ptr() + 4 * row * x.stride(0)


def _slots(layout: Layout, segment: Segment) -> tuple[int, int, int]:
    return (
        layout.read_slot.data_ptr() + 8 * segment.row_start,
        layout.write_slot.data_ptr() + 8 * segment.token_start,
        segment.cu_seqlens.data_ptr(),
    )
