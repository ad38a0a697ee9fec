"""The most likely token in numba, and whether its row is finite, in one pass over the logits. R rows, V vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltaserve.ops.cpu import CPU
from deltaserve.ops.numba_kernel import kernel
from deltaserve.ops.numba_lanes import (
    BYTES,
    add_product,
    larger,
    largest,
    load,
    read_float,
    smaller,
    smallest,
    splat,
    total,
    write_int64,
)

ZERO, INFINITY = np.float32(0), np.float32(np.inf)


@kernel(6)
def _greedy(logits, stride, tokens, finite, rows, vocab):
    for row in range(rows):
        begin = logits + row * stride
        high = low = load(begin)
        zeros = splat(ZERO)  # unless there is NaN or infinity, which zero times leaves NaN
        for place in range(begin, begin + 4 * vocab, BYTES):
            value = load(place)
            high, low = larger(value, high), smaller(value, low)
            zeros = add_product(value, splat(ZERO), zeros)
        most, token = largest(high), 0
        is_finite = total(zeros) == ZERO and most - smallest(low) < INFINITY
        if is_finite:
            while read_float(begin + 4 * token) != most:
                token += 1
        write_int64(tokens + 8 * row, token)
        write_int64(finite + 8 * row, is_finite)


def greedy_checked(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """As `api.greedy_checked`; float32, without gaps."""
    rows, vocab = logits_RV.shape
    token_R, finite_R = (torch.empty(rows, dtype=torch.int64, device=CPU) for _ in range(2))
    _greedy(logits_RV.data_ptr(), 4 * vocab, token_R.data_ptr(), finite_R.data_ptr(), rows, vocab)
    return token_R, finite_R.bool()
