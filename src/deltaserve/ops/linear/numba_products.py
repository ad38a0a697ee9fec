"""Products of rows with a weight [I, O] in memory, in numba: what projections and experts are made of.

An output is one chain of additions over its inputs, from the first to the last, whatever rows are computed beside it: a
row's bits do not depend on its neighbours. Rows come as lists of addresses, so that they can lie anywhere. All strides
are in bytes.

Shape letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from deltaserve.ops.numba_kernel import device
from deltaserve.ops.numba_lanes import (
    BYTES,
    LANES,
    VECTOR,
    add_product_of_numbers,
    emit_add_product,
    emit_splat,
    read_float,
    read_int64,
    write_float,
)

ZERO = np.float32(0)
ROWS = 4
"""Rows that are computed at once, where there are several."""
WIDE = 8
"""Vectors of outputs of a single row: as many chains as hide an addition's latency."""
DEPTH_OF_FEW = 16
"""Inputs that up to `ROWS` rows go through at once: each is a stream of weights from memory."""
DEPTH_OF_MANY = 128
"""And more rows: the weights of two vectors of outputs stay in the nearest cache meanwhile."""


def _tile(num_rows: int, num_vectors: int):
    """A product of some rows and vectors of outputs, all of which are held in registers."""

    @intrinsic
    def tile(typing, x_rows_N, y_rows_N, row, last, weight, weight_stride, first, out, num_in, adds):
        """Rows from `row` on, or as often as these are missing the `last` again, which gives the same numbers; inputs
        `first` to `first + num_in - 1`, outputs from `out` on. `weight` is that of input 0 and output 0."""

        def generate(context, builder, signature, arguments):
            x_rows_N, y_rows_N, row, last, weight, weight_stride, first, out, num_in, adds = arguments
            integer, number = ir.IntType(64), ir.FloatType()

            def at(address, kind, *offsets):
                for offset in offsets:
                    address = builder.add(address, integer(offset) if isinstance(offset, int) else offset)
                return builder.inttoptr(address, kind.as_pointer())

            def address(rows, place, column):
                number = builder.add(row, integer(place))
                number = builder.select(builder.icmp_signed("<", number, last), number, last)
                entry = builder.load(at(rows, integer, builder.shl(number, integer(3))))
                return builder.add(entry, builder.shl(column, integer(2)))

            places = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
            x = [address(x_rows_N, r, first) for r in range(num_rows)]
            y_row = [address(y_rows_N, r, out) for r in range(num_rows)]
            y = {(r, v): at(y_row[r], VECTOR, v * BYTES) for r, v in places}
            sums = {place: cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [0.0] * LANES)) for place in places}
            with builder.if_then(adds):
                for place in places:
                    builder.store(builder.load(y[place], align=4), sums[place])
            begin = builder.add(weight, builder.add(builder.mul(first, weight_stride), builder.shl(out, integer(2))))
            with cgutils.for_range(builder, num_in) as loop:
                there = builder.add(begin, builder.mul(loop.index, weight_stride))
                w = [builder.load(at(there, VECTOR, v * BYTES), align=4) for v in range(num_vectors)]
                offset = builder.shl(loop.index, integer(2))
                for r in range(num_rows):
                    factor = emit_splat(builder, builder.load(at(x[r], number, offset)))
                    for v in range(num_vectors):
                        builder.store(emit_add_product(builder, factor, w[v], builder.load(sums[r, v])), sums[r, v])
            for place in places:
                builder.store(builder.load(sums[place]), y[place], align=4)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 9, types.boolean), generate

    return tile


_one_by_eight, _one_by_one = _tile(1, WIDE), _tile(1, 1)
_four_by_two, _four_by_one = _tile(ROWS, 2), _tile(ROWS, 1)


@device
def products(x_rows_N, y_rows_N, num_rows, weight, weight_stride, num_in, num_out, adds):
    """`y += x @ weight`, or `y = x @ weight` unless it `adds`; x and y by the addresses of lists of row addresses.

    All int64, and `adds` a bool that is no constant, so that it is compiled once.
    """
    last, full, wide = num_rows - 1, num_out // LANES * LANES, num_out // (WIDE * LANES) * WIDE * LANES
    depth = DEPTH_OF_FEW if num_rows <= ROWS else DEPTH_OF_MANY
    for first in range(0, num_in, depth):
        count, goes_on = min(depth, num_in - first), adds or first > 0
        if num_rows == 1:
            for out in range(0, wide, WIDE * LANES):
                _one_by_eight(x_rows_N, y_rows_N, 0, last, weight, weight_stride, first, out, count, goes_on)
            for out in range(wide, full, LANES):
                _one_by_one(x_rows_N, y_rows_N, 0, last, weight, weight_stride, first, out, count, goes_on)
        else:
            for out in range(0, full - LANES, 2 * LANES):
                for row in range(0, num_rows, ROWS):
                    _four_by_two(x_rows_N, y_rows_N, row, last, weight, weight_stride, first, out, count, goes_on)
            if full // LANES % 2:
                for row in range(0, num_rows, ROWS):
                    out = full - LANES
                    _four_by_one(x_rows_N, y_rows_N, row, last, weight, weight_stride, first, out, count, goes_on)
        for out in range(full, num_out):
            for row in range(num_rows):
                x, y = read_int64(x_rows_N + 8 * row), read_int64(y_rows_N + 8 * row) + 4 * out
                total = read_float(y) if goes_on else ZERO
                for i in range(first, first + count):
                    w = read_float(weight + i * weight_stride + 4 * out)
                    total = add_product_of_numbers(read_float(x + 4 * i), w, total)
                write_float(y, total)
