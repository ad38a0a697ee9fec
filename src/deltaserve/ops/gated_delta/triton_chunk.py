"""The gated delta rule over rows of any length, in chunks of 64 tokens. Knows the recurrence, not what surrounds it.

`prepare_kernel`, one program per chunk and value head, computes what no chunk has from another: the gates and their
running sums G, the system I + A with A[i, j] = beta_i exp(G_i - G_j) k_i.k_j below the diagonal, its inverse T, and

    u = (T beta) v      w = (T beta exp(G)) k      P[i, j] = exp(G_i - G_j) q_i.k_j on and below the diagonal

`pass_kernel`, one program per row, value head and slice of V, carries the state through the chunks of its row (on
Hopper triton_hopper.py does, see HOPPER):

    n = u - w S      o = exp(G) q S + P n      S = exp(G_last) S + (exp(G_last - G) k)^T n

It keeps S transposed, [slice of V, K]: then every product of the chain takes what the one before it left in registers
as its left operand, and only operands from memory pass through shared memory. A slice of 64 fills the four warps that a
Hopper product takes, and makes 64 programs of one row at 32 heads; per chunk a program reads 64 KB, most of it from the
L2 cache, where it is shared with the other slice (and k and q with the other value head).

The inverse is that of triton_inverse.py. Keys have length 1, 0 <= beta <= 1 and exp(g) <= 1, so |T[i, j]| <= 1, and of
blocks of T as well: each is k_i . (product of contractions) k_j. So fp16 operands with fp32 sums suffice for bf16
inputs (their 11 bits are tf32's, at twice its rate); the result is rounded to bf16's 8 bits in any case. beta and
exp(G) scale the columns of T, not the rows of v and k: fewer numbers, and rounded once instead of twice.

For bf16 and fp16 inputs, whose dtype the operands of all other products have too. EXACT computes all products in fp32,
for the interpreter, which errs on bf16's; compiled it would unroll them into code that takes minutes. A variant follows
from the model's shapes, the dtype of the inputs and that of the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from deltaserve.ops.conv.chunks import CHUNK, chunk_table
from deltaserve.ops.conv.triton_conv import fast_way
from deltaserve.ops.gated_delta.triton_inverse import inverse_of
from deltaserve.ops.gated_delta.triton_step import log_decay
from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import Layout, Segment


@dataclass(frozen=True)
class HopperConfig:
    """How triton_hopper.py passes over chunks: buffers of what carries the state on, of what answers, and between."""

    stages: int = 3
    out_stages: int = 2
    relays: int = 2


HOPPER: HopperConfig | None = HopperConfig()
"""On Hopper, for widths of 128; None is `pass_kernel`, as on all other GPUs."""


@triton.jit
def _exp(x, FAST: tl.constexpr):
    """Of numbers up to 0; FAST: results below 2**-126 become zeros, which saves three instructions of five."""
    return libdevice.fast_expf(x) if FAST else tl.exp(x)


@triton.jit
def _sum_and_last(sum_a, last_a, sum_b, last_b):
    return sum_a + sum_b, last_b


@triton.jit
def _last(a, b):
    return b


@triton.jit
def gates_of(b, a, A_log, dt_bias, gates, base, i, in_row, last, head, tokens, b_stride, a_stride, FAST: tl.constexpr):
    """Running sums G of a chunk's decays, its write strengths beta, and beta exp(G), fp32 [64]; stores the gates exp(G)
    and exp(G_last - G). `base` is the token of i = 0, `last` the i of the row's last token here."""
    token = base.to(tl.int64) + i
    write = tl.load(b + token * b_stride + head, mask=in_row, other=0).to(tl.float32)
    decay = tl.load(a + token * a_stride + head, mask=in_row, other=0).to(tl.float32)
    beta = tl.where(in_row, 1 / (1 + tl.exp(-write)), 0)
    decay = log_decay(decay, tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32))
    # What comes from a scan is handed on; all else the compiler would compute again in each layout that it is used in.
    total, beta = tl.associative_scan((tl.where(in_row, decay, 0), beta), 0, _sum_and_last)
    since = _exp(total, FAST)
    place = gates + 2 * (head.to(tl.int64) * tokens + token)
    tl.store(place, since, mask=in_row)
    # The last sum itself: another sum of the same decays could differ in its last digit.
    whole = tl.sum(tl.where(i == last, total, 0), 0)
    tl.store(place + 1, _exp(tl.where(in_row, whole - total, 0), FAST), mask=in_row)
    return total, beta, tl.associative_scan(beta * since, 0, _last)


@triton.jit
def inverse_of_chunk(
    asked, products, total, beta, strength, p_place, in_row, EXACT: tl.constexpr, FAST: tl.constexpr, SIZE: tl.constexpr
):
    """T and, for w, T exp(G), fp32 [64, 64], columns times beta, from q k^T and k k^T; stores P. `strength` is
    beta exp(G), SIZE as in `inverse_of`."""
    i = tl.arange(0, asked.shape[0])
    between = _exp(tl.minimum(total[:, None] - total[None, :], 0), FAST)
    between = tl.where(i[:, None] >= i[None, :], between, 0)
    product = asked * between
    tl.store(p_place, product.to(p_place.dtype.element_ty), mask=in_row[:, None])
    inverse = inverse_of(products * between * beta[:, None], SIZE, tl.float32 if EXACT else tl.float16)
    return inverse * beta[None, :], inverse * strength[None, :]


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    mixed,
    b,
    a,
    A_log,
    dt_bias,
    table,
    w,
    p,
    gates,
    tokens,
    b_stride,
    a_stride,
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    FAST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid [value heads, chunks]. Writes u over v. SIZE as in `inverse_of`."""
    C: tl.constexpr = 2 * KH * K + VH * V
    DOT: tl.constexpr = tl.float32 if EXACT else mixed.dtype.element_ty
    head = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    base = tl.load(entry + 1)
    first = tl.load(entry + 2)
    end = tl.load(entry + 3)
    if end == first:
        return
    i = tl.arange(0, CHUNK)
    in_row = (i >= first - base) & (i < end - base)
    wide = base.to(tl.int64)
    mixed += wide * C
    k_index = tl.arange(0, BK)
    v_index = tl.arange(0, BV)
    in_k = in_row[:, None] & (k_index < K)[None, :]
    in_v = in_row[:, None] & (v_index < V)[None, :]

    last = tl.minimum(end - base, CHUNK) - 1
    q_place = mixed + ((head // (VH // KH)) * K + i[:, None] * C + k_index[None, :])
    query = tl.load(q_place, mask=in_k, other=0).to(DOT)
    key = tl.load(q_place + KH * K, mask=in_k, other=0).to(DOT)
    total, beta, strength = gates_of(
        *(b, a, A_log, dt_bias, gates, base, i, in_row, last, head, tokens, b_stride, a_stride, FAST)
    )
    asked = tl.dot(query, tl.trans(key), input_precision="ieee")
    products = tl.dot(key, tl.trans(key), input_precision="ieee")
    p_place = p + wide * (VH * CHUNK) + ((i[:, None] * VH + head) * CHUNK + i[None, :])
    for_u, for_w = inverse_of_chunk(asked, products, total, beta, strength, p_place, in_row, EXACT, FAST, SIZE)

    v_place = mixed + (2 * KH * K + head * V + i[:, None] * C + v_index[None, :])
    value = tl.load(v_place, mask=in_v, other=0).to(DOT)
    u = tl.dot(for_u.to(DOT), value, input_precision="ieee")
    tl.store(v_place, u.to(mixed.dtype.element_ty), mask=in_v)
    # Loaded again: the registers that would keep it are those of the inversion.
    key = tl.load(q_place + KH * K, mask=in_k, other=0).to(DOT)
    corrected = tl.dot(for_w.to(DOT), key, input_precision="ieee")
    w_place = w + wide * (VH * K) + ((i[:, None] * VH + head) * K + k_index[None, :])
    tl.store(w_place, corrected.to(w.dtype.element_ty), mask=in_k)


@triton.jit(
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
    KH: tl.constexpr,
    VH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Grid [slices of V * value heads, rows], slices of a head side by side. `mixed` holds q, k and u."""
    C: tl.constexpr = 2 * KH * K + VH * V
    GROUP: tl.constexpr = VH // KH
    SLICES: tl.constexpr = (V + BW - 1) // BW
    DOT: tl.constexpr = tl.float32 if EXACT else mixed.dtype.element_ty
    head = tl.program_id(0) // SLICES
    row = tl.program_id(1)
    first = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if end == first:  # what would be read of its first token may lie behind the last of all
        return
    base = first - (tl.load(position + first) % CHUNK).to(tl.int32)
    count = (end - base + CHUNK - 1) // CHUNK

    i = tl.arange(0, CHUNK)
    k_index = tl.arange(0, BK)
    v_index = (tl.program_id(0) % SLICES) * BW + tl.arange(0, BW)
    in_k = k_index < K
    in_v = v_index < V
    state_place = (head * K + k_index[None, :]) * V + v_index[:, None]
    in_state = in_v[:, None] & in_k[None, :]
    slot = tl.load(read_slot + row_start + row)
    read = pool + tl.where(slot >= 0, slot, 0).to(tl.int64) * (VH * K * V)
    in_read = in_v[:, None] & (k_index < tl.where(slot >= 0, K, 0))[None, :]
    state = tl.load(read + state_place, mask=in_read, other=0).to(tl.float32)

    gates += 2 * head.to(tl.int64) * tokens
    pair = tl.arange(0, 2 * CHUNK)
    # What no product takes as it is comes a chunk ahead, in registers; gates as pairs, one number a thread.
    in_row = (i >= first - base) & (i < end - base)
    u_place = mixed + base.to(tl.int64) * C + (2 * KH * K + head * V + i[:, None] * C + v_index[None, :])
    out_place = out + base.to(tl.int64) * (VH * V) + (i[:, None] * (VH * V) + head * V + v_index[None, :])
    next_u = tl.load(u_place, mask=in_row[:, None] & in_v[None, :], other=0)
    next_gate = tl.load(gates + 2 * base + pair, (pair >= 2 * (first - base)) & (pair < 2 * (end - base)), other=0)
    last = tl.minimum(base + CHUNK, end) - 1
    next_whole = tl.load(gates + 2 * last)
    next_slot = tl.load(write_slot + last)
    for number in range(count):
        u, gate, whole, keep = next_u, next_gate, next_whole, next_slot
        start = base + (number + 1) * CHUNK
        next_gate = tl.load(gates + 2 * start + pair, mask=pair < 2 * (end - start), other=0)
        last = tl.minimum(start + CHUNK, end) - 1
        next_whole = tl.load(gates + 2 * last)
        next_slot = tl.load(write_slot + last)

        start = base + number * CHUNK
        in_row = (i >= first - start) & (i < end - start)
        in_key = in_row[:, None] & in_k[None, :]
        token = (start + i).to(tl.int64)
        q_place = mixed + token[:, None] * C + (head // GROUP) * K + k_index[None, :]
        corrected = tl.load(w + (token[:, None] * VH + head) * K + k_index[None, :], mask=in_key, other=0).to(DOT)
        query = tl.load(q_place, mask=in_key, other=0).to(DOT)
        key = tl.load(q_place + KH * K, mask=in_key, other=0).to(DOT)
        product = tl.load(p + (token[:, None] * VH + head) * CHUNK + i[None, :], in_row[:, None], other=0).to(DOT)

        done = (start - base).to(tl.int64)
        before = state.to(DOT)
        new = tl.trans(u).to(tl.float32) - tl.dot(before, tl.trans(corrected), input_precision="ieee")
        in_next = (i < end - start - CHUNK)[:, None] & in_v[None, :]
        next_u = tl.load(u_place + (done + CHUNK) * C, mask=in_next, other=0)
        from_start, to_end = tl.split(tl.reshape(gate, [CHUNK, 2]))
        o = tl.dot(before, tl.trans(query), input_precision="ieee") * from_start[None, :]
        state = tl.dot((new * to_end[None, :]).to(DOT), key, state * whole, input_precision="ieee")
        o = tl.dot(new.to(DOT), tl.trans(product), o, input_precision="ieee")
        # Said anew, lest the pipeline carry the loads' masks through its stages in registers.
        in_out = ((i > first - start - 1) & (i <= end - start - 1))[:, None] & in_v[None, :]
        tl.store(out_place + done * (VH * V), tl.trans(o.to(out.dtype.element_ty)), mask=in_out)
        if keep >= 0:
            kept = pool + keep.to(tl.int64) * (VH * K * V) + state_place
            tl.store(kept, state.to(pool.dtype.element_ty), mask=in_state)


def tile(k_dim: int, v_dim: int, device: torch.device) -> dict[str, Any]:
    """Of `pass_kernel`. A stage holds a chunk's w, q, k and P, 56 KB at widths of 128: three let a chunk's loads run
    behind the chunk before it, two only behind its end. Without Hopper's products a slice of 32 fits the registers."""
    found = properties(device)
    shared = found.shared_bytes
    return {
        "BK": max(16, triton.next_power_of_2(k_dim)),
        "BW": min(64 if found.is_hopper else 32, max(16, triton.next_power_of_2(v_dim))),
        "num_warps": 4,
        "num_stages": 3 if shared >= 200 << 10 else 2 if shared >= 128 << 10 else 1,
    }


def prepare_tile(programs: int, device: torch.device) -> dict[str, Any]:
    """Of `prepare_kernel`. Its products wait for each other, so that programs beside each other count: three fit a
    multiprocessor with 168 registers a thread. Two without a limit are faster where there are few (on an H200, 1,024
    tokens of 32 heads take 53 instead of 58 us with the pass). Blocks of 16 at once save NVIDIA's six products of ten
    and their barriers; AMD's warps are not as wide as such a block."""
    if torch.version.hip is not None:
        return {"SIZE": 2, "num_warps": 4}
    return {"SIZE": 16, "num_warps": 4, "maxnreg": 255 if programs < 5 * properties(device).num_sms else 168}


def chunk(
    mixed_TC: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
    state_pool_SVKD: Tensor,
    layout: Layout,
    segment: Segment,
) -> Tensor:
    """Outputs of the rule for one chunk segment, [tokens, Hv, V].

    mixed holds the segment's tokens only, contiguous: q and k of length 1, q scaled, and v, which is overwritten. b and
    a hold the step's, and may be views with a row stride.
    """
    v_heads, k_dim, v_dim = state_pool_SVKD.shape[1:]
    k_heads, tokens = (mixed_TC.shape[1] - v_heads * v_dim) // (2 * k_dim), mixed_TC.shape[0]
    dtype, device = mixed_TC.dtype, mixed_TC.device
    is_exact = device.type == "cpu"
    assert dtype in (torch.bfloat16, torch.float16) or is_exact, f"gated delta: chunks of {dtype}"
    table = layout.once(chunk_table, segment)
    w_TVK = torch.empty(tokens, v_heads, k_dim, dtype=dtype, device=device)
    p_TVC = torch.empty(tokens, v_heads, CHUNK, dtype=dtype, device=device)
    gates_VT2 = torch.empty(v_heads, tokens, 2, dtype=torch.float32, device=device)
    shapes = {"KH": k_heads, "VH": v_heads, "K": k_dim, "V": v_dim, "CHUNK": CHUNK, "EXACT": is_exact}
    prepare_kernel[(v_heads, table.shape[0])](
        mixed_TC,
        segment.cut(b_TV),
        segment.cut(a_TV),
        A_log_V,
        dt_bias_V,
        table,
        w_TVK,
        p_TVC,
        gates_VT2,
        tokens,
        b_TV.stride(0),
        a_TV.stride(0),
        **shapes,
        BK=max(16, triton.next_power_of_2(k_dim)),
        BV=max(16, triton.next_power_of_2(v_dim)),
        FAST=fast_way(mixed_TC),
        num_stages=1,
        **prepare_tile(v_heads * table.shape[0], device),
    )
    out_TVD = torch.empty(tokens, v_heads, v_dim, dtype=dtype, device=device)
    if HOPPER is not None and (k_dim, v_dim) == (128, 128) and properties(device).is_hopper:
        from deltaserve.ops.gated_delta.triton_hopper import pass_chunks

        pass_chunks(mixed_TC, w_TVK, p_TVC, gates_VT2, state_pool_SVKD, out_TVD, layout, segment, HOPPER)
        return out_TVD
    options = tile(k_dim, v_dim, device)
    slices = triton.cdiv(v_dim, options["BW"])
    pass_kernel[(slices * v_heads, segment.row_end - segment.row_start)](
        mixed_TC,
        w_TVK,
        p_TVC,
        gates_VT2,
        state_pool_SVKD,
        segment.cu_seqlens,
        segment.cut(layout.position),
        layout.read_slot,
        segment.cut(layout.write_slot),
        out_TVD,
        tokens,
        segment.row_start,
        **shapes,
        **options,
    )
    return out_TVD
