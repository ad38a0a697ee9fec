"""What the warp groups of `triton_hopper` do with the blocks of a context: copy them, and take them into running sums.
Knows no rows and no tiles.

Blocks are taken from the diagonal backwards, so that the masked ones come first (and last, where first keys are
hidden). A box is copied whole, so values that the sequence does not have are zeroed in shared memory: a weight of 0
times NaN is not 0. Both groups write the same zeros.

With `slack` above 0 a maximum moves only when it grows by more than `slack` powers of two, and where it has not moved
for any row of a warp, its sums are not multiplied by 1. Weights are then at most 2 ** slack instead of 1; their
relative precision is the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)
"""Queries of a warp group: the height of its matrix product."""
LOG2_E = gl.constexpr(1.4426950408889634)
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Its name before Triton 3.7 and since."""


@gluon.constexpr_function
def product_layout(columns):
    """How a warp group holds the result of a product, [ROWS, columns] fp32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def wide_layout(width):
    """Reads and writes of whole rows of memory, 16 bytes at a time."""
    return gl.BlockedLayout([1, 8], [32 * 8 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def _copy(desc, buffers, block, column, turn, is_there):
    """Copies a block to the buffer of a turn, when both groups have left it."""
    smem, ready, free = buffers
    STAGES: gl.constexpr = smem.shape[0]
    BYTES: gl.constexpr = smem.shape[1] * smem.shape[2] * 2
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1, pred=is_there)
    mbarrier.expect(ready.index(stage), BYTES, pred=is_there)
    row = gl.maximum(block, 0) * smem.shape[1]
    copy_box(desc, [row, column], ready.index(stage), smem.index(stage), pred=is_there)


@gluon.jit
def produce(k_desc, v_desc, keys, values, table_ptr, column, last, num_blocks, has_block):
    """Copies blocks `last`, `last` - 1, ... in the order in which they are used: keys a turn before values."""
    block = gl.load(table_ptr + last, mask=has_block, other=0)
    _copy(k_desc, keys, block, column, 0, True)
    next = gl.load(table_ptr + last - 1, mask=num_blocks > 1, other=0)
    for turn in range(num_blocks):
        _copy(k_desc, keys, next, column, turn + 1, turn + 1 < num_blocks)
        _copy(v_desc, values, block, column, turn, True)
        block = next
        next = gl.load(table_ptr + last - turn - 2, mask=turn + 2 < num_blocks, other=0)


@gluon.jit
def _clear(values, turn, key0, span):
    """Zeroes the values of keys that are not there."""
    context, first_key, _ = span
    smem, ready, _ = values
    STAGES: gl.constexpr = smem.shape[0]
    KEYS: gl.constexpr = smem.shape[1]
    if (key0 + KEYS > context) | (key0 < first_key):
        PART: gl.constexpr = 16
        layout: gl.constexpr = wide_layout(smem.shape[2])
        mbarrier.wait(ready.index(turn % STAGES), (turn // STAGES) & 1)
        buffer = smem.index(turn % STAGES)
        for part in gl.static_range(0, KEYS, PART):
            key = key0 + part + gl.arange(0, PART, gl.SliceLayout(1, layout))
            is_there = (key < context) & (key >= first_key)
            x = buffer.slice(part, PART).load(layout)
            buffer.slice(part, PART).store(gl.where(is_there[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.constexpr_function
def fade_assembly(count):
    """Multiplies `count` registers of `acc` by their factors, unless these are 1 in the whole warp. A thread has two
    rows, whose elements alternate in pairs."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    test = [f"setp.neu.f32 p, ${2 * count}, 0f3F800000;", f"setp.neu.f32 q, ${2 * count + 2}, 0f3F800000;"]
    vote = ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra.uni same;"]
    return "\n".join(["{", ".reg .pred p, q;", *test, *vote, *lines, "same:", "}"])


@gluon.constexpr_function
def fade_constraints(count):
    return ",".join([*["=f"] * count, *map(str, range(count)), *["f"] * count])


@gluon.jit
def fade_out(acc, fade, SLACK: gl.constexpr):
    """`acc` at the new maximum."""
    factor = gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    if SLACK == 0:
        acc = acc * factor
    else:
        COUNT: gl.constexpr = acc.shape[1] // 2
        _, factor = gl.broadcast(acc, factor)
        acc = gl.inline_asm_elementwise(
            fade_assembly(COUNT), fade_constraints(COUNT), [acc, factor], gl.float32, is_pure=True, pack=COUNT
        )
    return acc


@gluon.jit
def _weigh(score, sums, position, key0, span, IS_MASKED: gl.constexpr, SLACK: gl.constexpr):
    """Weights of the scores and what becomes of older weights, and the running maximum and sum with them."""
    peak, total = sums
    context, first_key, log_scale = span
    if IS_MASKED:
        key = key0 + gl.arange(0, score.shape[1], gl.SliceLayout(0, score.type.layout))
        is_there = (key < context) & (key >= first_key)
        seen = is_there[None, :] & (key[None, :] <= position[:, None])
        score = gl.where(seen, score, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(score, 1) * log_scale)
    if SLACK > 0:
        new_peak = gl.where(new_peak - peak > SLACK, new_peak, peak)
    base = new_peak
    if IS_MASKED:
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = gl.exp2(score * log_scale - base[:, None])
    fade = gl.exp2(peak - base)
    return weight, fade, (new_peak, total * fade + gl.sum(weight, 1))


@gluon.jit
def _score(queries, k_smem, HELD: gl.constexpr):
    """Starts the product of queries and keys. The first HELD columns of the queries are in registers."""
    q_smem, q_held = queries
    KEYS: gl.constexpr = k_smem.shape[0]
    WIDTH: gl.constexpr = k_smem.shape[1]
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=product_layout(KEYS))
    if HELD == 0:
        score = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        score = warpgroup_mma(q_held, k_smem.slice(0, HELD, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        for at in gl.static_range(HELD, WIDTH, HELD):
            part = k_smem.slice(at, HELD, 1).permute((1, 0))
            score = warpgroup_mma(q_smem.slice(at, HELD, 1), part, score, is_async=True)
    return score


@gluon.jit
def _walk(
    queries, keys, values, acc, weight, fade, sums, begin, end, last, position, span,
    IS_MASKED: gl.constexpr, HELD: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """Turns `begin` to `end` - 1: the scores of this turn, and the product of the last turn's weights meanwhile."""
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, v_free = values
    K_STAGES: gl.constexpr = k_smem.shape[0]
    V_STAGES: gl.constexpr = v_smem.shape[0]
    for turn in range(begin, end):
        stage = turn % K_STAGES
        past = (turn - 1) % V_STAGES
        operand = gl.convert_layout(weight.to(k_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        if SLACK > 0:
            acc = fade_out(acc, fade, SLACK)
        mbarrier.wait(k_ready.index(stage), (turn // K_STAGES) & 1)
        score = _score(queries, k_smem.index(stage), HELD)
        if SLACK == 0:
            if HELD == 0:
                acc, fade = warpgroup_mma_wait(1, [acc, fade])  # waits for nothing, but keeps the order
            acc = fade_out(acc, fade, SLACK)
        mbarrier.wait(v_ready.index(past), ((turn - 1) // V_STAGES) & 1)
        acc = warpgroup_mma(operand, v_smem.index(past), acc, is_async=True)
        score = warpgroup_mma_wait(1, [score])
        mbarrier.arrive(k_free.index(stage), count=1)
        weight, fade, sums = _weigh(score, sums, position, (last - turn) * k_smem.shape[1], span, IS_MASKED, SLACK)
        acc, weight, fade = warpgroup_mma_wait(0, [acc, weight, fade])
        mbarrier.arrive(v_free.index(past), count=1)
    return acc, weight, fade, sums


@gluon.jit
def attend(
    queries, keys, values, acc, sums, turns, last, position, span,
    HAS_FIRST_KEY: gl.constexpr, HELD: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """All turns of a group: `acc`, whose last product is under way, and the running maximum and sum."""
    num_blocks, num_late, num_full = turns
    k_smem, k_ready, k_free = keys
    v_smem, v_ready, _ = values
    STAGES: gl.constexpr = v_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    mbarrier.wait(k_ready.index(0), 0)
    score = warpgroup_mma_wait(0, [_score(queries, k_smem.index(0), HELD)])
    mbarrier.arrive(k_free.index(0), count=1)
    weight, fade, sums = _weigh(score, sums, position, last * KEYS, span, True, SLACK)
    _clear(values, 0, last * KEYS, span)
    acc, weight, fade, sums = _walk(
        queries, keys, values, acc, weight, fade, sums, 1, num_late, last, position, span, True, HELD, SLACK
    )
    acc, weight, fade, sums = _walk(
        queries, keys, values, acc, weight, fade, sums, num_late, num_full, last, position, span, False, HELD, SLACK
    )
    turn = num_blocks - 1
    if HAS_FIRST_KEY:
        acc, weight, fade, sums = _walk(
            queries, keys, values, acc, weight, fade, sums, num_full, num_blocks, last, position, span,
            True, HELD, SLACK,
        )  # fmt: skip
        _clear(values, turn, (last - turn) * KEYS, span)
    acc = fade_out(acc, fade, 0)
    operand = gl.convert_layout(weight.to(k_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(v_ready.index(turn % STAGES), (turn // STAGES) & 1)
    return warpgroup_mma(operand, v_smem.index(turn % STAGES), acc, is_async=True), sums
