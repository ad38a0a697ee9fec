"""The experts of very many tokens on Hopper, by warps that have roles. Knows no routing.

Tiles of 64 pairs read each weight anew, and the cache's rate bounds them. Here a tile has 192 pairs, all of most
experts: three groups of 4 warps multiply 64 each with the same weights in shared memory, and 4 more fetch: weights as
boxes, rows of inputs 16 bytes a thread. While one group adds a block's product up, the others keep the matrix units
busy. A group without pairs only counts along. One program a multiprocessor goes through its items of work, and what it
needs next is on its way.

`gate_up`: an item is a tile and a block of 128 inner columns, made in halves of 64 rows of gate and 64 of up, as no
more fits registers; the first half waits in shared memory, rounded. Programs take items in turn. `down`: each program
has the same number of blocks of 128 outputs, in a row, be they of one tile or of several; all inner columns of a tile
stay in shared memory while weights stream past. Weights are e4m3, and sizes are multiples of 128.

Stages of shared memory are handed over by barriers: `full` counts the fetching threads and the boxes' bytes, `empty`
the groups. A side waits for the phase that it reaches next, the fetching side at first for one that counts as over.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaserve.ops.gpu import properties

SIZE = 192
"""Pairs of a tile."""
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
fetch_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

BYTES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""Of rows of 128 bytes, 16 bytes a thread."""
OUTPUTS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
HALVES: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
STAGES: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def members_of(members_ptr, start, layout: gl.constexpr):
    """A group's pairs [64], 0 where there is none, and where there is one."""
    pair = gl.load(members_ptr + start + gl.arange(0, 64, layout))
    return gl.where(pair >= 0, pair, 0), pair >= 0


@gluon.jit
def offsets_of(row, WIDTH: gl.constexpr):
    """Of the first 128 bytes of rows [64]: [64, 128]."""
    return (row * WIDTH)[:, None] + gl.arange(0, 128, gl.SliceLayout(0, BYTES))[None, :]


@gluon.jit
def next_stage(stage, phase, S: gl.constexpr):
    stage += 1
    return gl.where(stage == S, 0, stage), gl.where(stage == S, phase ^ 1, phase)


@gluon.jit
def fetch_gate_up(
    w_desc,
    x_ptr,
    tables,
    stages,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
    INNER: gl.constexpr,
    S: gl.constexpr,
):
    members_ptr, experts_ptr, items = tables
    w, x, full, empty, _ = stages
    NUM: gl.constexpr = WIDTH // 128
    COLUMNS: gl.constexpr = INNER // 128
    stage, phase = 0, 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item // COLUMNS
        row = gl.load(experts_ptr + tile) * (2 * INNER) + item % COLUMNS * 128
        pair_0, kept_0 = members_of(members_ptr, tile * 192, gl.SliceLayout(1, BYTES))
        pair_1, kept_1 = members_of(members_ptr, tile * 192 + 64, gl.SliceLayout(1, BYTES))
        pair_2, kept_2 = members_of(members_ptr, tile * 192 + 128, gl.SliceLayout(1, BYTES))
        from_0, from_1, from_2 = (
            offsets_of(pair_0 // K, WIDTH),
            offsets_of(pair_1 // K, WIDTH),
            offsets_of(pair_2 // K, WIDTH),
        )
        for step in range(2 * NUM):
            first, k = row + step // NUM * 64, step % NUM * 128
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * 64 * 128)
            fetch_box(w_desc, [first, k], full.index(stage), w.index(stage).slice(0, 64))
            fetch_box(w_desc, [first + INNER, k], full.index(stage), w.index(stage).slice(64, 64))
            fetch(x.index(3 * stage), x_ptr + k + from_0, mask=kept_0[:, None])
            fetch(x.index(3 * stage + 1), x_ptr + k + from_1, mask=kept_1[:, None])
            fetch(x.index(3 * stage + 2), x_ptr + k + from_2, mask=kept_2[:, None])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            stage, phase = next_stage(stage, phase, S)


@gluon.jit
def activated(acc, TYPE: gl.constexpr):
    """[64, 128] of 64 columns of gate and 64 of up -> silu(gate) * up [64, 64]."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, [64, 2, 64]), (0, 2, 1)))
    return (gate / (1.0 + gl.exp(-gate)) * up).to(TYPE)


@gluon.jit
def divide(x, scale):
    """x [64, N] / scale [64], rounded as a division is: see `triton_fp8.divide`."""
    inverse = gl.minimum(gl.div_rn(gl.full_like(scale, 1.0), scale), 3e38)[:, None]
    q = x * inverse
    return gl.fma(gl.fma(-q, scale[:, None] + gl.zeros_like(x), x), inverse + gl.zeros_like(x), q)


@gluon.jit
def store_block(h_ptr, h_scale_ptr, members_ptr, start, left, right, column, INNER: gl.constexpr):
    """Quantises a block of inner columns, given in halves [64, 64], as `triton_fp8.quantize` does."""
    left, right = left.to(gl.float32), right.to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
    scale = gl.div_rn(gl.where(amax == 0, 448.0, amax), gl.full_like(amax, 448.0))
    left, right = divide(left, scale).to(gl.float8e4nv), divide(right, scale).to(gl.float8e4nv)
    h = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, 128])
    layout: gl.constexpr = scale.type.layout
    pair, kept = members_of(members_ptr, start, layout)
    gl.store(h_scale_ptr + pair * (INNER // 128) + column, scale, mask=kept)
    pair, kept = members_of(members_ptr, start, gl.SliceLayout(1, BYTES))
    into = offsets_of(pair, INNER) + column * 128
    gl.store(h_ptr + into, gl.convert_layout(h, BYTES), mask=kept[:, None])


@gluon.jit
def half_block(
    x_scale_ptrs, gate_scale_ptr, up_scale_ptr, w, x, full, empty, stage, phase,
    GROUP: gl.constexpr, NUM: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """64 columns of gate and 64 of up of a group's pairs, [64, 128]. Scales are loaded a block ahead."""
    zero = gl.zeros([64, 128], gl.float32, PRODUCT)
    is_gate = (gl.arange(0, 128, gl.SliceLayout(0, PRODUCT)) < 64)[None, :]
    acc = gl.zeros([64, 128], gl.float32, PRODUCT)
    x_scale, gate_scale, up_scale = gl.load(x_scale_ptrs), gl.load(gate_scale_ptr), gl.load(up_scale_ptr)
    for block in range(NUM):
        mbarrier.wait(full.index(stage), phase)
        part = warpgroup_mma(
            x.index(3 * stage + GROUP), w.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        following = gl.minimum(block + 1, NUM - 1)
        scale = gl.where(is_gate, (x_scale * gate_scale)[:, None], (x_scale * up_scale)[:, None])
        x_scale = gl.load(x_scale_ptrs + following)
        gate_scale, up_scale = gl.load(gate_scale_ptr + following), gl.load(up_scale_ptr + following)
        part = warpgroup_mma_wait(0, [part])
        mbarrier.arrive(empty.index(stage))
        acc += part * scale
        stage, phase = next_stage(stage, phase, S)
    return acc, stage, phase


@gluon.jit
def multiply_gate_up(
    x_scale_ptr,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
    tables,
    stages,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    WIDTH: gl.constexpr,
    INNER: gl.constexpr,
    TYPE: gl.constexpr,
    S: gl.constexpr,
):
    members_ptr, experts_ptr, items = tables
    w, x, full, empty, halves = stages
    NUM: gl.constexpr = WIDTH // 128
    COLUMNS: gl.constexpr = INNER // 128
    stage, phase = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, column = item // COLUMNS, item % COLUMNS
        start = tile * 192 + GROUP * 64
        if gl.load(members_ptr + start) >= 0:
            gate_scale_ptr = w_scale_ptr + (gl.load(experts_ptr + tile) * (2 * COLUMNS) + column) * NUM
            up_scale_ptr = gate_scale_ptr + COLUMNS * NUM
            pair, _kept = members_of(members_ptr, start, gl.SliceLayout(1, PRODUCT))
            x_scale_ptrs = x_scale_ptr + pair // K * NUM
            for half in range(2):
                acc, stage, phase = half_block(
                    x_scale_ptrs, gate_scale_ptr, up_scale_ptr, w, x, full, empty, stage, phase, GROUP, NUM, S
                )
                h = activated(acc, TYPE)
                if half == 0:
                    halves.index(GROUP).store(h)
                else:
                    layout: gl.constexpr = h.type.layout
                    left = halves.index(GROUP).load(layout)
                    store_block(h_ptr, h_scale_ptr, members_ptr, start, left, h, column, INNER)
        else:
            for _ in range(2 * NUM):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, S)


@gluon.jit
def barriers(FULL: gl.constexpr, EMPTY: gl.constexpr, S: gl.constexpr):
    """Of S stages: `full` and `empty`, with so many arrivals each."""
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), FULL)
        mbarrier.init(empty.index(i), EMPTY)
    fence_async_shared()
    return full, empty


@gluon.jit
def gate_up_kernel(
    w_desc, x_ptr, x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, members_ptr, experts_ptr, count_ptr,
    K: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, TYPE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    w = gl.allocate_shared_memory(gl.float8e4nv, [S, 128, 128], STAGES)
    x = gl.allocate_shared_memory(gl.float8e4nv, [3 * S, 64, 128], STAGES)
    full, empty = barriers(129, 3, S)
    items = gl.load(count_ptr) * (INNER // 128)
    tables = (members_ptr, experts_ptr, items)
    halves = gl.allocate_shared_memory(TYPE, [3, 64, 64], HALVES)
    stages = (w, x, full, empty, halves)
    gl.warp_specialize(
        [
            (
                multiply_gate_up,
                (x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages, 0, K, WIDTH, INNER, TYPE, S),
            ),
            (
                multiply_gate_up,
                (x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages, 1, K, WIDTH, INNER, TYPE, S),
            ),
            (
                multiply_gate_up,
                (x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages, 2, K, WIDTH, INNER, TYPE, S),
            ),
            (fetch_gate_up, (w_desc, x_ptr, tables, stages, K, WIDTH, INNER, S)),
        ],
        [4, 4, 4],
        [160, 160, 32],
    )


@gluon.jit
def share_of(tables, BLOCKS: gl.constexpr):
    """The blocks of outputs that are this program's, counted over all tiles: as many as any other's, in a row."""
    blocks = tables[2] * BLOCKS
    return gl.program_id(0) * blocks // gl.num_programs(0), (gl.program_id(0) + 1) * blocks // gl.num_programs(0)


@gluon.jit
def share_of_tile(begin, end, tile, BLOCKS: gl.constexpr):
    """Those of one tile, from the first up to the last."""
    return gl.maximum(begin - tile * BLOCKS, 0), gl.minimum(end - tile * BLOCKS, BLOCKS)


@gluon.jit
def fetch_down(
    w_desc,
    h_ptr,
    tables,
    stages,
    WIDTH: gl.constexpr,
    INNER: gl.constexpr,
    S: gl.constexpr,
):
    members_ptr, experts_ptr, _ = tables
    w, w_full, w_empty, h, h_full, h_empty = stages
    NUM: gl.constexpr = INNER // 128
    BLOCKS: gl.constexpr = WIDTH // 128
    begin, end = share_of(tables, BLOCKS)
    stage, phase, h_phase = 0, 1, 1
    for tile in range(begin // BLOCKS, (end + BLOCKS - 1) // BLOCKS):
        first, last = share_of_tile(begin, end, tile, BLOCKS)
        row = gl.load(experts_ptr + tile) * WIDTH
        pair_0, kept_0 = members_of(members_ptr, tile * 192, gl.SliceLayout(1, BYTES))
        pair_1, kept_1 = members_of(members_ptr, tile * 192 + 64, gl.SliceLayout(1, BYTES))
        pair_2, kept_2 = members_of(members_ptr, tile * 192 + 128, gl.SliceLayout(1, BYTES))
        from_0, from_1, from_2 = offsets_of(pair_0, INNER), offsets_of(pair_1, INNER), offsets_of(pair_2, INNER)
        for column in range(first, last):
            for block in range(NUM):
                if column == first:
                    mbarrier.wait(h_empty.index(block), h_phase)
                    fetch(h.index(3 * block), h_ptr + block * 128 + from_0, mask=kept_0[:, None])
                    fetch(h.index(3 * block + 1), h_ptr + block * 128 + from_1, mask=kept_1[:, None])
                    fetch(h.index(3 * block + 2), h_ptr + block * 128 + from_2, mask=kept_2[:, None])
                    async_copy.mbarrier_arrive(h_full.index(block), increment_count=False)
                mbarrier.wait(w_empty.index(stage), phase)
                mbarrier.expect(w_full.index(stage), 128 * 128)
                fetch_box(w_desc, [row + column * 128, block * 128], w_full.index(stage), w.index(stage))
                stage, phase = next_stage(stage, phase, S)
        h_phase ^= 1


@gluon.jit
def multiply_down(
    h_scale_ptr,
    w_scale_ptr,
    weights_ptr,
    y_ptr,
    tables,
    stages,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    INNER: gl.constexpr,
    S: gl.constexpr,
):
    members_ptr, experts_ptr, _ = tables
    w, w_full, w_empty, h, h_full, h_empty = stages
    NUM: gl.constexpr = INNER // 128
    BLOCKS: gl.constexpr = WIDTH // 128
    begin, end = share_of(tables, BLOCKS)
    zero = gl.zeros([64, 128], gl.float32, PRODUCT)
    stage, phase, h_phase = 0, 0, 0
    for tile in range(begin // BLOCKS, (end + BLOCKS - 1) // BLOCKS):
        first, last = share_of_tile(begin, end, tile, BLOCKS)
        start = tile * 192 + GROUP * 64
        filled = gl.load(members_ptr + start) >= 0
        w_scale_ptrs = w_scale_ptr + gl.load(experts_ptr + tile) * (BLOCKS * NUM)
        pair, _kept = members_of(members_ptr, start, gl.SliceLayout(1, PRODUCT))
        weight = gl.load(weights_ptr + pair)
        h_scale_ptrs = h_scale_ptr + pair * NUM
        out_pair, out_kept = members_of(members_ptr, start, gl.SliceLayout(1, OUTPUTS))
        o = gl.arange(0, 128, gl.SliceLayout(0, OUTPUTS))
        y_ptrs = y_ptr + out_pair.to(gl.int64)[:, None] * WIDTH + o[None, :]
        # Scales are loaded a block ahead; behind a tile's last block of outputs comes its first one again.
        h_scale, w_scale = gl.load(h_scale_ptrs), gl.load(w_scale_ptrs + first % BLOCKS * NUM)
        for column in range(first, last):
            acc = gl.zeros([64, 128], gl.float32, PRODUCT)
            for block in range(NUM):
                mbarrier.wait(h_full.index(block), h_phase)
                mbarrier.wait(w_full.index(stage), phase)
                if filled:
                    product = warpgroup_mma(
                        h.index(3 * block + GROUP), w.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    scale = (h_scale * w_scale)[:, None]
                    following = column * NUM + block + 1
                    h_scale = gl.load(h_scale_ptrs + following % NUM)
                    w_scale = gl.load(w_scale_ptrs + following % (BLOCKS * NUM))
                    product = warpgroup_mma_wait(0, [product])
                    mbarrier.arrive(w_empty.index(stage))
                    acc += product * scale
                else:
                    mbarrier.arrive(w_empty.index(stage))
                if column == last - 1:
                    mbarrier.arrive(h_empty.index(block))
                stage, phase = next_stage(stage, phase, S)
            if filled:
                y = gl.convert_layout((acc * weight[:, None]).to(y_ptr.dtype.element_ty), OUTPUTS)
                gl.store(y_ptrs + column * 128, y, mask=out_kept[:, None])
        h_phase ^= 1


@gluon.jit
def down_kernel(
    w_desc, h_ptr, h_scale_ptr, w_scale_ptr, weights_ptr, y_ptr, members_ptr, experts_ptr, count_ptr,
    WIDTH: gl.constexpr, INNER: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    NUM: gl.constexpr = INNER // 128
    w = gl.allocate_shared_memory(gl.float8e4nv, [S, 128, 128], STAGES)
    h = gl.allocate_shared_memory(gl.float8e4nv, [3 * NUM, 64, 128], STAGES)
    w_full, w_empty = barriers(1, 3, S)
    h_full, h_empty = barriers(128, 3, NUM)
    tables = (members_ptr, experts_ptr, gl.load(count_ptr))
    stages = (w, w_full, w_empty, h, h_full, h_empty)
    gl.warp_specialize(
        [
            (
                multiply_down,
                (h_scale_ptr, w_scale_ptr, weights_ptr, y_ptr, tables, stages, 0, WIDTH, INNER, S),
            ),
            (
                multiply_down,
                (h_scale_ptr, w_scale_ptr, weights_ptr, y_ptr, tables, stages, 1, WIDTH, INNER, S),
            ),
            (
                multiply_down,
                (h_scale_ptr, w_scale_ptr, weights_ptr, y_ptr, tables, stages, 2, WIDTH, INNER, S),
            ),
            (fetch_down, (w_desc, h_ptr, tables, stages, WIDTH, INNER, S)),
        ],
        [4, 4, 4],
        [160, 160, 32],
    )


def boxes(weights: Tensor, rows: int) -> TensorDescriptor:
    """Weights [E, O, I] as seen by who fetches `rows` of them by 128 bytes."""
    flat = weights.view(-1, weights.shape[2])
    return TensorDescriptor.from_tensor(flat, [rows, 128], gl.NVMMASharedLayout(128, 8, 2))


def check(size: int, rows: int, width: int, inner: int) -> None:
    assert size == SIZE, f"moe: tiles of {size} pairs for warps with roles, which take {SIZE}"
    assert (width % 128, inner % 128) == (0, 0), f"moe: {width} by {inner} are not blocks"
    assert rows * max(width, inner) < 1 << 31, f"moe: {rows} rows have offsets of more than 31 bits"


def gate_up(
    x_q: Tensor,
    x_scale: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    h: Tensor,
    h_scale: Tensor,
    members: Tensor,
    experts: Tensor,
    count: Tensor,
    top_k: int,
    dtype: gl.dtype,
    stages: int,
) -> None:
    """x e4m3 [T', D] with scales [T', i], w13 as `triton_groups.gate_up` takes it, tables of tiles of SIZE pairs; fills
    h, e4m3 [pairs, I], and its scales [pairs, i]. Gate and up are rounded to `dtype`."""
    inner, width = h.shape[1], x_q.shape[1]
    check(members.shape[1], max(len(h), len(x_q)), width, inner)
    gate_up_kernel[(properties(h.device).num_sms,)](
        boxes(w13, 64),
        x_q,
        x_scale.contiguous(),  # a row's together: rows are gathered
        w13_scale,
        h,
        h_scale,
        members,
        experts,
        count,
        K=top_k,
        WIDTH=width,
        INNER=inner,
        TYPE=dtype,
        S=stages,
        num_warps=4,
    )


def down(
    h: Tensor,
    h_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    weights_TK: Tensor,
    y_PD: Tensor,
    members: Tensor,
    experts: Tensor,
    count: Tensor,
    stages: int,
) -> None:
    """h as `gate_up` makes it, w2 as `triton_groups.down` takes it; fills y [pairs, D]."""
    width, inner = y_PD.shape[1], h.shape[1]
    check(members.shape[1], len(h), width, inner)
    down_kernel[(properties(h.device).num_sms,)](
        boxes(w2, 128),
        h,
        h_scale,
        w2_scale,
        weights_TK,
        y_PD,
        members,
        experts,
        count,
        WIDTH=width,
        INNER=inner,
        S=stages,
        num_warps=4,
    )
