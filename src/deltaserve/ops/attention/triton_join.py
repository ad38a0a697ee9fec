"""Attention of short pieces of prompts over long contexts: when their tiles are cut into parts, and how parts are put
together. `triton_hopper` computes the parts. Knows blocks of a context; knows neither keys nor values.

How many parts a tile has depends on the rows' lengths and contexts alone, so that padding changes no bit: all tiles of
rows with a context get as many as give every multiprocessor one part, or two where that is much more even; fewer where
contexts are short, since a part more costs as much as a block; and one where fewer than `least` blocks would be
saved (on an H200 two launches and their sums cost as much as 24 blocks). A tile in one part is finished where it is
computed.

Bytes: 2 x 4 per part, query and dimension.

Shape letters: T tokens, H query heads, D head width, U units (parts of tiles), M queries of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import BLOCK, Segment
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs


def target_of(device: torch.device, num_kv: int) -> int:
    """Parts of each key head that fill the card once."""
    return max(1, properties(device).num_sms // num_kv)


def is_cut(tiles: int, target: int) -> bool:
    """Whether a step of so many tiles, padding included, may have tiles that `parts_of` gives several parts: those are
    up to two thirds of `target`, and a graph may hold a quarter more than it is used for."""
    return 8 * tiles <= 7 * target


@triton.jit
def parts_of(tiles, target):
    """The most parts of a tile, where so many have a context."""
    tiles = tl.maximum(tiles, 1)
    once, twice = target // tiles, 2 * target // tiles
    return tl.where((once < 4) & (twice > 2 * once), twice, once)


@triton.jit
def share_of(most, blocks, least):
    """Parts of a tile of a row with so many blocks."""
    share = tl.minimum(tl.minimum(most, blocks // tl.maximum(least // 6, 1)), 8 + blocks // 32)
    return tl.where(blocks * (share - 1) >= least * share, tl.maximum(share, 1), 1)


@triton.jit
def add_parts(peak, total, acc, peaks, totals, accs):
    """Maximum, sum and product [D] of a query, with those of P more parts: [P], [P] and [P, D]."""
    new_peak = tl.maximum(peak, tl.max(peaks, 0))
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(peaks - safe_peak)
    fade = tl.exp2(peak - safe_peak)
    total = total * fade + tl.sum(totals * weights, 0)
    return new_peak, total, acc * fade + tl.sum(accs * weights[:, None], 0)


@triton.jit(
    do_not_specialize=["num_rows", "target", "least"],
    do_not_specialize_on_alignment=["cu_ptr", "context_ptr"],
)
def join_kernel(
    gate_ptr,
    cu_ptr,
    context_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    num_rows,
    target,
    least,
    gate_stride,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_GATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token and head of a program. acc [U, G, M, D] fp32: the product not normalised; peak [U, G, M, 2] fp32: the
    maximum, in powers of two, and the sum. Units are counted row by row, tile by tile."""
    let_next_start(EARLY)
    TILE: tl.constexpr = QUERIES // BLOCK_P
    SHARING: tl.constexpr = NUM_Q // NUM_KV
    head = tl.program_id(0)
    token = tl.program_id(1)
    tiles = tl.zeros((), tl.int32)
    own = tl.zeros((), tl.int32) - 1
    for first in range(0, num_rows, SPAN):
        row = first + tl.arange(0, SPAN)
        start = tl.load(cu_ptr + row, mask=row < num_rows, other=0)
        length = tl.load(cu_ptr + row + 1, mask=row < num_rows, other=0) - start
        context = tl.load(context_ptr + row, mask=row < num_rows, other=0)
        tiles += tl.sum(tl.where(context > 0, tl.cdiv(length, TILE), 0))
        own += tl.sum(((row < num_rows) & (start <= token)).to(tl.int32))
    most = parts_of(tiles, target)
    parts = tl.zeros((), tl.int32)
    unit = tl.zeros((), tl.int32)
    for first in range(0, num_rows, SPAN):
        row = first + tl.arange(0, SPAN)
        start = tl.load(cu_ptr + row, mask=row < num_rows, other=0)
        length = tl.load(cu_ptr + row + 1, mask=row < num_rows, other=0) - start
        context = tl.load(context_ptr + row, mask=row < num_rows, other=0)
        share = share_of(most, tl.cdiv(context, BLOCK), least)
        unit += tl.sum(tl.where(row < own, tl.cdiv(length, TILE) * share, 0))
        parts += tl.sum(tl.where(row == own, share, 0))
    place = token - tl.load(cu_ptr + own)
    wait_for_inputs(EARLY)
    if parts == 1:
        return
    unit += place // TILE * parts
    query = head // SHARING * QUERIES + place % TILE * BLOCK_P + head % SHARING
    column = tl.arange(0, WIDTH)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (unit + part).to(tl.int64) * (NUM_KV * QUERIES) + query
        peaks = tl.load(peak_ptr + at * 2, mask=part < parts, other=float("-inf"))
        totals = tl.load(peak_ptr + at * 2 + 1, mask=part < parts, other=0.0)
        sees = totals > 0  # of others no product was written
        accs = tl.load(acc_ptr + at[:, None] * WIDTH + column[None, :], mask=sees[:, None], other=0.0)
        peak, total, acc = add_parts(peak, total, acc, peaks, totals, accs)
    out = acc / tl.where(total == 0.0, 1.0, total)
    if HAS_GATE:
        gate = tl.load(gate_ptr + token.to(tl.int64) * gate_stride + head * WIDTH + column)
        out = out / (1.0 + tl.exp(-gate.to(tl.float32)))
    out = tl.where(total == 0.0, 0.0, out)  # also where the gate of a token without keys is NaN
    tl.store(out_ptr + (token.to(tl.int64) * NUM_Q + head) * WIDTH + column, out.to(out_ptr.dtype.element_ty))


def allocate(units: int, num_kv: int, queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """acc [U, G, M, D] and peak [U, G, M, 2], fp32, in one piece of memory."""
    rows = units * num_kv * queries
    memory = torch.empty(rows * (width + 2), dtype=torch.float32, device=device)
    return memory[: rows * width], memory[rows * width :]


def join(
    gate_TX: Tensor | None,
    out_THD: Tensor,
    acc: Tensor,
    peak: Tensor,
    segment: Segment,
    context: Tensor,
    *,
    num_kv: int,
    queries: int,
    target: int,
    least: int,
) -> None:
    """Writes the tokens of `out` [T, H, D], of the segment, whose tiles have several parts. `gate` as `chunk` takes it,
    `context` int32 [rows]."""
    tokens, num_q, width = out_THD.shape
    gate = out_THD if gate_TX is None else gate_TX
    join_kernel[(num_q, tokens)](
        gate, segment.cu_seqlens, context, out_THD, acc, peak,
        segment.row_end - segment.row_start, target, least, gate.stride(0),
        NUM_Q=num_q, NUM_KV=num_kv, WIDTH=width, BLOCK_P=triton.next_power_of_2(num_q // num_kv), QUERIES=queries,
        PARTS=16, BLOCK=BLOCK, SPAN=128, HAS_GATE=gate_TX is not None, num_warps=4,
        **early_options(out_THD.device, tokens=tokens),
    )  # fmt: skip
