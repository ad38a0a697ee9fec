"""A token of each of many rows on Hopper, through a whole gated delta net as in `triton_step`, by programs that stay.

Each program goes through its share of the rows' value heads, those of a key head one after another. States come as
boxes into a ring of shared memory, so that bytes are on their way while others are computed; they leave from registers.
Where a row has no state the box lies beyond the pool, which makes zeros. A warp holds 32 whole columns, so that sums
over keys end inside it; vectors are made one number a thread and handed on through shared memory. What else a head
needs is loaded a head ahead. A key head's query and key windows are written with its last value head: by then all have
read them. Two programs share a multiprocessor: one alone waits for its own sums.

On an H200 a layer with states in bf16 takes 84.3 us at 128 rows and 164.9 at 256, by `triton_step` 98.5 and 191.4; with
states in fp32 74.3 at 64 rows, 148.3 at 128 and 295.1 at 256, by `triton_step` 83.5, 150.4 and 294.9. It loses where
rows have several tokens (399 and 368 at 128 x 4), and with 8 warps a program (99.0 in bf16 at 128).

Written in Gluon. Its few formulas stand in `triton_step` too: what is run on a CPU here knows Gluon's operations alone,
and tests hold both to the same reference.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import Layout, Segment
from deltaserve.ops.linear.triton_early import early_options
from deltaserve.ops.linear.triton_fp8 import fp8_way

fetch_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Of a head's 128 numbers, one a thread."""


@gluon.jit
def wait_for_inputs(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def log1p(x):
    u = 1 + x
    d = u - 1
    return gl.where(d == 0, x, gl.log(u) * (x / gl.where(d == 0, 1.0, d)))


@gluon.jit
def log_decay(a, A_log, dt_bias):
    x = a + dt_bias
    softplus = gl.where(x > 20, x, log1p(gl.exp(gl.minimum(x, 20.0))))
    return -gl.exp(A_log) * softplus


@gluon.jit
def silu(x):
    return x / (1 + gl.exp(-x))


@gluon.jit
def window_of(window, channel, index, bound, C: gl.constexpr):
    """The three inputs that it holds, the oldest first; zeros at `bound` and beyond."""
    inside = index < bound
    oldest = gl.load(window + channel, mask=inside, other=0)
    older = gl.load(window + C + channel, mask=inside, other=0)
    return oldest, older, gl.load(window + 2 * C + channel, mask=inside, other=0)


@gluon.jit
def taps_of(weight, channel, C: gl.constexpr):
    return (
        gl.load(weight + channel),
        gl.load(weight + C + channel),
        gl.load(weight + 2 * C + channel),
        gl.load(weight + 3 * C + channel),
    )


@gluon.jit
def convolved(x, new, taps):
    w0, w1, w2, w3 = taps
    y = x[0].to(gl.float32) * w0.to(gl.float32) + x[1].to(gl.float32) * w1.to(gl.float32)
    y = y + x[2].to(gl.float32) * w2.to(gl.float32) + new.to(gl.float32) * w3.to(gl.float32)
    return silu(y).to(new.dtype).to(gl.float32)


@gluon.jit
def held_of(
    unit, pools, places,
    KH: gl.constexpr, VH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Windows of a head of a row."""
    conv_pool, _ = pools
    read_slot, _, row_start, _ = places
    C: gl.constexpr = 2 * KH * K + VH * V
    head = unit % VH
    key_head = head // (VH // KH)
    slot = gl.load(read_slot + row_start + unit // VH)
    k_read = gl.where(slot >= 0, K, 0)
    window = conv_pool + gl.where(slot >= 0, slot, 0).to(gl.int64) * (3 * C)
    lane = gl.arange(0, K, LINE)
    v_index = gl.arange(0, V, LINE)
    q_channel, k_channel = key_head * K + lane, KH * K + key_head * K + lane
    v_channel = 2 * KH * K + head * V + v_index
    return (
        window_of(window, q_channel, lane, k_read, C),
        window_of(window, k_channel, lane, k_read, C),
        window_of(window, v_channel, v_index, k_read, C),
    )


@gluon.jit
def given_of(
    unit, inputs, strides, places,
    KH: gl.constexpr, VH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """A row's token, what it brings to a head, and where the state is kept after it."""
    mixed, z, b, a = inputs
    mixed_stride, z_stride, b_stride, a_stride = strides
    _, write_slot, _, token_start = places
    head = unit % VH
    key_head = head // (VH // KH)
    token = (token_start + unit // VH).to(gl.int64)
    lane = gl.arange(0, K, LINE)
    v_index = gl.arange(0, V, LINE)
    at = mixed + token * mixed_stride
    return (
        token,
        gl.load(at + key_head * K + lane),
        gl.load(at + KH * K + key_head * K + lane),
        gl.load(at + 2 * KH * K + head * V + v_index),
        gl.load(z + token * z_stride + head * V + v_index),
        gl.load(a + token * a_stride + head),
        gl.load(b + token * b_stride + head),
        gl.load(write_slot + token),
    )


@gluon.jit
def unit_of(j, number, GROUP: gl.constexpr):
    """A program's j-th value head of a row, its last one where it has fewer. All programs together go through them in
    their order, a key head's together: so the pools are read nearly in theirs."""
    j = gl.minimum(j, number - 1)
    return (gl.program_id(0) + j // GROUP * gl.num_programs(0)) * GROUP + j % GROUP


@gluon.jit
def fetch_state(
    desc, ring, full, stage, unit, wanted, places, beyond, VH: gl.constexpr, K: gl.constexpr, BYTES: gl.constexpr
):
    read_slot, _, row_start, _ = places
    slot = gl.load(read_slot + row_start + unit // VH)
    first = gl.where(slot >= 0, slot.to(gl.int32) * (VH * K) + unit % VH * K, beyond)
    mbarrier.expect(full.index(stage), BYTES, pred=wanted)
    fetch_box(desc, [first, 0], full.index(stage), ring.index(stage), pred=wanted)


@gluon.jit(
    do_not_specialize=["token_start", "row_start", "rows", "beyond", "q_stride"],
    do_not_specialize_on_alignment=["read_slot", "write_slot"],
)
def ring_kernel(
    desc, mixed, z, b, a, weight, A_log, dt_bias, norm_weight, conv_pool, state_pool, read_slot, write_slot,
    out, q_out, q_scale, token_start, row_start, rows, beyond,
    mixed_stride, z_stride, b_stride, a_stride, q_stride,
    eps: gl.constexpr, KH: gl.constexpr, VH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    E: gl.constexpr, S: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """E: numbers of a state in 16 bytes. S: states in the ring. FP8: whether outputs are stored quantised as well, with
    scales [value heads, q_stride]."""
    STATE: gl.constexpr = gl.BlockedLayout([1, E], [E, 32 // E], [1, 4], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, STATE)
    VALUES: gl.constexpr = gl.SliceLayout(0, STATE)
    C: gl.constexpr = 2 * KH * K + VH * V
    GROUP: gl.constexpr = VH // KH
    BYTES: gl.constexpr = K * V * 16 // E
    let_next_start(EARLY)
    BOX: gl.constexpr = gl.NVMMASharedLayout(512 // E, 128 // E, 2)
    ring = gl.allocate_shared_memory(state_pool.dtype.element_ty, [S, K, V], BOX)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()

    places = (read_slot, write_slot, row_start, token_start)
    pools = (conv_pool, state_pool)
    inputs = (mixed, z, b, a)
    strides = (mixed_stride, z_stride, b_stride, a_stride)
    groups = rows * KH
    number = (groups - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * GROUP
    for s in gl.static_range(S):
        ahead = unit_of(s, number, GROUP)
        fetch_state(desc, ring, full, s, ahead, s < number, places, beyond, VH, K, BYTES)
    lane = gl.arange(0, K, LINE)
    v_index = gl.arange(0, V, LINE)
    place = gl.arange(0, K, KEYS)[:, None] * V + gl.arange(0, V, VALUES)[None, :]
    handed = gl.allocate_shared_memory(gl.float32, [4, V], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gain = gl.load(norm_weight + v_index).to(gl.float32)
    unit = unit_of(0, number, GROUP)
    held = held_of(unit, pools, places, KH, VH, K, V)
    wait_for_inputs(EARLY)
    given = given_of(unit, inputs, strides, places, KH, VH, K, V)
    stage, phase = 0, 0
    for j in range(number):
        head = unit % VH
        next_unit = unit_of(j + 1, number, GROUP)
        q_window, k_window, v_window = held
        q0, q1, q2 = q_window
        k0, k1, k2 = k_window
        v0, v1, v2 = v_window
        held = held_of(next_unit, pools, places, KH, VH, K, V)
        q_channel = head // GROUP * K + lane
        q_taps, k_taps = taps_of(weight, q_channel, C), taps_of(weight, KH * K + q_channel, C)
        v_taps = taps_of(weight, 2 * KH * K + head * V + v_index, C)
        decay_rate, decay_bias = gl.load(A_log + head).to(gl.float32), gl.load(dt_bias + head).to(gl.float32)
        mbarrier.wait(full.index(stage), phase)
        state = ring.index(stage).load(STATE).to(gl.float32)
        barrier()  # all have read
        ahead = unit_of(j + S, number, GROUP)
        fetch_state(desc, ring, full, stage, ahead, j + S < number, places, beyond, VH, K, BYTES)
        stage += 1
        phase = gl.where(stage == S, phase ^ 1, phase)
        stage = gl.where(stage == S, 0, stage)
        token, q3, k3, v3, gate, forget, write, keep = given
        given = given_of(next_unit, inputs, strides, places, KH, VH, K, V)
        decay = gl.exp(log_decay(forget.to(gl.float32), decay_rate, decay_bias))
        beta = 1 / (1 + gl.exp(-write.to(gl.float32)))
        handed.index(0).store(convolved((q0, q1, q2), q3, q_taps))
        handed.index(1).store(convolved((k0, k1, k2), k3, k_taps))
        handed.index(2).store(convolved((v0, v1, v2), v3, v_taps))
        query, key = handed.index(0).load(KEYS), handed.index(1).load(KEYS)
        value = handed.index(2).load(VALUES)
        of_query = gl.rsqrt(gl.sum(query * query, 0) + 1e-6) * (K**-0.5)
        of_key = gl.rsqrt(gl.sum(key * key, 0) + 1e-6)
        alike = gl.sum(query * key, 0) * (of_query * of_key)
        along_key = gl.sum(state * key[:, None], 0) * (of_key * decay)
        along_query = gl.sum(state * query[:, None], 0) * (of_query * decay)
        update = beta * (value - along_key)
        handed.index(3).store(along_query + update * alike)
        state = state * decay + key[:, None] * (update * of_key)[None, :]
        kept = gl.where(keep >= 0, keep, 0).to(gl.int64)
        if keep >= 0:
            into = state_pool + (kept * VH + head) * (K * V)
            gl.store(into + place, state.to(state_pool.dtype.element_ty))
        o = handed.index(3).load(LINE).to(v3.dtype).to(gl.float32)
        mean = gl.sum(o * o, 0) / V
        scaled = o * gl.rsqrt(mean + eps) * gain * silu(gate.to(gl.float32))
        rounded = scaled.to(out.dtype.element_ty)
        gl.store(out + (token * VH + head) * V + v_index, rounded)
        if FP8:
            x = rounded.to(gl.float32)
            amax = gl.max(gl.abs(x), 0)
            most = gl.zeros([V], gl.float32, LINE) + gl.where(amax == 0, 448.0, amax)
            scale = gl.div_rn(most, gl.full_like(most, 448.0))
            inverse = gl.minimum(gl.div_rn(gl.full_like(scale, 1.0), scale), 3e38)
            quotient = x * inverse
            x_q = gl.fma(gl.fma(-quotient, scale, x), inverse, quotient).to(gl.float8e4nv)
            gl.store(q_out + (token * VH + head) * V + v_index, x_q)
            at = q_scale + token + head * q_stride + v_index * 0
            gl.store(at, scale, mask=v_index == 0)
        window = conv_pool + kept * (3 * C)
        k_write = gl.where((keep >= 0) & (head % GROUP == GROUP - 1), K, 0)
        v_write = gl.where(keep >= 0, V, 0)
        q_to = window + head // GROUP * K + lane
        k_to = q_to + KH * K
        v_to = window + 2 * KH * K + head * V + v_index
        gl.store(q_to, q1, mask=lane < k_write)
        gl.store(q_to + C, q2, mask=lane < k_write)
        gl.store(q_to + 2 * C, q3, mask=lane < k_write)
        gl.store(k_to, k1, mask=lane < k_write)
        gl.store(k_to + C, k2, mask=lane < k_write)
        gl.store(k_to + 2 * C, k3, mask=lane < k_write)
        gl.store(v_to, v1, mask=v_index < v_write)
        gl.store(v_to + C, v2, mask=v_index < v_write)
        gl.store(v_to + 2 * C, v3, mask=v_index < v_write)
        unit = next_unit


def step(
    mixed_TC: Tensor,
    z_TVD: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    conv_weight_CW: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    norm_weight_D: Tensor,
    eps: float,
    conv_pool_SWC: Tensor,
    state_pool_SVKD: Tensor,
    layout: Layout,
    segment: Segment,
    out_TVD: Tensor,
    ready: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `triton_step.step`, where `step_of` there chooses it."""
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    k_heads = (mixed_TC.shape[1] - v_heads * v_dim) // (2 * k_dim)
    wide = 16 // state_pool_SVKD.element_size()
    (q_out, way), q_scale = (out_TVD, 0) if ready is None else fp8_way(*ready), out_TVD if ready is None else ready[1]
    flat_RD = state_pool_SVKD.view(-1, v_dim)
    rows = segment.row_end - segment.row_start
    ring_kernel[(min(rows * k_heads, 2 * properties(mixed_TC.device).num_sms),)](
        TensorDescriptor.from_tensor(flat_RD, [k_dim, v_dim], gl.NVMMASharedLayout(512 // wide, 128 // wide, 2)),
        mixed_TC,
        z_TVD,
        b_TV,
        a_TV,
        conv_weight_CW,
        A_log_V,
        dt_bias_V,
        norm_weight_D,
        conv_pool_SWC,
        state_pool_SVKD,
        layout.read_slot,
        layout.write_slot,
        out_TVD,
        q_out,
        q_scale,
        segment.token_start,
        segment.row_start,
        rows,
        len(flat_RD),
        mixed_TC.stride(0),
        z_TVD.stride(0),
        b_TV.stride(0),
        a_TV.stride(0),
        q_scale.stride(1),
        eps=eps,
        KH=k_heads,
        VH=v_heads,
        K=k_dim,
        V=v_dim,
        E=wide,
        S=wide // 4,
        FP8=way,
        num_warps=4,
        **early_options(mixed_TC.device),
    )
