"""The pass over chunks on Hopper: what `triton_chunk.pass_kernel` computes, by warps that have roles. Written in Gluon,
Triton's language of explicit layouts, which the interpreter does not run.

A piece is one row, one value head and 64 of its values; a program takes one piece after the other. Four partitions
share the work of a chunk:

- `_carry`, four warps, holds the state, transposed as [values, K], and computes what the next chunk waits for, and
  nothing else: n = u - w S, then S = exp(G_last) S + (exp(G_last - G) k)^T n. What it leaves in registers is the left
  operand of its next product. Of n, half of the tokens are scaled while the other half is multiplied;
- `_answer`, four warps, computes o = exp(G) q S + P n from the copies of S and n that `_carry` leaves in shared memory,
  while that is at the next chunk;
- two warps fetch boxes (TMA), each for one of the two, as far ahead as there are buffers, and gates one by one.

A box is copied whole. What of it lies outside the row belongs to other rows, which may hold NaN: there n is set to 0,
and so are the keys, since 0 times NaN is not 0. Before the first token and behind the last of all a box holds zeros.
A box has to begin at a multiple of 16 bytes of its row of memory, else it is an illegal instruction.

For widths of 128. Shape letters: T tokens, Hk and Hv key and value heads, K and V their widths, S slots.
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

from deltaserve.ops.gated_delta.triton_chunk import HopperConfig
from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import Layout, Segment

WIDTH = gl.constexpr(128)
"""K and V."""
PART = gl.constexpr(64)
"""Tokens of a chunk, and values of a piece: the height of the matrix products of four warps."""
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_each = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Their names before Triton 3.7 and since. `meet`: all threads of the partition."""
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""How the warp that fetches copies numbers one by one."""


@gluon.constexpr_function
def product_layout(columns):
    """How four warps hold the result of a product, [64, columns] fp32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def wide_layout(columns):
    """Reads and writes of whole rows, 16 bytes at a time."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _piece(pieces, turn, VH: gl.constexpr):
    """What a program does in its `turn`: value head, half, row, the row's first token and the one behind its last, the
    token at the first place of its first chunk, and the number of chunks. Every other turn counts programs backwards,
    so that none has long rows only where these alternate with short ones."""
    cu_ptr, position_ptr, num_pieces = pieces
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    piece = turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)
    is_there = piece < num_pieces
    piece = gl.where(is_there, piece, 0)
    half = piece % (WIDTH // PART)
    head = piece // (WIDTH // PART) % VH
    row = piece // (WIDTH // PART * VH)
    first = gl.load(cu_ptr + row)
    end = gl.load(cu_ptr + row + 1)
    is_there = is_there & (end > first)  # a row of padding may have no token, and stand behind the last
    base = first - (gl.load(position_ptr + first, mask=is_there, other=0) % PART).to(gl.int32)
    count = gl.where(is_there, (end - base + PART - 1) // PART, 0)
    return head, half, row, (first, end), base, count


@gluon.jit
def _turns(pieces):
    return (pieces[2] + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _ring(number, COUNT: gl.constexpr):
    """Of the `number`-th use of COUNT buffers: which one, and the parity of the phase that fills it."""
    return number % COUNT, (number // COUNT) & 1


@gluon.jit
def _own_tokens(start, span):
    """For each place of a chunk the nearest token of the row in it, and the last of these."""
    first, end = span
    last = gl.minimum(start + PART, end) - 1
    return gl.minimum(gl.maximum(start + gl.arange(0, PART, EACH), first), last), last


@gluon.jit
def _fetch_for_carry(
    mixed_desc, u_desc, w_desc, gates_ptr, buffers, pieces, tokens, KH: gl.constexpr, VH: gl.constexpr
):  # fmt: skip
    w, k, u, to_end, whole, full, handed = buffers
    STAGES: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = (2 * WIDTH + PART) * PART * 2
    done = gl.to_tensor(0)  # chunks of pieces before
    for turn in range(_turns(pieces)):
        head, half, _row, span, base, count = _piece(pieces, turn, VH)
        gates = gates_ptr + head.to(gl.int64) * tokens * 2
        for number in range(count):
            stage, parity = _ring(done + number, STAGES)
            token = base + number * PART
            own, last = _own_tokens(token, span)
            mbarrier.wait(handed.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            copy_box(w_desc, [token, head * WIDTH], full.index(stage), w.index(stage))
            copy_box(u_desc, [token, (2 * KH + head) * WIDTH + half * PART], full.index(stage), u.index(stage))
            copy_box(mixed_desc, [token, (KH + head // (VH // KH)) * WIDTH], full.index(stage), k.index(stage))
            copy_each(to_end.index(stage), gates + 2 * own + 1)
            copy_each(whole.index(stage), gates + 2 * (last + gl.zeros_like(own)))
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        done += count


@gluon.jit
def _fetch_for_answer(mixed_desc, p_desc, gates_ptr, buffers, pieces, tokens, KH: gl.constexpr, VH: gl.constexpr):
    q, p, from_start, full, answered = buffers
    STAGES: gl.constexpr = q.shape[0]
    BYTES: gl.constexpr = (WIDTH + PART) * PART * 2
    done = gl.to_tensor(0)
    for turn in range(_turns(pieces)):
        head, _half, _row, span, base, count = _piece(pieces, turn, VH)
        gates = gates_ptr + head.to(gl.int64) * tokens * 2
        for number in range(count):
            stage, parity = _ring(done + number, STAGES)
            token = base + number * PART
            own, _ = _own_tokens(token, span)
            mbarrier.wait(answered.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            copy_box(mixed_desc, [token, head // (VH // KH) * WIDTH], full.index(stage), q.index(stage))
            copy_box(p_desc, [token, head * PART], full.index(stage), p.index(stage))
            copy_each(from_start.index(stage), gates + 2 * own)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        done += count


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
    meet()


@gluon.jit
def _carry(pool_ptr, read_slot_ptr, write_slot_ptr, buffers, relay, pieces, VH: gl.constexpr):
    """The state, from the slot that is read to those that keep it."""
    states: gl.constexpr = product_layout(WIDTH)
    value = gl.arange(0, PART, gl.SliceLayout(1, states))
    index = gl.arange(0, WIDTH, gl.SliceLayout(0, states))
    place = index[None, :] * WIDTH + value[:, None]
    done = gl.to_tensor(0)
    for turn in range(_turns(pieces)):
        head, half, row, span, base, count = _piece(pieces, turn, VH)
        slot = gl.load(read_slot_ptr + row).to(gl.int64)
        part_ptr = pool_ptr + head * (WIDTH * WIDTH) + half * PART
        read_ptr = part_ptr + gl.where(slot >= 0, slot, 0) * (VH * WIDTH * WIDTH)
        is_read = (slot >= 0) & (count > 0)
        state = gl.load(read_ptr + place, mask=(index < gl.where(is_read, WIDTH, 0))[None, :], other=0.0).to(gl.float32)
        number = gl.to_tensor(0)
        while number < count:
            until, slot = _until_kept(write_slot_ptr, base, span[1], number, count)
            state = _carry_on(buffers, relay, base, span, number, until, done, state)
            number = until
            if slot >= 0:
                gl.store(part_ptr + slot * (VH * WIDTH * WIDTH) + place, state.to(pool_ptr.dtype.element_ty))
        done += count


@gluon.jit
def _carry_on(buffers, relay, base, span, begin, until, done, state):
    """Through the chunks from `begin` to `until` - 1. What is not needed at once stands in the shadow of a product:
    nothing but the products and the numbers between them should be waited for. So what a chunk leaves is handed on
    while the next one's first product runs."""
    w, k, u, to_end, whole, full, handed = buffers
    state_smem, new_smem, answered = relay
    first, end = span
    STAGES: gl.constexpr = w.shape[0]
    RELAYS: gl.constexpr = state_smem.shape[0]
    DTYPE: gl.constexpr = w.dtype
    HALF: gl.constexpr = PART // 2
    states: gl.constexpr = product_layout(WIDTH)
    news: gl.constexpr = product_layout(HALF)
    columns: gl.constexpr = gl.SliceLayout(0, news)
    zero = gl.zeros([PART, PART], gl.float32, product_layout(PART))
    stage, parity = _ring(done + begin, STAGES)
    mbarrier.wait(full.index(stage), parity)
    for number in range(begin, until):
        stage, _ = _ring(done + number, STAGES)
        before, _ = _ring(done + number - 1, STAGES)
        after, parity = _ring(done + number + 1, STAGES)
        relayed, _ = _ring(done + number, RELAYS)
        taken, is_taken = _ring(done + number - RELAYS, answered.shape[0])
        start = base + number * PART
        is_partial = (start < first) | (start + PART > end)
        rounded = state.to(DTYPE)
        if is_partial:
            _clear(k.index(stage), start, span)
        operand = gl.convert_layout(rounded, gl.DotOperandLayout(0, product_layout(PART), 2))
        k_0, k_1 = k.index(stage).slice(0, HALF), k.index(stage).slice(HALF, HALF)
        known = warpgroup_mma(operand, w.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        fence_async_shared()
        mbarrier.arrive(handed.index(before), count=1, pred=number > begin)
        new_0 = u.index(stage).slice(0, HALF).permute((1, 0)).load(news).to(gl.float32)
        new_1 = u.index(stage).slice(HALF, HALF).permute((1, 0)).load(news).to(gl.float32)
        gate_0 = to_end.index(stage).slice(0, HALF).load(columns)[None, :]
        gate_1 = to_end.index(stage).slice(HALF, HALF).load(columns)[None, :]
        state = state * whole.index(stage).load(gl.SliceLayout(1, states))[:, None]
        known, new_0, gate_0, new_1, gate_1 = warpgroup_mma_wait(0, [known, new_0, gate_0, new_1, gate_1])
        known_0, known_1 = gl.split(gl.permute(gl.reshape(known, [PART, 2, HALF]), (0, 2, 1)))
        known_0, known_1 = gl.convert_layout(known_0, news), gl.convert_layout(known_1, news)
        new_0, scaled = _corrected(new_0 - known_0, gate_0, start, span, is_partial)
        operand = gl.convert_layout(scaled.to(DTYPE), gl.DotOperandLayout(0, states, 2))
        state = warpgroup_mma(operand, k_0, state, is_async=True)
        new_1, scaled = _corrected(new_1 - known_1, gate_1, start + HALF, span, is_partial)
        operand = gl.convert_layout(scaled.to(DTYPE), gl.DotOperandLayout(0, states, 2))
        state = warpgroup_mma(operand, k_1, state, is_async=True)
        mbarrier.wait(answered.index(taken), is_taken, pred=done + number >= RELAYS)
        state_smem.index(relayed).store(rounded)
        new_smem.index(relayed).slice(0, HALF).permute((1, 0)).store(new_0.to(DTYPE))
        new_smem.index(relayed).slice(HALF, HALF).permute((1, 0)).store(new_1.to(DTYPE))
        mbarrier.wait(full.index(after), parity, pred=number + 1 < until)
        state = warpgroup_mma_wait(0, [state])
    fence_async_shared()
    stage, _ = _ring(done + until - 1, STAGES)
    mbarrier.arrive(handed.index(stage), count=1)
    return state


@gluon.jit
def _corrected(new, gate, start, span, is_partial):
    """n [values, tokens] and what the state takes of it, both 0 for tokens of other rows."""
    first, end = span
    scaled = new * gate
    if is_partial:
        column = gl.arange(0, new.shape[1], gl.SliceLayout(0, new.type.layout))
        is_own = ((start + column >= first) & (start + column < end))[None, :]
        new = gl.where(is_own, new, 0.0)
        scaled = gl.where(is_own, scaled, 0.0)
    return new, scaled


@gluon.jit
def _answer(out_ptr, buffers, relay, pieces, VH: gl.constexpr):
    """The outputs. Those of a chunk are stored while the next one's first product runs."""
    q, p, from_start, full, answered = buffers
    state_smem, new_smem, handed = relay
    STAGES: gl.constexpr = q.shape[0]
    outs: gl.constexpr = product_layout(PART)
    zero = gl.zeros([PART, PART], gl.float32, outs)
    done = gl.to_tensor(0)
    for turn in range(_turns(pieces)):
        head, half, _row, span, base, count = _piece(pieces, turn, VH)
        part_ptr = out_ptr + head * WIDTH + half * PART
        rounded = zero.to(out_ptr.dtype.element_ty)
        for number in range(count):
            stage, is_full = _ring(done + number, STAGES)
            relayed, _ = _ring(done + number, state_smem.shape[0])
            carried, is_handed = _ring(done + number, handed.shape[0])
            mbarrier.wait(full.index(stage), is_full)
            mbarrier.wait(handed.index(carried), is_handed)
            transposed = state_smem.index(relayed).permute((1, 0))
            o = warpgroup_mma(q.index(stage), transposed, zero, use_acc=False, is_async=True)
            gate = from_start.index(stage).load(gl.SliceLayout(1, outs))[:, None]
            _store(part_ptr, rounded, base + (number - 1) * PART, span, VH)
            o, gate = warpgroup_mma_wait(0, [o, gate])
            o = warpgroup_mma(p.index(stage), new_smem.index(relayed), o * gate, is_async=True)
            o = warpgroup_mma_wait(0, [o])
            mbarrier.arrive(answered.index(stage), count=1)
            rounded = o.to(out_ptr.dtype.element_ty)
        _store(part_ptr, rounded, base + (count - 1) * PART, span, VH)
        done += count


@gluon.jit
def _store(part_ptr, o, start, span, VH: gl.constexpr):
    """The row's own of a chunk's outputs: none of the chunk before the first."""
    first, end = span
    wide: gl.constexpr = wide_layout(PART)
    i = gl.arange(0, PART, gl.SliceLayout(1, wide))
    place = i[:, None] * (VH * WIDTH) + gl.arange(0, PART, gl.SliceLayout(0, wide))[None, :]
    mask = ((start + i >= first) & (start + i < end))[:, None]
    gl.store(part_ptr + start.to(gl.int64) * (VH * WIDTH) + place, gl.convert_layout(o, wide), mask=mask)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(
    do_not_specialize=["tokens", "row_start", "num_pieces"],
    do_not_specialize_on_alignment=["cu_ptr", "position_ptr", "read_slot_ptr", "write_slot_ptr"],
)
def relay_kernel(
    mixed_desc, u_desc, w_desc, p_desc, gates_ptr, pool_ptr, cu_ptr, position_ptr, read_slot_ptr,
    write_slot_ptr, out_ptr, tokens, row_start, num_pieces,
    KH: gl.constexpr, VH: gl.constexpr, STAGES: gl.constexpr, OUT_STAGES: gl.constexpr, RELAYS: gl.constexpr,
):  # fmt: skip
    """Grid [programs], which share the halves of value heads of rows. Descriptors of mixed [T, C] twice, w [T, Hv * K]
    and P [T, Hv * 64]."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    w = gl.allocate_shared_memory(dtype, [STAGES, PART, WIDTH], shared)
    k = gl.allocate_shared_memory(dtype, [STAGES, PART, WIDTH], shared)
    u = gl.allocate_shared_memory(dtype, [STAGES, PART, PART], shared)
    q = gl.allocate_shared_memory(dtype, [OUT_STAGES, PART, WIDTH], shared)
    p = gl.allocate_shared_memory(dtype, [OUT_STAGES, PART, PART], shared)
    states = gl.allocate_shared_memory(dtype, [RELAYS, PART, WIDTH], shared)
    news = gl.allocate_shared_memory(dtype, [RELAYS, PART, PART], shared)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    to_end = gl.allocate_shared_memory(gl.float32, [STAGES, PART], numbers)
    whole = gl.allocate_shared_memory(gl.float32, [STAGES, PART], numbers)
    from_start = gl.allocate_shared_memory(gl.float32, [OUT_STAGES, PART], numbers)
    # Full is what the boxes have filled, and the copies of each of a warp's 32 threads. What `_carry` has handed on it
    # has also read, and what `_answer` has answered it has read of both: one barrier says so to two partitions, and is
    # not used again before the slower one has seen it, as that is at most RELAYS chunks behind.
    gl.static_assert(RELAYS <= STAGES and RELAYS <= OUT_STAGES)
    handed, is_answered = _barriers(STAGES, 1), _barriers(OUT_STAGES, 1)
    carried = (w, k, u, to_end, whole, _barriers(STAGES, 1 + 32), handed)
    answered = (q, p, from_start, _barriers(OUT_STAGES, 1 + 32), is_answered)
    fence_async_shared()
    pieces = (cu_ptr, position_ptr, num_pieces)
    gl.warp_specialize(
        [
            (_carry, (
                pool_ptr, read_slot_ptr + row_start, write_slot_ptr, carried, (states, news, is_answered), pieces, VH,
            )),
            (_answer, (out_ptr, answered, (states, news, handed), pieces, VH)),
            (_fetch_for_carry, (mixed_desc, u_desc, w_desc, gates_ptr, carried, pieces, tokens, KH, VH)),
            (_fetch_for_answer, (mixed_desc, p_desc, gates_ptr, answered, pieces, tokens, KH, VH)),
        ],
        [4, 1, 1],
        [208, 40, 40],
    )  # fmt: skip


def pass_chunks(
    mixed_TC: Tensor,
    w_TVK: Tensor,
    p_TVC: Tensor,
    gates_VT2: Tensor,
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

    num_pieces = v_dim // part * v_heads * (segment.row_end - segment.row_start)
    relay_kernel[(min(num_pieces, properties(out_TVD.device).num_sms),)](
        boxes(mixed_TC, k_dim), boxes(mixed_TC, part), boxes(w_TVK, k_dim), boxes(p_TVC, part), gates_VT2,
        state_pool_SVKD, segment.cu_seqlens, segment.cut(layout.position), layout.read_slot,
        segment.cut(layout.write_slot), out_TVD, tokens, segment.row_start, num_pieces,
        KH=k_heads, VH=v_heads, STAGES=config.stages, OUT_STAGES=config.out_stages, RELAYS=config.relays, num_warps=4,
    )  # fmt: skip
