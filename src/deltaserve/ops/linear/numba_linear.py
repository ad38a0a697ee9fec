"""Projections of few rows in numba, with the norm before them in the same call.

Shape letters as in api.py.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.cpu import floats
from deltaserve.ops.linear.numba_products import products
from deltaserve.ops.norm.numba_norm import add_norm_rows
from deltaserve.ops.numba_kernel import device, kernel
from deltaserve.ops.numba_lanes import room, write_int64


@device
def _project(x, x_stride, weight, y, rows, width, num_out):
    x_rows, y_rows = room(8 * rows), room(8 * rows)
    for row in range(rows):
        write_int64(x_rows + 8 * row, x + row * x_stride)
        write_int64(y_rows + 8 * row, y + row * 4 * num_out)
    products(x_rows, y_rows, rows, weight, 4 * num_out, width, num_out, rows < 0)


@kernel(7)
def _linear(x, x_stride, weight, y, rows, width, num_out):
    _project(x, x_stride, weight, y, rows, width, num_out)


@kernel(15, 1)
def _norm_linear(
    x, x_stride, residual, residual_stride, norm_weight, norm, total, weight, y, num_out, beside, z, num_beside,
    rows, width, eps,
):  # fmt: skip
    add_norm_rows(x, x_stride, residual, residual_stride, norm_weight, norm, total, rows, width, eps)
    _project(norm, 4 * width, weight, y, rows, width, num_out)
    if num_beside:
        _project(norm, 4 * width, beside, z, rows, width, num_beside)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `api.linear`; rows of x without gaps, the weight [I, O] in memory."""
    (rows, width), num_out = x_TI.shape, weight_OI.shape[0]
    y_TO = floats(rows, num_out)
    _linear(x_TI.data_ptr(), 4 * x_TI.stride(0), weight_OI.data_ptr(), y_TO.data_ptr(), rows, width, num_out)
    return y_TO


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor,
    weight_plus_one_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    beside_PI: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As `api.norm_linear`; rows without gaps, weights [I, O] in memory."""
    (rows, width), num_out = x_TI.shape, weight_OI.shape[0]
    norm_TI, total_TI, y_TO = floats(rows, width), floats(rows, width), floats(rows, num_out)
    beside, z, num_beside, y_TP = 0, 0, 0, None
    if beside_PI is not None:
        num_beside = beside_PI.shape[0]
        y_TP = floats(rows, num_beside)
        beside, z = beside_PI.data_ptr(), y_TP.data_ptr()
    _norm_linear(
        *(x_TI.data_ptr(), 4 * x_TI.stride(0), residual_TI.data_ptr(), 4 * residual_TI.stride(0)),
        *(weight_plus_one_I.data_ptr(), norm_TI.data_ptr(), total_TI.data_ptr()),
        *(weight_OI.data_ptr(), y_TO.data_ptr(), num_out, beside, z, num_beside, rows, width, eps),
    )
    return y_TO, y_TP, norm_TI, total_TI
