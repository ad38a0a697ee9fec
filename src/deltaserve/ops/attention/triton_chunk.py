"""Attention of chunks of prompts over keys and values in blocks, on a GPU. Knows rows of any length, one behind the
other, and the output gate; knows no model.

A program takes a tile of consecutive tokens of one row with all query heads of one key head, so that the 128 queries of
a tile span 16 tokens (of 8 heads) and nearly nothing is computed beyond the diagonal; it walks the context in blocks.
Only the blocks at the diagonal are masked. Where a tile belongs is found on the device: row r of tokens cu[r] to
cu[r + 1] - 1 owns the tiles from cu[r] // tile + r on, which leaves at most one unused tile a row, so that the grid
depends on tokens and rows only. The longest tiles start first.

Operations: 4 * D per query, head and key seen. Bytes hardly count: a key is read once per 128 queries, from the cache.

Variants: heads, widths, dtypes, whether the first key is hidden. Numbers of rows, tokens and lengths are none.

Shape letters: T tokens, H query heads, G key heads, D head width, M queries of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import Properties, properties
from deltaserve.ops.layout import BLOCK, Layout, Segment


class ChunkConfig(NamedTuple):
    queries: int
    """M: tokens times query heads per key head."""
    keys: int
    """Of one turn of the loop; divides a block."""
    warps: int
    stages: int


class HopperConfig(NamedTuple):
    """Of the kernel in `triton_hopper`, which says what these are for."""

    key_stages: int = 2
    value_stages: int = 2
    """Buffers for blocks of keys and of values, 32 KiB each at a width of 256; 5 in all fit beside the queries."""
    slack: int = 0
    """By how many powers of two a maximum may lag behind; 0: none."""
    held: int = 0
    """Columns of the queries that stay in registers; 0: none. Products of queries and keys take what shared memory
    gives, and half of that are queries."""
    least: int = 24
    """Blocks less that a program must walk, where tiles of a short piece are cut for their long context; 0: none is
    cut. On an H200 a layer takes 20 to 50 us instead of 50 to 430 for 32 to 64 tokens behind 2,048 to 20,000."""


HOPPER: HopperConfig | None = HopperConfig(slack=8, held=64)
"""What heads of 256 that `fit_hopper` use on such a GPU; None: the kernel of this file. On an H200 that takes 1.14
instead of 0.80 ms for 8,192 tokens of the 80B, and 7.8 instead of 5.3 behind 24,576 others."""


def fit_hopper(q_THD: Tensor, kv_pool: Tensor) -> bool:
    """Whether `triton_hopper` takes such heads: a power of two from 64 to 256 wide, of 16 bits as the pool's."""
    num_kv, width = kv_pool.shape[3:]
    is_alike = q_THD.element_size() == 2 and q_THD.dtype == kv_pool.dtype
    return width in (64, 128, 256) and q_THD.shape[1] // num_kv <= 128 and is_alike


def choose(device: Properties, width: int, element_size: int) -> ChunkConfig:
    if element_size == 4:  # no matrix units: products are made of registers
        return ChunkConfig(16, 16, 4, 1) if width > 128 else ChunkConfig(32, 32, 4, 1)
    if width <= 128:
        return ChunkConfig(64, 64, 4, 2) if device.shared_bytes >= 100 << 10 else ChunkConfig(64, 32, 4, 1)
    if device.is_hopper:  # 64 KiB of queries, twice 64 KiB of keys and values, 128 registers of sums
        return ChunkConfig(128, 64, 8, 2)
    if device.shared_bytes >= 128 << 10:
        return ChunkConfig(64, 32, 4, 2)
    return ChunkConfig(64, 32, 4, 1)


@triton.jit
def _attend(
    q,
    acc,
    peak,
    total,
    pool_ptr,
    plane_stride,
    table_ptr,
    start,
    end,
    position,
    context,
    first_key,
    log_scale,
    ENTRY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Takes the keys from `start` (a multiple of KEYS) to `end` into the running maximum, sum and product."""
    offset = tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK_D)
    # The number of the next block is read a turn ahead: its trip to memory is not in the way of the keys'.
    block = tl.load(table_ptr + start // BLOCK, mask=start < end, other=0)
    for key0 in range(start, end, KEYS):
        at = (tl.maximum(block, 0).to(tl.int64) * BLOCK + key0 % BLOCK) * ENTRY
        after = key0 + KEYS
        block = tl.load(table_ptr + after // BLOCK, mask=after < end, other=0)
        key = key0 + offset
        at_k = pool_ptr + at + offset[None, :] * ENTRY + column[:, None]
        at_v = pool_ptr + plane_stride + at + offset[:, None] * ENTRY + column[None, :]
        is_there = (key < context) & (key >= first_key)
        if IS_MASKED:
            k = tl.load(at_k, mask=is_there[None, :] & (column < WIDTH)[:, None], other=0.0)
        elif WIDTH == BLOCK_D:
            k = tl.load(at_k)
        else:
            k = tl.load(at_k, mask=(column < WIDTH)[:, None], other=0.0)
        k = k.to(tl.float32) if UPCAST else k.to(q.dtype)
        score = tl.dot(q, k, input_precision="ieee")
        if IS_MASKED:
            seen = is_there[None, :] & (key[None, :] <= position[:, None])
            score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * log_scale)
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score * log_scale - safe_peak[:, None])
        fade = tl.exp2(peak - safe_peak)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if IS_MASKED:
            v = tl.load(at_v, mask=is_there[:, None] & (column < WIDTH)[None, :], other=0.0)
        elif WIDTH == BLOCK_D:
            v = tl.load(at_v)
        else:
            v = tl.load(at_v, mask=(column < WIDTH)[None, :], other=0.0)
        v = v.to(tl.float32) if UPCAST else v.to(q.dtype)
        acc = tl.dot(weight.to(q.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "scale"],
    do_not_specialize_on_alignment=["cu_ptr", "table_ptr", "context_ptr", "first_key_ptr"],
)
def chunk_kernel(
    q_ptr,
    gate_ptr,
    pool_ptr,
    cu_ptr,
    table_ptr,
    context_ptr,
    first_key_ptr,
    out_ptr,
    num_rows,
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
    HAS_FIRST_KEY: tl.constexpr,
    HAS_GATE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """q [T, H, D] and out the same, of the segment; cu int32 [rows + 1]."""
    TILE: tl.constexpr = BLOCK_M // BLOCK_P
    group = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # The last row whose tiles start at this tile or before: between `row` and `behind` - 1.
    row = tl.zeros((), tl.int32)
    behind = tl.zeros((), tl.int32) + num_rows
    while behind - row > 1:
        middle = (row + behind) // 2
        is_after = tl.load(cu_ptr + middle) // TILE + middle > tile
        behind = tl.where(is_after, middle, behind)
        row = tl.where(is_after, row, middle)
    first_token = tl.load(cu_ptr + row)
    length = tl.load(cu_ptr + row + 1) - first_token
    first = (tile - first_token // TILE - row) * TILE
    if first >= length:
        return
    context = tl.load(context_ptr + row)

    m = tl.arange(0, BLOCK_M)
    token = first + m // BLOCK_P
    head = m % BLOCK_P
    column = tl.arange(0, BLOCK_D)
    mask = ((token < length) & (head < SHARING))[:, None] & (column < WIDTH)[None, :]
    at = (first_token + token).to(tl.int64)
    at_query = (at * NUM_Q + group * SHARING + head)[:, None] * WIDTH + column[None, :]
    q = tl.load(q_ptr + at_query, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    position = context - length + token
    log_scale = scale * 1.4426950408889634
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table_ptr += row.to(tl.int64) * table_stride
    pool_ptr += group * WIDTH

    # All keys of [past_first, diagonal) are seen by all tokens of the tile; those around it are masked.
    diagonal = tl.maximum(context - length + first + 1, 0) // KEYS * KEYS
    end = tl.minimum(context - length + first + TILE, context)
    first_key = tl.zeros((), tl.int32)
    past_first = tl.zeros((), tl.int32)
    if HAS_FIRST_KEY:
        first_key = tl.load(first_key_ptr + row)
        begin = tl.minimum(first_key // KEYS * KEYS, diagonal)
        past_first = tl.minimum(begin + KEYS, diagonal)
        acc, peak, total = _attend(
            q, acc, peak, total, pool_ptr, plane_stride, table_ptr, begin, past_first, position, context, first_key,
            log_scale, NUM_KV * WIDTH, WIDTH, BLOCK_D, KEYS, BLOCK, True, UPCAST,
        )  # fmt: skip
    acc, peak, total = _attend(
        q, acc, peak, total, pool_ptr, plane_stride, table_ptr, past_first, diagonal, position, context, first_key,
        log_scale, NUM_KV * WIDTH, WIDTH, BLOCK_D, KEYS, BLOCK, False, UPCAST,
    )  # fmt: skip
    acc, peak, total = _attend(
        q, acc, peak, total, pool_ptr, plane_stride, table_ptr, diagonal, end, position, context, first_key,
        log_scale, NUM_KV * WIDTH, WIDTH, BLOCK_D, KEYS, BLOCK, True, UPCAST,
    )  # fmt: skip

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_GATE:
        at_gate = at * gate_stride + (group * SHARING + head) * WIDTH
        gate = tl.load(gate_ptr + at_gate[:, None] + column[None, :], mask=mask, other=0.0)
        out = out / (1.0 + tl.exp(-gate.to(tl.float32)))
    out = tl.where((total == 0.0)[:, None], 0.0, out)  # also where the gate of a padding row is NaN
    tl.store(out_ptr + at_query, out.to(out_ptr.dtype.element_ty), mask=mask)


def chunk(
    q_THD: Tensor,
    gate_TX: Tensor | None,
    out_THD: Tensor,
    kv_pool: Tensor,
    layout: Layout,
    segment: Segment,
    scale: float,
    config: ChunkConfig | HopperConfig | None = None,
) -> None:
    """Writes the segment's tokens of `out` [T, H, D]; q is the same shape, both contiguous; gate [T, H * D] before its
    sigmoid, or None. Keys and values of the step are in the pool already. Scores and sums are fp32.
    """
    num_kv, width = kv_pool.shape[3:]
    num_q = q_THD.shape[1]
    sharing = num_q // num_kv
    block_p = triton.next_power_of_2(sharing)
    block_d = max(16, triton.next_power_of_2(width))
    if config is None:
        device = properties(q_THD.device)
        goes_there = HOPPER is not None and device.is_hopper and fit_hopper(q_THD, kv_pool)
        on_hopper = HOPPER if width == 256 else HopperConfig()
        config = on_hopper if goes_there else choose(device, block_d, q_THD.element_size())
    if isinstance(config, HopperConfig):
        from deltaserve.ops.attention.triton_hopper import chunk as chunk_on_hopper

        chunk_on_hopper(q_THD, gate_TX, out_THD, kv_pool, layout, segment, scale, config)
        return
    assert config is not None
    block_m = max(config.queries, block_p)
    rows = segment.row_end - segment.row_start
    q_THD, out_THD = segment.cut(q_THD), segment.cut(out_THD)
    has_gate = gate_TX is not None
    gate_TX = segment.cut(gate_TX) if gate_TX is not None else out_THD
    table = layout.block_table[segment.row_start :]
    context = layout.context_len[segment.row_start :]
    first_key = context if layout.first_key is None else layout.first_key[segment.row_start :]
    chunk_kernel[(num_kv, q_THD.shape[0] // (block_m // block_p) + rows)](
        q_THD, gate_TX, kv_pool, segment.cu_seqlens, table, context, first_key, out_THD,
        rows, table.stride(0), gate_TX.stride(0), kv_pool.stride(0), scale,
        NUM_Q=num_q, NUM_KV=num_kv, WIDTH=width, SHARING=sharing,
        BLOCK_P=block_p, BLOCK_M=block_m, BLOCK_D=block_d, KEYS=config.keys, BLOCK=BLOCK,
        HAS_FIRST_KEY=layout.first_key is not None, HAS_GATE=has_gate, UPCAST=not q_THD.is_cuda,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
