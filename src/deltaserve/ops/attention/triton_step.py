"""Attention of rows with few tokens over long contexts, on a GPU: contexts are cut into units of equal work.

Knows blocks, contexts and the output gate; knows no model. The time is that of reading keys and values once, so the
card must be full whatever the contexts are. All blocks of all rows are counted on the device and shared out: a unit is
`share` blocks of one row, `share` such that all rows together make about `UNITS` units per multiprocessor. One request
of a quarter million tokens fills the card, and so do a hundred short ones. The grid is as large as the units can be:
it depends on the number of rows and the table's width; programs beyond the last unit end at once. A row of one unit is
finished where it is computed; of other rows each unit leaves its running maximum, sum and product in fp32, and a second
launch joins them. All query heads of a key head share a program, which is what lets keys be read once.

Bytes: keys and values of the contexts once; for rows of several units 2 x 4 bytes per unit, head and dimension.

Variants: the power of two that holds tokens * heads per key head (16 to 128), heads, widths, dtypes, and whether
keys are missing at the start. Numbers of rows
and of their tokens and lengths of contexts and tables are none.

Shape letters: T tokens, H query heads, G key heads, D head width, B rows, L tokens of a row, U units, M queries of a
unit (tokens times query heads per key head).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.attention.triton_join import add_parts
from deltaserve.ops.gpu import Properties, properties
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs

UNITS = 4
"""Units of work per multiprocessor that all key heads together are cut into."""
FEW_TOKENS = 8


class StepConfig(NamedTuple):
    keys: int
    """Keys of one turn of the loop; divides a block."""
    warps: int
    stages: int
    units: int = UNITS


def choose(device: Properties, queries: int, width: int, element_size: int) -> StepConfig:
    """`queries`: M, padded. Keys and values of a stage are 2 * keys * width * element_size bytes of shared memory."""
    if element_size == 4:
        return StepConfig(16 if width > 128 else 32, 4, 1)
    if device.shared_bytes < 128 << 10:
        return StepConfig(32, 4, 1)
    # Fastest of ten on an H200 from one row of 640 keys to 128 rows of 4,096 (docs/LOG.md).
    if device.shared_bytes >= 200 << 10 and queries <= 32:
        return StepConfig(64, 8, 2)
    return StepConfig(32, 4 if queries <= 32 else 8, 2)


def join_tile(tokens: int, block_d: int) -> tuple[int, int]:
    """Dimensions and units of a program that joins. A turn of its loop takes some 3 us: few tokens have many units,
    and leave room for many programs, which take them all in one or two turns. From 16 tokens on that is slower."""
    return (min(block_d, 32), 128) if tokens <= FEW_TOKENS else (block_d, 16)


@triton.jit
def units_of(context, share, BLOCK: tl.constexpr):
    return tl.cdiv(tl.cdiv(context, BLOCK), share)


@triton.jit
def share_of(context_ptr, num_rows, target, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Blocks of a unit: all blocks over `target` units."""
    total = tl.zeros((), tl.int32)
    for first in range(0, num_rows, SPAN):
        row = first + tl.arange(0, SPAN)
        context = tl.load(context_ptr + row, mask=row < num_rows, other=0)
        total += tl.sum(tl.cdiv(context, BLOCK))
    return tl.maximum(tl.cdiv(total, target), 1)


@triton.jit(
    do_not_specialize=["num_rows", "target", "length", "table_stride", "scale"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "first_key_ptr"],
)
def step_kernel(
    q_ptr,
    gate_ptr,
    pool_ptr,
    table_ptr,
    context_ptr,
    first_key_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    num_rows,
    target,
    length,
    table_stride,
    gate_stride,
    plane_stride,
    scale,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_FIRST_KEY: tl.constexpr,
    HAS_GATE: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """q [B * L, H, D]; out the same; acc [U, L, H, D] fp32: the product not normalised; peak [U, L, H, 2] fp32: the
    maximum and the sum."""
    let_next_start(EARLY)
    group = tl.program_id(0)
    unit = tl.program_id(1)
    share = share_of(context_ptr, num_rows, target, BLOCK, SPAN)
    row = tl.zeros((), tl.int32)
    first_unit = tl.zeros((), tl.int32)
    found = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for first in range(0, num_rows, SPAN):
        rows = first + tl.arange(0, SPAN)
        units = units_of(tl.load(context_ptr + rows, mask=rows < num_rows, other=0), share, BLOCK)
        ends = before + tl.cumsum(units, 0)
        hit = (ends > unit) & (ends - units <= unit)
        row += tl.sum(tl.where(hit, rows, 0))
        first_unit += tl.sum(tl.where(hit, ends - units, 0))
        found += tl.sum(hit.to(tl.int32))
        before += tl.sum(units)
    wait_for_inputs(EARLY)
    if found == 0:
        return
    context = tl.load(context_ptr + row)
    num_units = units_of(context, share, BLOCK)
    # The row's blocks spread evenly over its units.
    per_unit = tl.cdiv(tl.cdiv(context, BLOCK), num_units)
    low = (unit - first_unit) * per_unit * BLOCK
    high = tl.minimum(low + per_unit * BLOCK, context)
    first_key = tl.minimum(num_rows, 0)  # not a constant: with the comparison ptxas spills nothing, without it does
    if HAS_FIRST_KEY:
        first_key = tl.load(first_key_ptr + row)

    m = tl.arange(0, BLOCK_M)
    token = m // BLOCK_P
    head = m % BLOCK_P
    is_query = (token < length) & (head < SHARING)
    column = tl.arange(0, BLOCK_D)
    inside = column < WIDTH
    at_query = (token * NUM_Q + group * SHARING + head) * WIDTH
    mask_query = is_query[:, None] & inside[None, :]
    first_query = row.to(tl.int64) * length * (NUM_Q * WIDTH)
    q = tl.load(q_ptr + first_query + at_query[:, None] + column[None, :], mask=mask_query, other=0.0)
    last_seen = context - length + token
    log_scale = scale * 1.4426950408889634
    if UPCAST:
        q = q.to(tl.float32)

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table_ptr += row.to(tl.int64) * table_stride
    offset = tl.arange(0, KEYS)
    entry: tl.constexpr = NUM_KV * WIDTH
    pool_ptr += group * WIDTH
    # The number of the next block is read a turn ahead: its trip to memory is not in the way of the keys'.
    block = tl.load(table_ptr + low // BLOCK, mask=low < high, other=0)
    for start in range(low, high, KEYS):
        key = start + offset
        at = (tl.maximum(block, 0).to(tl.int64) * BLOCK + start % BLOCK) * entry
        after = start + KEYS
        block = tl.load(table_ptr + after // BLOCK, mask=after < high, other=0)
        is_there = (key < high) & (key >= first_key)
        at_k = pool_ptr + at + offset[None, :] * entry + column[:, None]
        k = tl.load(at_k, mask=is_there[None, :] & inside[:, None], other=0.0).to(q_ptr.dtype.element_ty)
        if UPCAST:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision="ieee") * log_scale
        seen = is_there[None, :] & (key[None, :] <= last_seen[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe_peak[:, None])
        fade = tl.exp2(peak - safe_peak)
        total = total * fade + tl.sum(weight, 1)
        at_v = pool_ptr + plane_stride + at + offset[:, None] * entry + column[None, :]
        v = tl.load(at_v, mask=is_there[:, None] & inside[None, :], other=0.0).to(q_ptr.dtype.element_ty)
        weight = weight.to(q_ptr.dtype.element_ty)
        if UPCAST:
            v = v.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    if num_units == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if HAS_GATE:
            first_gate = (row.to(tl.int64) * length + token) * gate_stride + (group * SHARING + head) * WIDTH
            gate = tl.load(gate_ptr + first_gate[:, None] + column[None, :], mask=mask_query, other=0.0)
            out = out / (1.0 + tl.exp(-gate.to(tl.float32)))
        out = tl.where((total == 0.0)[:, None], 0.0, out)
        to = out_ptr + first_query + at_query[:, None] + column[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask_query)
    else:
        first_part = unit.to(tl.int64) * length * NUM_Q
        tl.store(acc_ptr + first_part * WIDTH + at_query[:, None] + column[None, :], acc, mask=mask_query)
        to_peak = peak_ptr + (first_part + token * NUM_Q + group * SHARING + head) * 2
        tl.store(to_peak, peak, mask=is_query)
        tl.store(to_peak + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["num_rows", "target", "length"], do_not_specialize_on_alignment=["context_ptr"])
def join_kernel(
    gate_ptr,
    context_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    num_rows,
    target,
    length,
    gate_stride,
    NUM_Q: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program joins the units of one token and head, SLICE dimensions of PARTS units at a time; zeros for a row
    without a context."""
    let_next_start(EARLY)
    head = tl.program_id(0)
    token = tl.program_id(1)
    own = token // length
    column = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    inside = column < WIDTH
    # Asked for first, so that one trip to memory serves all that depends on nothing.
    context = tl.load(context_ptr + own)
    wait_for_inputs(EARLY)
    if HAS_GATE:
        gate = tl.load(gate_ptr + token.to(tl.int64) * gate_stride + head * WIDTH + column, mask=inside, other=0.0)
    share = share_of(context_ptr, num_rows, target, BLOCK, SPAN)
    num_units = units_of(context, share, BLOCK)
    if num_units == 1:
        return
    first_unit = tl.zeros((), tl.int32)
    for first in range(0, own, SPAN):
        rows = first + tl.arange(0, SPAN)
        first_unit += tl.sum(units_of(tl.load(context_ptr + rows, mask=rows < own, other=0), share, BLOCK))
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((SLICE,), tl.float32)
    for first in range(0, num_units, PARTS):
        part = first + tl.arange(0, PARTS)
        is_part = part < num_units
        at = ((first_unit + part).to(tl.int64) * length + token % length) * NUM_Q + head
        peaks = tl.load(peak_ptr + at * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(peak_ptr + at * 2 + 1, mask=is_part, other=0.0)
        mask = is_part[:, None] & inside[None, :]
        accs = tl.load(acc_ptr + at[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        peak, total, acc = add_parts(peak, total, acc, peaks, totals, accs)
    out = acc / tl.where(total == 0.0, 1.0, total)
    if HAS_GATE:
        out = out / (1.0 + tl.exp(-gate.to(tl.float32)))
    out = tl.where(total == 0.0, 0.0, out)  # also where the gate of a padding row is NaN
    to = out_ptr + (token.to(tl.int64) * NUM_Q + head) * WIDTH + column
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside)


def step(
    q_THD: Tensor,
    gate_TX: Tensor | None,
    out_THD: Tensor,
    kv_pool: Tensor,
    layout: Layout,
    segment: Segment,
    scale: float,
    config: StepConfig | None = None,
) -> None:
    """Writes the segment's tokens of `out` [T, H, D]; q is the same shape, both contiguous; gate [T, H * D] before its
    sigmoid, or None. Keys and values of the step are in the pool already. Scores and sums are fp32.
    """
    num_kv, width = kv_pool.shape[3:]
    num_q, length = q_THD.shape[1], segment.max_len
    sharing = num_q // num_kv
    block_p = triton.next_power_of_2(sharing)
    block_m = max(16, triton.next_power_of_2(length * block_p))
    block_d = max(16, triton.next_power_of_2(width))
    device = properties(q_THD.device)
    config = config or choose(device, block_m, block_d, q_THD.element_size())
    rows = segment.row_end - segment.row_start
    target = max(1, config.units * device.num_sms // num_kv)
    table = layout.block_table[segment.row_start :]
    max_units = min(target, rows * table.shape[1]) + rows
    # One piece: product, then maximum and sum of every unit, token and head.
    parts = torch.empty(max_units * length * num_q * (width + 2), dtype=torch.float32, device=q_THD.device)
    acc, peak = parts[: max_units * length * num_q * width], parts[max_units * length * num_q * width :]
    q_THD, out_THD = segment.cut(q_THD), segment.cut(out_THD)
    gate_TX = out_THD if gate_TX is None else segment.cut(gate_TX)
    has_gate = gate_TX is not out_THD
    context = layout.context_len[segment.row_start :]
    first_key = context if layout.first_key is None else layout.first_key[segment.row_start :]
    early = early_options(q_THD.device)
    step_kernel[(num_kv, max_units)](
        q_THD, gate_TX, kv_pool, table, context, first_key, out_THD, acc, peak,
        rows, target, length, table.stride(0), gate_TX.stride(0), kv_pool.stride(0), scale,
        NUM_Q=num_q, NUM_KV=num_kv, WIDTH=width, SHARING=sharing,
        BLOCK_P=block_p, BLOCK_M=block_m, BLOCK_D=block_d, KEYS=config.keys, BLOCK=BLOCK, SPAN=128,
        HAS_FIRST_KEY=layout.first_key is not None, HAS_GATE=has_gate, UPCAST=not q_THD.is_cuda,
        num_warps=config.warps, num_stages=config.stages, **early,
    )  # fmt: skip
    slice, parts = join_tile(rows * length, block_d)
    join_kernel[(num_q, rows * length, triton.cdiv(width, slice))](
        gate_TX, context, out_THD, acc, peak, rows, target, length, gate_TX.stride(0),
        NUM_Q=num_q, WIDTH=width, SLICE=slice, PARTS=parts, BLOCK=BLOCK, SPAN=128, HAS_GATE=has_gate,
        num_warps=4, **early,
    )  # fmt: skip
