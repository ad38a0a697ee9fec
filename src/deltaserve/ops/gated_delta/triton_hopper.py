"""`triton_chunk.pass_kernel` for Hopper, whose matrix products run beside the rest of a program. Knows what that knows.

The same chain of chunks with the same operands and the same sums, written with the layouts, copies and waits that
Triton would choose itself (Gluon, its lower half). What the chain waits for is only

    w S  ->  n  ->  k^T n  ->  S  ->  the next w S

and the rest is done while matrix units are busy: q S runs while n is made, P n while S is rounded, and outputs of a
chunk leave during the next one. What the chunks ahead take, 64 KB each at widths of 128, arrives by asynchronous copies
into rings of STAGES chunks.

S stays transposed in registers, [slice of V, K], in the order in which a product leaves its sums, which is also the
order in which the next one takes its left operand. u and outputs are transposed on their way through shared memory.

One warpgroup, bf16 or fp16, K of 64 or 128 and V a multiple of 64. Gluon has no interpreter: tests run the source with
what it means on a CPU, compile it without a GPU, and compare it with the other kernel on one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _tile(tile, base, low, high, STRIDE: gl.constexpr, FULL: gl.constexpr):
    """Begins to copy a tile [rows, columns] from `base`; zeros for rows below `low` and from `high` on, if not FULL."""
    COLUMNS: gl.constexpr = tile.shape[1]
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0])
    i = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, BY))
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY))
    # 64 bits wide, so that a thread's rows differ by constants in the copies themselves.
    place = base + (i.to(gl.int64)[:, None] * STRIDE + j[None, :])
    if FULL:
        _copy(tile, place)
    else:
        _copy(tile, place, mask=((i >= low) & (i < high))[:, None])


@gluon.jit
def _chunk(
    rings,
    places,
    stage,
    low,
    high,
    KH: gl.constexpr,
    VH: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    CHUNK: gl.constexpr,
    FULL: gl.constexpr,
):
    """Begins to copy what a chunk takes: see `_tile`."""
    C: gl.constexpr = 2 * KH * K + VH * V
    w_ring, q_ring, k_ring, p_ring, u_ring, start_ring, end_ring = rings
    w, q, p, u, gate = places
    _tile(w_ring.index(stage), w, low, high, VH * K, FULL)
    _tile(q_ring.index(stage), q, low, high, C, FULL)
    _tile(k_ring.index(stage), q + KH * K, low, high, C, FULL)
    _tile(p_ring.index(stage), p, low, high, VH * CHUNK, FULL)
    _tile(u_ring.index(stage), u, low, high, C, FULL)
    i = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if FULL:
        _copy(start_ring.index(stage), gate + 2 * i)
        _copy(end_ring.index(stage), gate + 2 * i + 1)
    else:
        _copy(start_ring.index(stage), gate + 2 * i, mask=(i >= low) & (i < high))
        _copy(end_ring.index(stage), gate + 2 * i + 1, mask=(i >= low) & (i < high))


@gluon.jit
def _fetch(
    rings,
    places,
    number,
    base,
    first,
    end,
    KH: gl.constexpr,
    VH: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Begins to copy what chunk `number` of the row takes, from `places`; returns the places of the chunk after it."""
    C: gl.constexpr = 2 * KH * K + VH * V
    stage = number % STAGES
    low = first - base - number * CHUNK
    high = end - base - number * CHUNK
    if (low <= 0) & (high >= CHUNK):
        _chunk(rings, places, stage, low, high, KH, VH, K, V, CHUNK, True)
    else:
        _chunk(rings, places, stage, low, high, KH, VH, K, V, CHUNK, False)
    async_copy.commit_group()
    w, q, p, u, gate = places
    return w + CHUNK * VH * K, q + CHUNK * C, p + CHUNK * VH * CHUNK, u + CHUNK * C, gate + 2 * CHUNK


@gluon.jit
def _send(o_tile, base, low, high, STRIDE: gl.constexpr, CHUNK: gl.constexpr):
    """Stores a chunk's outputs, rows from `low` to `high`."""
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, BY))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, BY))
    place = base + (i.to(gl.int64)[:, None] * STRIDE + j[None, :])
    gl.store(place, o_tile.load(BY), mask=((i >= low) & (i < high))[:, None])


@gluon.jit(
    do_not_specialize=["tokens", "row_start"],
    do_not_specialize_on_alignment=["cu_seqlens", "position", "read_slot", "write_slot"],
)
def pass_kernel(
    mixed,
    w,
    p,
    gates,
    pool,
    cu_seqlens,
    position,
    read_slot,
    write_slot,
    out,
    tokens,
    row_start,
    KH: gl.constexpr,
    VH: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid [slices of V * value heads, rows], slices of a head side by side. `mixed` holds q, k and u."""
    C: gl.constexpr = 2 * KH * K + VH * V
    SLICES: gl.constexpr = V // 64
    DTYPE: gl.constexpr = mixed.dtype.element_ty
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    LEFT_WIDE: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = (
        gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, K], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, K], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, K], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, CHUNK], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, CHUNK, 64], SHARED),
        gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE),
    )
    w_ring, q_ring, k_ring, p_ring, u_ring, start_ring, end_ring = rings
    o_tile = gl.allocate_shared_memory(DTYPE, [CHUNK, 64], SHARED)

    head = gl.program_id(0) // SLICES
    low = (gl.program_id(0) % SLICES) * 64
    row = gl.program_id(1)
    first = gl.load(cu_seqlens + row)
    end = gl.load(cu_seqlens + row + 1)
    base = first - (gl.load(position + first) % CHUNK).to(gl.int32)
    count = (end - base + CHUNK - 1) // CHUNK

    wide = base.to(gl.int64)
    gates += 2 * head.to(gl.int64) * tokens
    places = (
        w + (wide * VH + head) * K,
        mixed + wide * C + (head // (VH // KH)) * K,
        p + (wide * VH + head) * CHUNK,
        mixed + wide * C + (2 * KH * K + head * V + low),
        gates + 2 * base,
    )
    out += (wide * VH + head) * V + low
    for number in gl.static_range(STAGES - 1):
        places = _fetch(rings, places, number, base, first, end, KH, VH, K, V, CHUNK, STAGES)

    v_index = low + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    k_index = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE))
    state_place = (head * K + k_index[None, :]) * V + v_index[:, None]
    slot = gl.load(read_slot + row_start + row)
    read = pool + gl.where(slot >= 0, slot, 0).to(gl.int64) * (VH * K * V)
    in_read = (k_index < gl.where(slot >= 0, K, 0))[None, :] & (v_index >= 0)[:, None]
    state = gl.load(read + state_place, mask=in_read, other=0).to(gl.float32)

    last = gl.minimum(base + CHUNK, end) - 1
    next_whole = gl.load(gates + 2 * last)
    next_slot = gl.load(write_slot + last)
    zeros = gl.zeros([64, CHUNK], gl.float32, layout=NARROW)
    o = warpgroup_mma_init(zeros)
    for number in range(count):
        keep = next_slot
        stage = number % STAGES
        async_copy.wait_group(STAGES - 2)
        _barrier()  # this chunk's copies have landed, those of all threads
        fence_async_shared()
        before = gl.convert_layout(state.to(DTYPE), LEFT)
        state = state * next_whole
        o_tile.permute((1, 0)).store(warpgroup_mma_wait(0, [o]).to(DTYPE))
        written = warpgroup_mma(before, w_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        asked = warpgroup_mma(before, q_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        written = warpgroup_mma_wait(1, [written])
        # Not loaded before the wait: ptxas would subtract before it, and so wait for both products.
        u = u_ring.index(stage).permute((1, 0)).load(NARROW).to(gl.float32)
        to_end = end_ring.index(stage).load(gl.SliceLayout(0, NARROW))
        from_start = start_ring.index(stage).load(gl.SliceLayout(0, NARROW))
        new = u - written
        new_to_end = gl.convert_layout((new * to_end[None, :]).to(DTYPE), LEFT_WIDE)
        new_left = gl.convert_layout(new.to(DTYPE), LEFT)
        state = warpgroup_mma(new_to_end, k_ring.index(stage), state, is_async=True)
        asked = warpgroup_mma_wait(1, [asked])
        o = asked * from_start[None, :]
        o = warpgroup_mma(new_left, p_ring.index(stage).permute((1, 0)), o, is_async=True)
        # The chunk's outputs before lie in shared memory, and all warps are done with its place in the rings.
        _barrier()
        if number > 0:
            _send(o_tile, out, first - base - (number - 1) * CHUNK, CHUNK, VH * V, CHUNK)
            out += CHUNK * VH * V
        places = _fetch(rings, places, number + STAGES - 1, base, first, end, KH, VH, K, V, CHUNK, STAGES)
        last = gl.minimum(base + (number + 2) * CHUNK, end) - 1
        next_whole = gl.load(gates + 2 * last)
        next_slot = gl.load(write_slot + last)
        state = warpgroup_mma_wait(1, [state])
        if keep >= 0:
            kept = pool + keep.to(gl.int64) * (VH * K * V) + state_place
            gl.store(kept, state.to(pool.dtype.element_ty))
    if count > 0:
        o_tile.permute((1, 0)).store(warpgroup_mma_wait(0, [o]).to(DTYPE))
        _barrier()
        start = (count - 1) * CHUNK
        _send(o_tile, out, first - base - start, end - base - start, VH * V, CHUNK)
    async_copy.wait_group(0)  # for those of chunks that the row does not have
