"""A mixture of experts in numba: routing, experts and the shared one in one call.

Pairs are sorted by expert, so that an expert's weights stay in the nearest cache while its tokens take them; the tokens
stay where they are. A token's sum goes from the shared expert to its experts by their ids, whoever is beside it.

Shape letters as in api.py; P = T * K pairs of a token and one of its experts, S inner width of the shared expert.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from deltaserve.ops.cpu import CPU, floats
from deltaserve.ops.linear.numba_products import products
from deltaserve.ops.numba_kernel import device, kernel
from deltaserve.ops.numba_lanes import (
    BYTES,
    load,
    multiply,
    read_float,
    read_int64,
    room,
    silu,
    splat,
    store,
    write_float,
    write_int64,
)

ZERO, ONE = np.float32(0), np.float32(1)
GROUP = 32
"""Tokens of one expert that are computed at once."""


@device
def _route(scores, num_experts, ids_K, weights_K, top_k, renormalize):
    """One token's experts, the most probable first, of equals the lowest id; and their weights."""
    for place in range(top_k):
        best = -1
        for expert in range(num_experts):
            if best < 0 or read_float(scores + 4 * expert) > read_float(scores + 4 * best):
                is_taken = False
                for other in range(place):
                    is_taken |= read_int64(ids_K + 8 * other) == expert
                if not is_taken:
                    best = expert
        write_int64(ids_K + 8 * place, best)
    most, total = float(read_float(scores + 4 * read_int64(ids_K))), 0.0
    for expert in range(num_experts):
        score = float(read_float(scores + 4 * expert))
        if score != score:  # also of one that is not chosen: a softmax over all of them is NaN
            most = score
    for number in range(top_k if renormalize else num_experts):
        expert = read_int64(ids_K + 8 * number) if renormalize else number
        total += math.exp(float(read_float(scores + 4 * expert)) - most)
    for place in range(top_k):
        score = float(read_float(scores + 4 * read_int64(ids_K + 8 * place)))
        write_float(weights_K + 4 * place, np.float32(math.exp(score - most) / total))


@device
def _sort(ids_P, order_P, end_E, num_pairs, num_experts):
    """The pairs by expert, and within one as they were; and where each expert's end."""
    for expert in range(num_experts):
        write_int64(end_E + 8 * expert, 0)
    for pair in range(num_pairs):
        place = end_E + 8 * read_int64(ids_P + 8 * pair)
        write_int64(place, read_int64(place) + 1)
    begin = 0
    for expert in range(num_experts):
        count = read_int64(end_E + 8 * expert)
        write_int64(end_E + 8 * expert, begin)
        begin += count
    for pair in range(num_pairs):
        place = end_E + 8 * read_int64(ids_P + 8 * pair)
        write_int64(order_P + 8 * read_int64(place), pair)
        write_int64(place, read_int64(place) + 1)


@device
def _swiglu(hidden, inner, weight):
    """`silu(gate) * up * weight` of one row [2I], in place of the gate."""
    weight = splat(weight)
    for place in range(hidden, hidden + 4 * inner, BYTES):
        store(place, multiply(multiply(silu(load(place)), load(place + 4 * inner)), weight))


@kernel(21)
def _moe(
    x, x_stride, scores, scores_stride, w13, w2, shared13, shared2, ids_P, order_P, end_E, weights_P, hidden, out,
    tokens, num_experts, top_k, width, inner, shared_inner, renormalize,
):  # fmt: skip
    for token in range(tokens):
        row, pair = scores + token * scores_stride, token * top_k
        _route(row, num_experts, ids_P + 8 * pair, weights_P + 4 * pair, top_k, renormalize)
    _sort(ids_P, order_P, end_E, tokens * top_k, num_experts)
    x_rows, h_rows, y_rows, factors = room(8 * GROUP), room(8 * GROUP), room(8 * GROUP), room(4 * GROUP)

    member = 0
    for number in range(-1, num_experts):  # the shared expert, then the others
        is_shared = number < 0
        expert, breadth = max(number, 0), shared_inner if is_shared else inner
        place13 = shared13 if is_shared else w13 + expert * 8 * inner * width
        place2 = shared2 if is_shared else w2 + expert * 4 * inner * width
        end = tokens if is_shared else read_int64(end_E + 8 * expert)
        while member < end:
            count = min(GROUP, end - member)
            for row in range(count):
                pair = (member + row) * top_k if is_shared else read_int64(order_P + 8 * (member + row))
                token = pair // top_k
                write_int64(x_rows + 8 * row, x + token * x_stride)
                write_int64(h_rows + 8 * row, hidden + row * 8 * breadth)
                write_int64(y_rows + 8 * row, out + token * 4 * width)
                factor = read_float(weights_P + 4 * pair)
                if is_shared:
                    gate = float(read_float(scores + token * scores_stride + 4 * num_experts))
                    factor = np.float32(1.0 / (1.0 + math.exp(-gate)))
                write_float(factors + 4 * row, factor)
            products(x_rows, h_rows, count, place13, 8 * breadth, width, 2 * breadth, member < 0)
            for row in range(count):
                _swiglu(hidden + row * 8 * breadth, breadth, read_float(factors + 4 * row))
            products(h_rows, y_rows, count, place2, 4 * width, breadth, width, not is_shared)
            member += count
        if is_shared:
            member = 0


def sparse_moe(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13_E2ID: Tensor,
    w2_EDI: Tensor,
    top_k: int,
    renormalize: bool,
    shared: tuple[Tensor, Tensor],
) -> Tensor:
    """As `api.sparse_moe`, all in float32; weights as `api.allocate` and the one of `linear` lay them, rows of x and of
    the scores without gaps."""
    (tokens, width), (num_experts, _, inner) = x_TD.shape, w2_EDI.shape
    (shared13, shared2), pairs = shared, tokens * top_k
    shared_inner = shared2.shape[1]
    out_TD, integers = floats(tokens, width), torch.empty(2 * pairs + num_experts, dtype=torch.int64, device=CPU)
    numbers = floats(pairs + 2 * GROUP * max(inner, shared_inner))
    ids, weights = integers.data_ptr(), numbers.data_ptr()
    _moe(
        *(x_TD.data_ptr(), 4 * x_TD.stride(0), scores_TF.data_ptr(), 4 * scores_TF.stride(0)),
        *(w13_E2ID.data_ptr(), w2_EDI.data_ptr(), shared13.data_ptr(), shared2.data_ptr()),
        *(ids, ids + 8 * pairs, ids + 16 * pairs, weights, weights + 4 * pairs, out_TD.data_ptr()),
        *(tokens, num_experts, top_k, width, inner, shared_inner, renormalize),
    )
    return out_TD
