"""Eight float32 numbers as one value of a numba kernel, and the memory that they come from. Knows no op.

Kernels on a CPU say themselves what is computed side by side, so that the order of every sum is what the code says: it
depends on no compiler and on no neighbour. Addresses are int64, in bytes; whoever takes one of a tensor keeps the
tensor alive. Nothing here checks a bound.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from deltaserve.ops.cpu import LANES

BYTES = 4 * LANES
"""Of eight lanes."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Sum to ln 2; the first has so few bits that its products with whole numbers are exact."""
ROUND = 12582912.0
"""1.5 * 2^23: adding it leaves a whole number in the low bits."""
EXP_LARGEST, EXP_SMALLEST = 88.0, -87.0
"""Beyond them `exp` is infinity and 0."""
EXP_TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32 x {LANES}")


lanes = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, VECTOR)


def _same(number: float) -> ir.Constant:
    return ir.Constant(VECTOR, [number] * LANES)


def emit_add_product(builder, left, right, total):
    """`left * right + total`, rounded once where the machine can."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, (left, right, total))


def emit_splat(builder, number):
    """One number in all lanes."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(VECTOR, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


# ---- memory ----


@intrinsic
def load(typing, address):
    """Eight neighbours."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], VECTOR.as_pointer())
        return builder.load(place, align=4)

    return lanes(types.int64), generate


@intrinsic
def store(typing, address, value):
    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], VECTOR.as_pointer())
        builder.store(arguments[1], place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, lanes), generate


def _reader(kind: types.Type):
    @intrinsic
    def read(typing, address):
        def generate(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return builder.load(place)

        return kind(types.int64), generate

    return read


read_float, read_int32, read_int64 = _reader(types.float32), _reader(types.int32), _reader(types.int64)


def _writer(kind: types.Type):
    @intrinsic
    def write(typing, address, value):
        def generate(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            builder.store(arguments[1], place)
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return write


write_float, write_int64 = _writer(types.float32), _writer(types.int64)


@intrinsic
def room(typing, num_bytes):
    """The address of so many bytes on the stack, until the kernel returns: for what is small. Not within a loop."""

    def generate(context, builder, signature, arguments):
        place = builder.alloca(ir.IntType(8), arguments[0])
        place.align = BYTES
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(types.int64), generate


# ---- arithmetic ----


@intrinsic
def splat(typing, number):
    """A number in all lanes."""

    def generate(context, builder, signature, arguments):
        return emit_splat(builder, arguments[0])

    return lanes(types.float32), generate


def _binary(operation: str):
    @intrinsic
    def compute(typing, left, right):
        def generate(context, builder, signature, arguments):
            return getattr(builder, operation)(*arguments)

        return lanes(lanes, lanes), generate

    return compute


add, subtract, multiply, divide = _binary("fadd"), _binary("fsub"), _binary("fmul"), _binary("fdiv")


def _chooser(comparison: str):
    @intrinsic
    def choose(typing, left, right):
        """Of two NaN and numbers: the right one."""

        def generate(context, builder, signature, arguments):
            return builder.select(builder.fcmp_ordered(comparison, *arguments), *arguments)

        return lanes(lanes, lanes), generate

    return choose


larger, smaller = _chooser(">"), _chooser("<")


@intrinsic
def add_product(typing, left, right, total):
    """`left * right + total`, rounded once where the machine can."""

    def generate(context, builder, signature, arguments):
        return emit_add_product(builder, *arguments)

    return lanes(lanes, lanes, lanes), generate


@intrinsic
def add_product_of_numbers(typing, left, right, total):
    """As `add_product`, of three numbers."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.f32"), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _folder(fold):
    @intrinsic
    def across(typing, value):
        def generate(context, builder, signature, arguments):
            value, width = arguments[0], LANES
            while width > 1:
                width //= 2
                order = [*range(width, 2 * width), *range(LANES - width)]
                upper = builder.shuffle_vector(value, value, ir.Constant(_INTS, order))
                value = fold(builder, value, upper)
            return builder.extract_element(value, ir.Constant(_INT, 0))

        return types.float32(lanes), generate

    return across


total = _folder(lambda builder, left, right: builder.fadd(left, right))
"""The sum of eight lanes, in halves: always in the same order."""
largest = _folder(lambda builder, left, right: builder.select(builder.fcmp_ordered(">", left, right), left, right))
smallest = _folder(lambda builder, left, right: builder.select(builder.fcmp_ordered("<", left, right), left, right))


def _emit_exp(builder, x):
    # x = n * ln 2 + r: e^r is a polynomial, 2^n goes into the exponent's bits.
    shifted = emit_add_product(builder, x, _same(LOG2_E), _same(ROUND))
    n = builder.fsub(shifted, _same(ROUND))
    r = emit_add_product(builder, n, _same(-LN2_HIGH), x)
    r = emit_add_product(builder, n, _same(-LN2_LOW), r)
    value = _same(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value = emit_add_product(builder, value, r, _same(term))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * LANES))
    value = builder.bitcast(builder.add(builder.bitcast(value, _INTS), exponent), VECTOR)
    value = builder.select(builder.fcmp_ordered("<", x, _same(EXP_SMALLEST)), _same(0.0), value)
    value = builder.select(builder.fcmp_ordered(">", x, _same(EXP_LARGEST)), _same(float("inf")), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)


def _emit_sigmoid(builder, x):
    return builder.fdiv(_same(1.0), builder.fadd(_same(1.0), _emit_exp(builder, builder.fsub(_same(0.0), x))))


def _emit_silu(builder, x):
    return builder.fdiv(x, builder.fadd(_same(1.0), _emit_exp(builder, builder.fsub(_same(0.0), x))))


def _unary(emit):
    @intrinsic
    def compute(typing, value):
        def generate(context, builder, signature, arguments):
            return emit(builder, arguments[0])

        return lanes(lanes), generate

    return compute


exp = _unary(_emit_exp)
"""e to the power of each lane, within two units in the last place; 0 below EXP_SMALLEST. NaN stays NaN."""
sigmoid, silu = _unary(_emit_sigmoid), _unary(_emit_silu)
