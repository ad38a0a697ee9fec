"""Attention of chunks of prompts on Hopper: what `triton_chunk` computes, by warp groups with jobs of their own.
Written in Gluon, Triton's language of explicit layouts, which the interpreter does not run.

A program takes a tile as `triton_chunk` does: 128 queries, 16 tokens of 8 heads, of one key head. Two warp groups own
64 queries each; one warp more copies blocks of keys and values to shared memory, as far ahead as there are buffers
(TMA: a block of 64 tokens is one box). In a turn a group starts the product of its queries with the next keys, brings
its sums to the new maximum, starts the product of the last turn's weights with their values, and makes weights of the
new scores while that is under way. As the groups do not wait for each other, one multiplies while the other does not.

A short piece of a prompt has few tiles, and a long context would keep few programs busy for long. So contexts are cut
there (IS_CUT): a program takes a part of a tile's blocks and leaves its sums, and `triton_join` puts parts together.
How many there are follows on the device from the tiles of all rows that have a context, so padding changes nothing; the
grid holds as many programs as there can be, and those beyond the last part end at once.

Shape letters: T tokens, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaserve.ops.attention import triton_join
from deltaserve.ops.attention.triton_chunk import HopperConfig, fit_hopper
from deltaserve.ops.attention.triton_walk import LOG2_E, ROWS, attend, produce, product_layout, wide_layout
from deltaserve.ops.layout import BLOCK, Layout, Segment


@gluon.jit
def _reciprocal(x):
    """To the last bit or so; a division would take ten instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _places(
    start_ptr, first, length, group, HALF: gl.constexpr, WIDTH: gl.constexpr, SHARING: gl.constexpr,
    BLOCK_P: gl.constexpr,
):  # fmt: skip
    """Tokens of the segment, heads, and which there are, of a group's queries: [ROWS, 1] each.

    Where the row starts is read anew, so that nothing of this is kept in registers between the two calls.
    """
    row_start = gl.load(start_ptr, volatile=True)
    m = ROWS * HALF + gl.arange(0, ROWS, gl.SliceLayout(1, wide_layout(WIDTH)))[:, None]
    at = row_start + first + m // BLOCK_P
    head = m % BLOCK_P
    mask = (at < row_start + length) & (head < SHARING)
    return at.to(gl.int64), group * SHARING + head, mask


@gluon.jit
def _finish(
    q_ptr, gate_ptr, out_ptr, gate_stride, q_smem, tile, acc, total, token, head, mask,
    HALF: gl.constexpr, NUM_Q: gl.constexpr, SHARING: gl.constexpr, BLOCK_P: gl.constexpr,
    HAS_GATE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Writes what a group has found; its last product may be under way."""
    start_ptr, first, length, _, group = tile
    WIDTH: gl.constexpr = q_smem.shape[1]
    outs: gl.constexpr = product_layout(WIDTH)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, wide_layout(WIDTH)))[None, :]
    if HELD < 128:  # the compiler puts these aside itself where registers are short, or it would others in the loop
        token, head, mask = _places(start_ptr, first, length, group, HALF, WIDTH, SHARING, BLOCK_P)
    if HAS_GATE:  # through shared memory, as reading it in the layout of `acc` would take many small reads
        q_smem.store(gl.load(gate_ptr + token * gate_stride + head * WIDTH + column, mask=mask, other=0.0))
    acc = warpgroup_mma_wait(0, [acc])
    total = gl.convert_layout(total, gl.SliceLayout(1, outs))[:, None]
    divisor = total
    if HAS_GATE:
        divisor = total * (1.0 + gl.exp2(q_smem.load(outs).to(gl.float32) * -LOG2_E))
    out = gl.where(total == 0.0, 0.0, acc * _reciprocal(divisor))  # also where the gate of a padding row is NaN
    q_smem.store(out.to(q_smem.dtype))
    gl.store(out_ptr + (token * NUM_Q + head) * WIDTH + column, q_smem.load(wide_layout(WIDTH)), mask=mask)


@gluon.jit
def _leave(acc, sums, part, HALF: gl.constexpr):
    """Writes a group's sums as they are."""
    acc_ptr, peak_ptr, _ = part
    WIDTH: gl.constexpr = acc.shape[1]
    scores: gl.constexpr = sums[0].type.layout
    m = ROWS * HALF + gl.arange(0, ROWS, scores)
    gl.store(peak_ptr + 2 * m, sums[0])
    gl.store(peak_ptr + 2 * m + 1, sums[1])
    outs: gl.constexpr = product_layout(WIDTH)
    m = ROWS * HALF + gl.arange(0, ROWS, gl.SliceLayout(1, outs))
    gl.store(acc_ptr + m[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, outs))[None, :], acc)


@gluon.jit
def _consume(
    q_ptr, gate_ptr, out_ptr, gate_stride, q_smem, keys, values, tile, turns, last, span, part,
    HALF: gl.constexpr, NUM_Q: gl.constexpr, SHARING: gl.constexpr, BLOCK_P: gl.constexpr,
    HAS_FIRST_KEY: gl.constexpr, HAS_GATE: gl.constexpr, HELD: gl.constexpr, SLACK: gl.constexpr,
    IS_CUT: gl.constexpr,
):  # fmt: skip
    """One warp group: queries ROWS * HALF to ROWS * (HALF + 1) - 1 of the tile."""
    start_ptr, first, length, start, group = tile
    WIDTH: gl.constexpr = q_smem.shape[1]
    scores: gl.constexpr = product_layout(keys[0].shape[1])
    outs: gl.constexpr = product_layout(WIDTH)
    token, head, mask = _places(start_ptr, first, length, group, HALF, WIDTH, SHARING, BLOCK_P)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, wide_layout(WIDTH)))[None, :]
    q_smem.store(gl.load(q_ptr + (token * NUM_Q + head) * WIDTH + column, mask=mask, other=0.0))
    fence_async_shared()

    position = start + (ROWS * HALF + gl.arange(0, ROWS, gl.SliceLayout(1, scores))) // BLOCK_P
    acc = gl.zeros([ROWS, WIDTH], gl.float32, layout=outs)
    peak = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
    sums = (peak, gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, scores)))
    queries = (q_smem, q_smem)
    if HELD > 0:
        held: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
        queries = (q_smem, q_smem.slice(0, HELD, 1).load(held))
    acc, sums = attend(queries, keys, values, acc, sums, turns, last, position, span, HAS_FIRST_KEY, HELD, SLACK)

    if IS_CUT:
        acc = warpgroup_mma_wait(0, [acc])
        if part[2] > 1:
            _leave(acc, sums, part, HALF)
        else:
            _finish(
                q_ptr, gate_ptr, out_ptr, gate_stride, q_smem, tile, acc, sums[1], token, head, mask,
                HALF, NUM_Q, SHARING, BLOCK_P, HAS_GATE, HELD,
            )  # fmt: skip
    else:
        _finish(
            q_ptr, gate_ptr, out_ptr, gate_stride, q_smem, tile, acc, sums[1], token, head, mask,
            HALF, NUM_Q, SHARING, BLOCK_P, HAS_GATE, HELD,
        )  # fmt: skip


@gluon.jit
def _buffers(dtype: gl.constexpr, STAGES: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """Memory of STAGES blocks, a barrier of each that tells that it is there, and one that both groups are done."""
    smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return smem, ready, free


@gluon.jit
def _tile_of(cu_ptr, num_rows, TILE: gl.constexpr):
    """The row of this program and its tile there, the longest first: row r owns the tiles from cu[r] // TILE + r on."""
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    # The last row whose tiles start at this tile or before: between `row` and `behind` - 1.
    row = gl.to_tensor(0)
    behind = num_rows
    while behind - row > 1:
        middle = (row + behind) // 2
        is_after = gl.load(cu_ptr + middle) // TILE + middle > tile
        behind = gl.where(is_after, middle, behind)
        row = gl.where(is_after, row, middle)
    return row, tile - gl.load(cu_ptr + row) // TILE - row


@gluon.jit
def _count(cu_ptr, context_ptr, row, TILE: gl.constexpr, KEYS: gl.constexpr):
    """Tiles of a row, and blocks of its context."""
    length = gl.load(cu_ptr + row + 1) - gl.load(cu_ptr + row)
    return (length + TILE - 1) // TILE, (gl.load(context_ptr + row) + KEYS - 1) // KEYS


@gluon.jit
def _part_of(cu_ptr, context_ptr, num_rows, target, least, TILE: gl.constexpr, KEYS: gl.constexpr):
    """Of this program: row, tile there, part of the tile, and of how many parts; the last is 0 where it has none. By
    the same rule as `triton_join`."""
    tiles = gl.to_tensor(0)
    for row in range(num_rows):
        own, blocks = _count(cu_ptr, context_ptr, row, TILE, KEYS)
        tiles += gl.where(blocks > 0, own, 0)
    tiles = gl.maximum(tiles, 1)
    most, twice = target // tiles, 2 * target // tiles
    most = gl.where((most < 4) & (twice > 2 * most), twice, most)
    unit = gl.program_id(1)
    found, first, parts, before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for row in range(num_rows):
        own, blocks = _count(cu_ptr, context_ptr, row, TILE, KEYS)
        share = gl.minimum(gl.minimum(most, blocks // gl.maximum(least // 6, 1)), 8 + blocks // 32)
        share = gl.where(blocks * (share - 1) >= least * share, gl.maximum(share, 1), 1)
        is_here = (unit >= before) & (unit < before + own * share)
        found = gl.where(is_here, row, found)
        first = gl.where(is_here, before, first)
        parts = gl.where(is_here, share, parts)
        before += own * share
    share = gl.maximum(parts, 1)
    return found, (unit - first) // share, (unit - first) % share, parts


@gluon.jit(
    do_not_specialize=["num_rows", "table_stride", "scale", "target", "least"],
    do_not_specialize_on_alignment=["cu_ptr", "table_ptr", "context_ptr", "first_key_ptr"],
)
def hopper_kernel(
    k_desc,
    v_desc,
    q_ptr,
    gate_ptr,
    cu_ptr,
    table_ptr,
    context_ptr,
    first_key_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    num_rows,
    target,
    least,
    table_stride,
    gate_stride,
    scale,
    NUM_Q: gl.constexpr,
    WIDTH: gl.constexpr,
    SHARING: gl.constexpr,
    BLOCK_P: gl.constexpr,
    KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    HAS_FIRST_KEY: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HELD: gl.constexpr,
    SLACK: gl.constexpr,
    IS_CUT: gl.constexpr,
):
    """q [T, H, D] and out the same, of the segment; cu int32 [rows + 1]; descriptors of [tokens of the pool, G * D];
    acc and peak as `triton_join` reads them, if IS_CUT."""
    TILE: gl.constexpr = 2 * ROWS // BLOCK_P
    group = gl.program_id(0)
    part, parts = gl.to_tensor(0), gl.to_tensor(1)
    if IS_CUT:
        row, tile, part, parts = _part_of(cu_ptr, context_ptr, num_rows, target, least, TILE, KEYS)
    else:
        row, tile = _tile_of(cu_ptr, num_rows, TILE)
    first, length = tile * TILE, gl.load(cu_ptr + row + 1) - gl.load(cu_ptr + row)
    context = gl.load(context_ptr + row)
    table_ptr += row.to(gl.int64) * table_stride

    # Blocks `last` down to first_key // KEYS; turns before `num_late` and from `num_full` on are masked. There is a
    # turn where no key is seen, too: a padding row has no block, and takes any.
    start = context - length + first
    last = gl.maximum(gl.minimum(start + TILE, context) - 1, 0) // KEYS
    num_blocks = gl.where(first < length, last + 1, 1)
    first_key = gl.to_tensor(0)
    if HAS_FIRST_KEY:
        first_key = gl.load(first_key_ptr + row)
        num_blocks = gl.maximum(num_blocks - first_key // KEYS, 1)
    num_late = gl.minimum(gl.maximum(last + 1 - (start + 1) // KEYS, 1), num_blocks)
    num_full = gl.maximum(num_blocks - 1, num_late) if HAS_FIRST_KEY else num_blocks
    unit = (gl.program_id(1) * gl.num_programs(0) + group).to(gl.int64) * (2 * ROWS)
    left = (acc_ptr + unit * WIDTH, peak_ptr + unit * 2, parts)
    if IS_CUT:
        share = gl.maximum(parts, 1)
        begin, end = num_blocks * part // share, num_blocks * (part + 1) // share
        if (parts > 1) & (begin == end):  # of a tile that sees little of its row's context
            each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            m = 2 * gl.arange(0, 2 * ROWS, each)
            gl.store(left[1] + m, gl.full([2 * ROWS], float("-inf"), gl.float32, layout=each))
            gl.store(left[1] + m + 1, gl.zeros([2 * ROWS], gl.float32, layout=each))
        last -= begin
        num_blocks = end - begin
        num_late = gl.minimum(gl.maximum(num_late - begin, 1), num_blocks)
        num_full = gl.minimum(gl.maximum(num_full - begin, num_late), num_blocks)
        num_blocks = gl.where(parts > 0, num_blocks, 0)

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q0_smem = gl.allocate_shared_memory(dtype, [ROWS, WIDTH], shared)
    q1_smem = gl.allocate_shared_memory(dtype, [ROWS, WIDTH], shared)
    keys = _buffers(dtype, K_STAGES, KEYS, WIDTH)
    values = _buffers(dtype, V_STAGES, KEYS, WIDTH)
    fence_async_shared()
    tile = (cu_ptr + row, first, length, start, group)
    turns = (num_blocks, num_late, num_full)
    span = (context, first_key, scale * LOG2_E)
    is_there = num_blocks > 0 if IS_CUT else True
    if is_there:
        gl.warp_specialize(
            [
                (_consume, (
                    q_ptr, gate_ptr, out_ptr, gate_stride, q0_smem, keys, values, tile, turns, last, span, left,
                    0, NUM_Q, SHARING, BLOCK_P, HAS_FIRST_KEY, HAS_GATE, HELD, SLACK, IS_CUT,
                )),
                (_consume, (
                    q_ptr, gate_ptr, out_ptr, gate_stride, q1_smem, keys, values, tile, turns, last, span, left,
                    1, NUM_Q, SHARING, BLOCK_P, HAS_FIRST_KEY, HAS_GATE, HELD, SLACK, IS_CUT,
                )),
                (produce, (k_desc, v_desc, keys, values, table_ptr, group * WIDTH, last, num_blocks, context > 0)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def chunk(
    q_THD: Tensor,
    gate_TX: Tensor | None,
    out_THD: Tensor,
    kv_pool: Tensor,
    layout: Layout,
    segment: Segment,
    scale: float,
    config: HopperConfig,
) -> None:
    """What `triton_chunk.chunk` does, for heads that `fit_hopper`."""
    num_kv, width = kv_pool.shape[3:]
    num_q = q_THD.shape[1]
    sharing = num_q // num_kv
    block_p = triton.next_power_of_2(sharing)
    assert fit_hopper(q_THD, kv_pool), (
        f"attention: no Hopper kernel for {num_q} heads of {width} on {num_kv}, {q_THD.dtype}"
    )
    rows = segment.row_end - segment.row_start
    q_THD, out_THD = segment.cut(q_THD), segment.cut(out_THD)
    gate_TX = None if gate_TX is None else segment.cut(gate_TX)
    gate = out_THD if gate_TX is None else gate_TX
    table = layout.block_table[segment.row_start :]
    context = layout.context_len[segment.row_start :]
    first_key = context if layout.first_key is None else layout.first_key[segment.row_start :]
    shared = gl.NVMMASharedLayout(128, 16, 2)
    k_desc, v_desc = (TensorDescriptor.from_tensor(x.view(-1, num_kv * width), [BLOCK, width], shared) for x in kv_pool)
    queries, target = 2 * ROWS.value, triton_join.target_of(q_THD.device, num_kv)
    units = q_THD.shape[0] // (queries // block_p) + rows
    acc = peak = out_THD
    is_cut = config.least > 0 and triton_join.is_cut(units - rows, target)
    if is_cut:
        units += 2 * target
        acc, peak = triton_join.allocate(units, num_kv, queries, width, q_THD.device)
    hopper_kernel[(num_kv, units)](
        k_desc, v_desc, q_THD, gate, segment.cu_seqlens, table, context, first_key, out_THD, acc, peak,
        rows, target, config.least, table.stride(0), gate.stride(0), scale,
        NUM_Q=num_q, WIDTH=width, SHARING=sharing, BLOCK_P=block_p, KEYS=BLOCK,
        K_STAGES=config.key_stages, V_STAGES=config.value_stages, HAS_FIRST_KEY=layout.first_key is not None,
        HAS_GATE=gate_TX is not None, HELD=config.held, SLACK=config.slack, IS_CUT=is_cut, num_warps=4,
    )  # fmt: skip
    if is_cut:
        triton_join.join(
            gate_TX, out_THD, acc, peak, segment, context,
            num_kv=num_kv, queries=queries, target=target, least=config.least,
        )  # fmt: skip
