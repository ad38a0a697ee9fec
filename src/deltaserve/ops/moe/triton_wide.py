"""Gate and up of experts with up to 128 pairs on Hopper, by warps that have roles. Knows no routing.

As `triton_roles.gate_up` but for tiles of 128 pairs and whole blocks of 128 inner columns: two groups of 4 warps have
registers for the sums of 128 rows of gate and as many of up, so inputs are fetched once a block, not twice, and each
stage of shared memory carries twice the work. Where experts have more pairs, a weight comes from the cache more often
than with tiles of 192.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltaserve.ops.gpu import properties
from deltaserve.ops.moe.triton_roles import (
    BYTES,
    PRODUCT,
    STAGES,
    barriers,
    boxes,
    check,
    divide,
    fetch,
    fetch_box,
    members_of,
    next_stage,
    offsets_of,
)

SIZE = 128
"""Pairs of a tile."""


@gluon.jit
def fetch_blocks(
    w_desc, x_ptr, tables, stages,
    K: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    members_ptr, experts_ptr, items = tables
    w, x, full, empty = stages
    NUM: gl.constexpr = WIDTH // 128
    COLUMNS: gl.constexpr = INNER // 128
    stage, phase = 0, 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item // COLUMNS
        row = gl.load(experts_ptr + tile) * (2 * INNER) + item % COLUMNS * 128
        pair_0, kept_0 = members_of(members_ptr, tile * 128, gl.SliceLayout(1, BYTES))
        pair_1, kept_1 = members_of(members_ptr, tile * 128 + 64, gl.SliceLayout(1, BYTES))
        from_0, from_1 = offsets_of(pair_0 // K, WIDTH), offsets_of(pair_1 // K, WIDTH)
        for block in range(NUM):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * 128 * 128)
            fetch_box(w_desc, [row, block * 128], full.index(stage), w.index(2 * stage))
            fetch_box(w_desc, [row + INNER, block * 128], full.index(stage), w.index(2 * stage + 1))
            fetch(x.index(2 * stage), x_ptr + block * 128 + from_0, mask=kept_0[:, None])
            fetch(x.index(2 * stage + 1), x_ptr + block * 128 + from_1, mask=kept_1[:, None])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            stage, phase = next_stage(stage, phase, S)


@gluon.jit
def store_rows(h_ptr, h_scale_ptr, members_ptr, start, h, column, INNER: gl.constexpr):
    """Quantises a block of inner columns [64, 128] as `triton_fp8.quantize` does."""
    h = h.to(gl.float32)
    amax = gl.max(gl.abs(h), 1)
    scale = gl.div_rn(gl.where(amax == 0, 448.0, amax), gl.full_like(amax, 448.0))
    h = divide(h, scale).to(gl.float8e4nv)
    layout: gl.constexpr = scale.type.layout
    pair, kept = members_of(members_ptr, start, layout)
    gl.store(h_scale_ptr + pair * (INNER // 128) + column, scale, mask=kept)
    pair, kept = members_of(members_ptr, start, gl.SliceLayout(1, BYTES))
    into = offsets_of(pair, INNER) + column * 128
    gl.store(h_ptr + into, gl.convert_layout(h, BYTES), mask=kept[:, None])


@gluon.jit
def multiply_blocks(
    x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages,
    GROUP: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, TYPE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    members_ptr, experts_ptr, items = tables
    w, x, full, empty = stages
    NUM: gl.constexpr = WIDTH // 128
    COLUMNS: gl.constexpr = INNER // 128
    zero = gl.zeros([64, 128], gl.float32, PRODUCT)
    stage, phase = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, column = item // COLUMNS, item % COLUMNS
        start = tile * 128 + GROUP * 64
        if gl.load(members_ptr + start) >= 0:
            gate_scale_ptr = w_scale_ptr + (gl.load(experts_ptr + tile) * (2 * COLUMNS) + column) * NUM
            up_scale_ptr = gate_scale_ptr + COLUMNS * NUM
            pair, _kept = members_of(members_ptr, start, gl.SliceLayout(1, PRODUCT))
            x_scale_ptrs = x_scale_ptr + pair // K * NUM
            gate, up = gl.zeros([64, 128], gl.float32, PRODUCT), gl.zeros([64, 128], gl.float32, PRODUCT)
            x_scale, gate_scale, up_scale = gl.load(x_scale_ptrs), gl.load(gate_scale_ptr), gl.load(up_scale_ptr)
            for block in range(NUM):
                rows = x.index(2 * stage + GROUP)
                mbarrier.wait(full.index(stage), phase)
                part = warpgroup_mma(rows, w.index(2 * stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                following = gl.minimum(block + 1, NUM - 1)
                scale, other = (x_scale * gate_scale)[:, None], (x_scale * up_scale)[:, None]
                x_scale = gl.load(x_scale_ptrs + following)
                gate_scale, up_scale = gl.load(gate_scale_ptr + following), gl.load(up_scale_ptr + following)
                gate += warpgroup_mma_wait(0, [part]) * scale
                part = warpgroup_mma(rows, w.index(2 * stage + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(stage))
                up += part * other
                stage, phase = next_stage(stage, phase, S)
            h = (gate / (1.0 + gl.exp(-gate)) * up).to(TYPE)
            store_rows(h_ptr, h_scale_ptr, members_ptr, start, h, column, INNER)
        else:
            for _ in range(NUM):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, S)


@gluon.jit
def gate_up_kernel(
    w_desc, x_ptr, x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, members_ptr, experts_ptr, count_ptr,
    K: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, TYPE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    w = gl.allocate_shared_memory(gl.float8e4nv, [2 * S, 128, 128], STAGES)
    x = gl.allocate_shared_memory(gl.float8e4nv, [2 * S, 64, 128], STAGES)
    full, empty = barriers(129, 2, S)
    tables = (members_ptr, experts_ptr, gl.load(count_ptr) * (INNER // 128))
    stages = (w, x, full, empty)
    gl.warp_specialize(
        [
            (
                multiply_blocks,
                (x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages, 0, K, WIDTH, INNER, TYPE, S),
            ),
            (
                multiply_blocks,
                (x_scale_ptr, w_scale_ptr, h_ptr, h_scale_ptr, tables, stages, 1, K, WIDTH, INNER, TYPE, S),
            ),
            (fetch_blocks, (w_desc, x_ptr, tables, stages, K, WIDTH, INNER, S)),
        ],
        [4, 4],
        [232, 40],
    )


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
    """As `triton_roles.gate_up`, with tables of tiles of SIZE pairs."""
    inner, width = h.shape[1], x_q.shape[1]
    check(max(len(h), len(x_q)), width, inner)
    gate_up_kernel[(properties(h.device).num_sms,)](
        boxes(w13, 128),
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
