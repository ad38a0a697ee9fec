"""The pass over chunks on Hopper: what `triton_chunk.pass_kernel` computes, by warps that have roles. Written in Gluon,
Triton's language of explicit layouts, which the interpreter does not run.

A program takes one row, one value head and 64 of its values, and four partitions share the work of a chunk:

- `_carry`, four warps, holds the state, transposed as [values, K], and computes what the next chunk waits for, and
  nothing else: n = u - w S, then S = exp(G_last) S + (exp(G_last - G) k)^T n. What it leaves in registers is the left
  operand of its next product;
- `_answer`, four warps, computes o = exp(G) q S + P n from the copies of S and n that `_carry` leaves in shared memory,
  while that is at the next chunk;
- two warps fetch boxes (TMA), each for one of the two, as far ahead as there are buffers.

A box is copied whole. What of it lies outside the row belongs to other rows, which may hold NaN: there n is set to 0,
and so are the keys, since 0 times NaN is not 0. Before the first token and behind the last of all a box holds zeros.

For widths of 128. Shape letters: T tokens, Hk and Hv key and value heads, K and V their widths, S slots.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaserve.ops.gated_delta.triton_chunk import HopperConfig
from deltaserve.ops.layout import Layout, Segment

WIDTH = gl.constexpr(128)
"""K and V."""
PART = gl.constexpr(64)
"""Tokens of a chunk, and values of a program: the height of the matrix products of four warps."""
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Its name before Triton 3.7 and since."""
GATES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))


@gluon.constexpr_function
def product_layout(columns):
    """How four warps hold the result of a product, [64, columns] fp32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def wide_layout(columns):
    """Reads and writes of whole rows, 16 bytes at a time."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _fetch_for_carry(
    mixed_desc, u_desc, w_desc, gates_desc, buffers, base, count, head, part, KH: gl.constexpr, VH: gl.constexpr
):  # fmt: skip
    w, k, u, to_end, full, empty = buffers
    STAGES: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = (2 * WIDTH + PART) * PART * 2 + PART * 4
    for number in range(count):
        stage = number % STAGES
        token = base + number * PART
        mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        copy_box(w_desc, [token, head * WIDTH], full.index(stage), w.index(stage))
        copy_box(u_desc, [token, (2 * KH + head) * WIDTH + part * PART], full.index(stage), u.index(stage))
        copy_box(mixed_desc, [token, (KH + head // (VH // KH)) * WIDTH], full.index(stage), k.index(stage))
        copy_box(gates_desc, [VH + head, token], full.index(stage), to_end.index(stage))


@gluon.jit
def _fetch_for_answer(
    mixed_desc, p_desc, gates_desc, buffers, base, count, head, KH: gl.constexpr, VH: gl.constexpr
):  # fmt: skip
    q, p, from_start, full, empty = buffers
    STAGES: gl.constexpr = q.shape[0]
    BYTES: gl.constexpr = (WIDTH + PART) * PART * 2 + PART * 4
    for number in range(count):
        stage = number % STAGES
        token = base + number * PART
        mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        copy_box(mixed_desc, [token, head // (VH // KH) * WIDTH], full.index(stage), q.index(stage))
        copy_box(p_desc, [token, head * PART], full.index(stage), p.index(stage))
        copy_box(gates_desc, [head, token], full.index(stage), from_start.index(stage))


@gluon.jit
def _whole_of(gates_ptr, start, span, layout: gl.constexpr):
    """exp(G_last) of a chunk, [64]: what each of its tokens has of it, that of others being its neighbour's. One number
    for all threads would be put aside where numbers of programs are, which waits for it at once."""
    first, end = span
    last = gl.minimum(start + PART, end) - 1
    token = gl.minimum(gl.maximum(start + gl.arange(0, PART, layout), first), last)
    return gl.load(gates_ptr + token)


@gluon.jit
def _until_kept(write_slot_ptr, base, end, number, count):
    """The chunks from `number` on up to the first whose state is kept, that one included, or LOOK of them: where they
    end, and the slot, -1 for none."""
    LOOK: gl.constexpr = 128
    ahead = gl.arange(0, LOOK, gl.BlockedLayout([1], [32], [4], [0]))
    last = gl.minimum(base + (number + ahead + 1) * PART, end) - 1
    kept = gl.load(write_slot_ptr + last, mask=number + ahead < count, other=-1)
    until = gl.minimum(number + 1 + LOOK - gl.max(gl.where(kept >= 0, LOOK - ahead, 1), 0), count)
    return until, gl.load(write_slot_ptr + gl.minimum(base + until * PART, end) - 1).to(gl.int64)


@gluon.jit
def _clear(k_smem, start, span):
    """Zeroes keys that are not the row's."""
    first, end = span
    layout: gl.constexpr = wide_layout(WIDTH)
    token = start + gl.arange(0, PART, gl.SliceLayout(1, layout))
    x = k_smem.load(layout)
    k_smem.store(gl.where(((token >= first) & (token < end))[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _carry(
    pool_ptr, gates_ptr, write_slot_ptr, slot, buffers, relay, base, span, count, head, part,
    VH: gl.constexpr,
):  # fmt: skip
    """The state, from the slot that is read to those that keep it."""
    states: gl.constexpr = product_layout(WIDTH)
    value = part * PART + gl.arange(0, PART, gl.SliceLayout(1, states))
    row = gl.arange(0, WIDTH, gl.SliceLayout(0, states))
    place = (head * WIDTH + row)[None, :] * WIDTH + value[:, None]
    read_ptr = pool_ptr + gl.where(slot >= 0, slot, 0) * (VH * WIDTH * WIDTH)
    state = gl.load(read_ptr + place, mask=(row < gl.where(slot >= 0, WIDTH, 0))[None, :], other=0.0).to(gl.float32)
    number = gl.to_tensor(0)
    while number < count:
        until, slot = _until_kept(write_slot_ptr, base, span[1], number, count)
        state = _carry_on(gates_ptr, buffers, relay, base, span, number, until, state)
        number = until
        if slot >= 0:
            gl.store(pool_ptr + slot * (VH * WIDTH * WIDTH) + place, state.to(pool_ptr.dtype.element_ty))


@gluon.jit
def _carry_on(gates_ptr, buffers, relay, base, span, number, until, state):
    """Through the chunks from `number` to `until` - 1. What is not needed at once stands in the shadow of a product:
    nothing but the products and the numbers between them should be waited for."""
    w, k, u, to_end, full, empty = buffers
    state_smem, new_smem, ready, taken = relay
    first, end = span
    STAGES: gl.constexpr = w.shape[0]
    RELAYS: gl.constexpr = state_smem.shape[0]
    DTYPE: gl.constexpr = w.dtype
    states: gl.constexpr = product_layout(WIDTH)
    news: gl.constexpr = product_layout(PART)
    rows: gl.constexpr = gl.SliceLayout(1, states)
    zero = gl.zeros([PART, PART], gl.float32, news)
    column = gl.arange(0, PART, gl.SliceLayout(0, news))
    whole = _whole_of(gates_ptr, base + number * PART, span, rows)
    for number in range(number, until):  # noqa: B020
        stage = number % STAGES
        turn = number % RELAYS
        start = base + number * PART
        is_partial = (start < first) | (start + PART > end)
        before = state.to(DTYPE)
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        if is_partial:
            _clear(k.index(stage), start, span)
        operand = gl.convert_layout(before, gl.DotOperandLayout(0, news, 2))
        known = warpgroup_mma(operand, w.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        new = u.index(stage).permute((1, 0)).load(news).to(gl.float32)
        gate = to_end.index(stage).load(news)
        state = state * whole[:, None]
        known, state, new, gate = warpgroup_mma_wait(0, [known, state, new, gate])
        new = new - known
        scaled = new * gate
        if is_partial:
            is_own = ((start + column >= first) & (start + column < end))[None, :]
            new = gl.where(is_own, new, 0.0)
            scaled = gl.where(is_own, scaled, 0.0)
        operand = gl.convert_layout(scaled.to(DTYPE), gl.DotOperandLayout(0, states, 2))
        state = warpgroup_mma(operand, k.index(stage), state, is_async=True)
        whole = _whole_of(gates_ptr, start + PART, span, rows)
        mbarrier.wait(taken.index(turn), ((number // RELAYS) & 1) ^ 1)
        state_smem.index(turn).store(before)
        new_smem.index(turn).store(new.to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(ready.index(turn), count=1)
        state = warpgroup_mma_wait(0, [state])
        mbarrier.arrive(empty.index(stage), count=1)
    return state


@gluon.jit
def _answer(out_ptr, buffers, relay, base, span, count, head, part, VH: gl.constexpr):
    """The outputs."""
    q, p, from_start, full, empty = buffers
    state_smem, new_smem, ready, taken = relay
    first, end = span
    STAGES: gl.constexpr = q.shape[0]
    RELAYS: gl.constexpr = state_smem.shape[0]
    outs: gl.constexpr = product_layout(PART)
    wide: gl.constexpr = wide_layout(PART)
    zero = gl.zeros([PART, PART], gl.float32, outs)
    i = gl.arange(0, PART, gl.SliceLayout(1, wide))
    value = head * WIDTH + part * PART + gl.arange(0, PART, gl.SliceLayout(0, wide))
    place = i[:, None] * (VH * WIDTH) + value[None, :]
    for number in range(count):
        stage = number % STAGES
        turn = number % RELAYS
        start = base + number * PART
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        mbarrier.wait(ready.index(turn), (number // RELAYS) & 1)
        o = warpgroup_mma(
            q.index(stage), state_smem.index(turn).permute((1, 0)), zero, use_acc=False, is_async=True
        )  # fmt: skip
        gate = from_start.index(stage).permute((1, 0)).load(outs)
        o, gate = warpgroup_mma_wait(0, [o, gate])
        o = warpgroup_mma(p.index(stage), new_smem.index(turn).permute((1, 0)), o * gate, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(taken.index(turn), count=1)
        mask = ((start + i >= first) & (start + i < end))[:, None]
        to = out_ptr + start.to(gl.int64) * (VH * WIDTH)
        gl.store(to + place, gl.convert_layout(o.to(out_ptr.dtype.element_ty), wide), mask=mask)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """One arrival each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit(
    do_not_specialize=["gates_stride", "row_start"],
    do_not_specialize_on_alignment=["cu_ptr", "position_ptr", "read_slot_ptr", "write_slot_ptr"],
)
def relay_kernel(
    mixed_desc, u_desc, w_desc, p_desc, gates_desc, gates_ptr, pool_ptr, cu_ptr, position_ptr, read_slot_ptr,
    write_slot_ptr, out_ptr, gates_stride, row_start,
    KH: gl.constexpr, VH: gl.constexpr, STAGES: gl.constexpr, OUT_STAGES: gl.constexpr, RELAYS: gl.constexpr,
):  # fmt: skip
    """Grid [2 * value heads, rows], halves of a head side by side. Descriptors of mixed [T, C] twice, w [T, Hv * K], P
    [T, Hv * 64] and the gates [3 * Hv, at least T]."""
    head = gl.program_id(0) // (WIDTH // PART)
    part = gl.program_id(0) % (WIDTH // PART)
    row = gl.program_id(1)
    first = gl.load(cu_ptr + row)
    end = gl.load(cu_ptr + row + 1)
    base = first - (gl.load(position_ptr + first) % PART).to(gl.int32)
    count = gl.where(end > first, (end - base + PART - 1) // PART, 0)
    slot = gl.load(read_slot_ptr + row_start + row).to(gl.int64)
    gates_ptr += (2 * VH + head).to(gl.int64) * gates_stride

    dtype: gl.constexpr = out_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    w = gl.allocate_shared_memory(dtype, [STAGES, PART, WIDTH], shared)
    k = gl.allocate_shared_memory(dtype, [STAGES, PART, WIDTH], shared)
    u = gl.allocate_shared_memory(dtype, [STAGES, PART, PART], shared)
    q = gl.allocate_shared_memory(dtype, [OUT_STAGES, PART, WIDTH], shared)
    p = gl.allocate_shared_memory(dtype, [OUT_STAGES, PART, PART], shared)
    states = gl.allocate_shared_memory(dtype, [RELAYS, PART, WIDTH], shared)
    news = gl.allocate_shared_memory(dtype, [RELAYS, PART, PART], shared)
    to_end = gl.allocate_shared_memory(gl.float32, [STAGES, 1, PART], GATES)
    from_start = gl.allocate_shared_memory(gl.float32, [OUT_STAGES, 1, PART], GATES)
    carried = (w, k, u, to_end, _barriers(STAGES), _barriers(STAGES))
    answered = (q, p, from_start, _barriers(OUT_STAGES), _barriers(OUT_STAGES))
    relay = (states, news, _barriers(RELAYS), _barriers(RELAYS))
    fence_async_shared()
    span = (first, end)
    gl.warp_specialize(
        [
            (_carry, (
                pool_ptr, gates_ptr, write_slot_ptr, slot, carried, relay, base, span, count, head, part, VH,
            )),
            (_answer, (out_ptr, answered, relay, base, span, count, head, part, VH)),
            (_fetch_for_carry, (mixed_desc, u_desc, w_desc, gates_desc, carried, base, count, head, part, KH, VH)),
            (_fetch_for_answer, (mixed_desc, p_desc, gates_desc, answered, base, count, head, KH, VH)),
        ],
        [4, 1, 1],
        [208, 24, 24],
    )  # fmt: skip


def pass_chunks(
    mixed_TC: Tensor,
    w_TVK: Tensor,
    p_TVC: Tensor,
    gates_3VT: Tensor,
    state_pool_SVKD: Tensor,
    out_TVD: Tensor,
    layout: Layout,
    segment: Segment,
    config: HopperConfig,
) -> None:
    """What `triton_chunk.pass_kernel` does with what `prepare_kernel` made of a segment: fills out."""
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    tokens, channels = mixed_TC.shape
    assert k_dim == v_dim == WIDTH.value, f"gated delta: no Hopper kernel for widths of {k_dim} and {v_dim}"
    part = PART.value
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    shared = gl.NVMMASharedLayout(128, 16, 2)

    def boxes(x: Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(tokens, -1), [part, columns], shared)

    rows = gates_3VT.view(3 * v_heads, -1)
    gates = TensorDescriptor.from_tensor(rows, [1, part], gl.NVMMASharedLayout(0, 32, 2))
    relay_kernel[(v_dim // part * v_heads, segment.row_end - segment.row_start)](
        boxes(mixed_TC, k_dim), boxes(mixed_TC, part), boxes(w_TVK, k_dim), boxes(p_TVC, part), gates, gates_3VT,
        state_pool_SVKD, segment.cu_seqlens, segment.cut(layout.position), layout.read_slot,
        segment.cut(layout.write_slot), out_TVD, gates_3VT.shape[2], segment.row_start,
        KH=k_heads, VH=v_heads, STAGES=config.stages, OUT_STAGES=config.out_stages, RELAYS=config.relays, num_warps=4,
    )  # fmt: skip
