"""Root-mean-square norms in numba. Widths are multiples of LANES.

Shape letters: T rows, D width.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from deltaserve.ops.cpu import floats
from deltaserve.ops.numba_kernel import device, kernel
from deltaserve.ops.numba_lanes import BYTES, add, add_product, load, multiply, splat, store, total

ZERO, ONE = np.float32(0), np.float32(1)


@device
def inverse_root(x, width, eps):
    """`1 / sqrt(mean(x^2) + eps)` of `width` neighbours, in float32."""
    squares = splat(ZERO)
    for place in range(x, x + 4 * width, BYTES):
        squares = add_product(load(place), load(place), squares)
    return ONE / np.float32(math.sqrt(total(squares) / np.float32(width) + eps))


@device
def scaled(x, weight, width, factor, y):
    """`y = x * factor * weight`."""
    factor = splat(factor)
    for place in range(0, 4 * width, BYTES):
        store(y + place, multiply(multiply(load(x + place), factor), load(weight + place)))


@device
def add_norm_rows(x, x_stride, residual, residual_stride, weight, norm, total_, rows, width, eps):
    for _ in range(rows):
        for place in range(0, 4 * width, BYTES):
            store(total_ + place, add(load(x + place), load(residual + place)))
        scaled(total_, weight, width, inverse_root(total_, width, eps), norm)
        x, residual, norm, total_ = x + x_stride, residual + residual_stride, norm + 4 * width, total_ + 4 * width


@kernel(9, 1)
def _add_norm(x, x_stride, residual, residual_stride, weight, norm, total_, rows, width, eps):
    add_norm_rows(x, x_stride, residual, residual_stride, weight, norm, total_, rows, width, eps)


@kernel(5, 1)
def _norm(x, weight, y, rows, width, eps):
    for place in range(0, rows * 4 * width, 4 * width):
        scaled(x + place, weight, width, inverse_root(x + place, width, eps), y + place)


def norm(x_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> Tensor:
    """As `api.gemma_rms_norm`; x without gaps."""
    y_D, width = floats(*x_D.shape), x_D.shape[-1]
    _norm(x_D.data_ptr(), weight_plus_one_D.data_ptr(), y_D.data_ptr(), x_D.numel() // width, width, eps)
    return y_D


def add_norm(x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `api.add_gemma_rms_norm`; x and residual without gaps."""
    norm_D, total_D, width = floats(*x_D.shape), floats(*x_D.shape), x_D.shape[-1]
    _add_norm(
        *(x_D.data_ptr(), 4 * width, residual_D.data_ptr(), 4 * width, weight_plus_one_D.data_ptr()),
        *(norm_D.data_ptr(), total_D.data_ptr(), x_D.numel() // width, width, eps),
    )
    return norm_D, total_D
