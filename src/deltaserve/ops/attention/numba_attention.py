"""Attention in numba: `enter` norms and rotates queries and keys and stores keys and values; `step` lets the tokens of
extending rows look back, block by block where they lie, without a copy of them.

Shape letters as in api.py.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deltaserve.ops.cpu import floats
from deltaserve.ops.layout import BLOCK, Layout, Segment, plain
from deltaserve.ops.norm.numba_norm import inverse_root, scaled
from deltaserve.ops.numba_kernel import device, kernel
from deltaserve.ops.numba_lanes import (
    BYTES,
    LANES,
    add,
    add_product,
    exp,
    larger,
    largest,
    load,
    multiply,
    read_float,
    read_int32,
    read_int64,
    room,
    sigmoid,
    splat,
    store,
    subtract,
    total,
    write_float,
)

ZERO, ONE = np.float32(0), np.float32(1)
LOWEST = np.float32(-np.inf)


@device
def _rotate(head, cos_sin, half):
    for i in range(half):
        left, right = read_float(head + 4 * i), read_float(head + 4 * (half + i))
        cosine, sine = read_float(cos_sin + 4 * i), read_float(cos_sin + 4 * (half + i))
        write_float(head + 4 * i, left * cosine - right * sine)
        write_float(head + 4 * (half + i), right * cosine + left * sine)


@kernel(19, 1)
def _enter(
    q, q_stride, k, k_stride, v, v_stride, q_weight, k_weight, cos_sin, half, position, pool, values, kv_index, out,
    tokens, heads, k_heads, width, eps,
):  # fmt: skip
    """`values`: bytes from a key in the pool to its value."""
    for token in range(tokens):
        angles = cos_sin + read_int64(position + 8 * token) * 8 * half
        for head in range(heads):
            x, y = q + token * q_stride + 4 * head * width, out + 4 * (token * heads + head) * width
            scaled(x, q_weight, width, inverse_root(x, width, eps), y)
            _rotate(y, angles, half)
        index = read_int64(kv_index + 8 * token)
        if index < 0:
            continue
        for head in range(k_heads):
            x, y = k + token * k_stride + 4 * head * width, pool + 4 * (index * k_heads + head) * width
            scaled(x, k_weight, width, inverse_root(x, width, eps), y)
            _rotate(y, angles, half)
            value = v + token * v_stride + 4 * head * width
            for place in range(0, 4 * width, BYTES):
                store(y + values + place, load(value + place))


@device
def _place(rows, table, key, stride):
    """Where a key or a value of the sequence lies; `rows`: that of the pool's first token."""
    return rows + (read_int32(table + 4 * (key // BLOCK)) * BLOCK + key % BLOCK) * stride


@device
def _score(q, keys, table, first, seen, heads, k_heads, width, scale, scores, room_of_head):
    """`scale * q . k` of all heads and of keys `first` to `seen` - 1, in the order of memory."""
    group = heads // k_heads
    for key in range(first, seen):
        place = _place(keys, table, key, 4 * k_heads * width)
        for head in range(heads):
            query, there, products = q + 4 * head * width, place + 4 * (head // group) * width, splat(ZERO)
            for i in range(0, 4 * width, BYTES):
                products = add_product(load(query + i), load(there + i), products)
            write_float(scores + head * room_of_head + 4 * (key - first), total(products) * scale)


@device
def _weigh(scores, count):
    """`exp(score - largest)` of one head, in place. Returns their sum."""
    for i in range(count, -(-count // LANES) * LANES):
        write_float(scores + 4 * i, LOWEST)  # of weight 0
    highest = splat(LOWEST)
    for place in range(scores, scores + 4 * count, BYTES):
        highest = larger(load(place), highest)
    sums, most = splat(ZERO), splat(largest(highest))
    for place in range(scores, scores + 4 * count, BYTES):
        weight = exp(subtract(load(place), most))
        store(place, weight)
        sums = add(sums, weight)
    return total(sums)


@device
def _sum_values(weights, room_of_head, values, table, first, seen, heads, k_heads, width, out):
    """`sum of weight * value` of all heads over keys `first` to `seen` - 1, one chain from the first to the last."""
    stride, group = 4 * k_heads * width, heads // k_heads
    for i in range(0, 4 * heads * width, BYTES):
        store(out + i, splat(ZERO))
    whole = first + (seen - first) // 4 * 4
    for key in range(first, whole, 4):
        v0, v1 = _place(values, table, key, stride), _place(values, table, key + 1, stride)
        v2, v3 = _place(values, table, key + 2, stride), _place(values, table, key + 3, stride)
        for head in range(heads):
            o, w, there = out + 4 * head * width, weights + head * room_of_head, 4 * (head // group) * width
            w0, w1 = splat(read_float(w)), splat(read_float(w + 4))
            w2, w3 = splat(read_float(w + 8)), splat(read_float(w + 12))
            for i in range(0, 4 * width, BYTES):
                sums = add_product(w0, load(v0 + there + i), load(o + i))
                sums = add_product(w1, load(v1 + there + i), sums)
                sums = add_product(w2, load(v2 + there + i), sums)
                store(o + i, add_product(w3, load(v3 + there + i), sums))
        weights += 16
    for key in range(whole, seen):
        value = _place(values, table, key, stride)
        for head in range(heads):
            o, there = out + 4 * head * width, value + 4 * (head // group) * width
            weight = splat(read_float(weights + head * room_of_head))
            for i in range(0, 4 * width, BYTES):
                store(o + i, add_product(weight, load(there + i), load(o + i)))
        weights += 4


@device
def _finish(out, gate, sum_of_weights, width):
    """One head's weighted mean, gated by sigmoid, in place."""
    factor = splat(ONE / sum_of_weights)
    for i in range(0, 4 * width, BYTES):
        store(out + i, multiply(multiply(load(out + i), factor), sigmoid(load(gate + i))))


@kernel(18, 1)
def _step(
    q, gate, gate_stride, out, pool, values, table, table_stride, context_len, first_key, scores, room_of_head, rows,
    length, heads, k_heads, width, has_first, scale,
):  # fmt: skip
    """`values`: bytes from a key in the pool to its value; `room_of_head`: bytes of a head's scores."""
    sums = room(4 * heads)
    for row in range(rows):
        context, first = read_int32(context_len + 4 * row), 0
        if has_first:
            first = read_int32(first_key + 4 * row)
        blocks = table + row * table_stride
        for token in range(row * length, row * length + length):
            seen = context - (row + 1) * length + token + 1
            o = out + 4 * token * heads * width
            if seen <= first:
                for i in range(0, 4 * heads * width, BYTES):
                    store(o + i, splat(ZERO))
                continue
            query = q + 4 * token * heads * width
            _score(query, pool, blocks, first, seen, heads, k_heads, width, scale, scores, room_of_head)
            for head in range(heads):
                write_float(sums + 4 * head, _weigh(scores + head * room_of_head, seen - first))
            _sum_values(scores, room_of_head, pool + values, blocks, first, seen, heads, k_heads, width, o)
            for head in range(heads):
                opening = gate + token * gate_stride + 4 * head * width
                _finish(o + 4 * head * width, opening, read_float(sums + 4 * head), width)


def enter(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin: Tensor,
    kv_pool: Tensor,
    layout: Layout,
) -> Tensor:
    """Queries after norm and rotation [T, H, D]; keys after them, and values, go to the pool at layout.kv_index.

    As in `api.gated_attention`, all in float32; heads of a token without gaps.
    """
    layout, (tokens, heads, width) = layout.once(plain), q_THD.shape
    out_THD = floats(tokens, heads, width)
    _enter(
        *(q_THD.data_ptr(), 4 * q_THD.stride(0), k_TGD.data_ptr(), 4 * k_TGD.stride(0)),
        *(v_TGD.data_ptr(), 4 * v_TGD.stride(0), q_weight_D.data_ptr(), k_weight_D.data_ptr()),
        *(cos_sin.data_ptr(), cos_sin.shape[1] // 2, layout.position.data_ptr()),
        *(kv_pool.data_ptr(), 4 * kv_pool.stride(0), layout.kv_index.data_ptr(), out_THD.data_ptr()),
        *(tokens, heads, k_TGD.shape[1], width, eps),
    )
    return out_THD


def step(
    q_THD: Tensor,
    gate_TX: Tensor,
    out_TX: Tensor,
    kv_pool: Tensor,
    layout: Layout,
    segment: Segment,
    scale: float,
) -> None:
    """Writes the segment's tokens of `out`: what they see, gated. All in float32; q, out and the pool without gaps."""
    layout, (heads, width) = layout.once(plain), q_THD.shape[1:]
    rows, table, first = segment.row_end - segment.row_start, layout.block_table, layout.first_key
    scores_HN = floats(heads, table.shape[1] * BLOCK)
    _step(
        *(_at(q_THD, segment.token_start), _at(gate_TX, segment.token_start), 4 * gate_TX.stride(0)),
        *(_at(out_TX, segment.token_start), kv_pool.data_ptr(), 4 * kv_pool.stride(0)),
        *(_at(table, segment.row_start), 4 * table.stride(0), _at(layout.context_len, segment.row_start)),
        *(0 if first is None else _at(first, segment.row_start), scores_HN.data_ptr(), 4 * scores_HN.shape[1]),
        *(rows, segment.max_len, heads, kv_pool.shape[3], width, first is not None, scale),
    )


def _at(x: Tensor, row: int) -> int:
    """The address of a row, of four bytes a number."""
    return x.data_ptr() + 4 * row * x.stride(0)
