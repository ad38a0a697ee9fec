"""The causal convolution of rows of any length, on a GPU. Knows no more of its channels than which to normalise.

Two launches. The first copies the windows that rows start from, zeros for a row that starts from none: a window may be
kept in the slot that it was read from, by a program that computes other tokens of the row. The second computes tiles of
64 tokens by one head's channels: every input is read once from memory and as often as there are taps from the nearest
cache, and written once; the copied windows serve the first tokens of a row. A tile's shifted inputs are also the
windows after its tokens, so that whoever keeps one stores what it has already loaded.

For a gated delta net the tile is as wide as a head, and queries and keys leave with length 1 (queries scaled), which
saves the kernels after it from doing so.

A kernel variant follows from the number of channels and taps, the heads' widths, and the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.conv.chunks import CHUNK, chunk_table
from deltaserve.ops.layout import Layout, Segment


@triton.jit(do_not_specialize=["row_start"], do_not_specialize_on_alignment=["read_slot"])
def window_kernel(pool, read_slot, windows, row_start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid [rows, pieces of a window]: windows[row] = pool[read_slot[row]]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(read_slot + row_start + row)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = pool + tl.where(slot >= 0, slot, 0).to(tl.int64) * SIZE + place
    part = tl.load(source, mask=place < tl.where(slot >= 0, SIZE, 0), other=0)
    tl.store(windows + row * SIZE + place, part, mask=place < SIZE)


@triton.jit(do_not_specialize_on_alignment=["write_slot"])
def conv_kernel(
    x,
    weight,
    windows,
    pool,
    write_slot,
    table,
    out,
    x_stride,
    channel_stride,
    tap_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    CHUNK: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid [tiles of channels, chunks]. Of the first 2 * HEADS tiles, WIDTH channels wide, the rows leave with length
    1, and those of the first HEADS are divided by sqrt(WIDTH); the other tiles are REST wide."""
    tile = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    row = tl.load(entry).to(tl.int64)
    base = tl.load(entry + 1)
    first = tl.load(entry + 2)
    end = tl.load(entry + 3)
    if end == first:
        return
    is_head = tile < 2 * HEADS
    low = tl.where(is_head, tile * WIDTH, 2 * HEADS * WIDTH + (tile - 2 * HEADS) * REST)
    high = tl.minimum(low + tl.where(is_head, WIDTH, REST), C)
    channel = low + tl.arange(0, BC)
    in_channel = channel < high
    token = base + tl.arange(0, CHUNK)
    in_row = (token >= first) & (token < end)
    keep = tl.load(write_slot + token, mask=in_row, other=-1)
    keeps_any = tl.max(keep, 0) >= 0
    is_start = base < first + TAPS - 1

    total = tl.zeros([CHUNK, BC], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        in_x = (in_row & (source >= first))[:, None] & in_channel[None, :]
        part = tl.load(x + source.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=in_x, other=0)
        if is_start:
            place = source - first + TAPS - 1
            in_window = (in_row & (source < first))[:, None] & in_channel[None, :]
            before = tl.load(windows + (row * (TAPS - 1) + place)[:, None] * C + channel[None, :], in_window, other=0)
            part = tl.where(in_window, before, part)
        gain = tl.load(weight + channel * channel_stride + tap * tap_stride, mask=in_channel, other=0).to(tl.float32)
        total += part.to(tl.float32) * gain[None, :]
        if tap > 0:  # noqa: SIM102 (one is known when the kernel is compiled)
            if keeps_any:
                slot = tl.where(keep >= 0, keep, 0).to(tl.int64)
                window = pool + (slot * (TAPS - 1) + tap - 1)[:, None] * C + channel[None, :]
                tl.store(window, part, mask=(keep >= 0)[:, None] & in_channel[None, :])
    y = (total / (1 + tl.exp(-total))).to(out.dtype.element_ty)
    if is_head:
        wide = y.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * tl.where(tile < HEADS, WIDTH**-0.5, 1.0)
        y = (wide * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * C + channel[None, :], y, mask=in_row[:, None] & in_channel[None, :])


def conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    pool_SWC: Tensor,
    layout: Layout,
    segment: Segment,
    heads: tuple[int, int, int] = (0, 1, 128),
) -> Tensor:
    """`causal_conv` of one segment's tokens, [tokens, C]. x may be a view with a row stride.

    heads      query heads, their width, and the width of a tile of all other channels: the first and as many key heads
               after them leave with length 1, queries divided by the square root of their width
    """
    channels, taps = weight_CW.shape
    rows, size = segment.row_end - segment.row_start, (taps - 1) * channels
    windows_BWC = torch.empty(rows, taps - 1, channels, dtype=pool_SWC.dtype, device=x_TC.device)
    window_kernel[(rows, triton.cdiv(size, 2048))](
        pool_SWC, layout.read_slot, windows_BWC, segment.row_start, SIZE=size, BLOCK=2048, num_warps=4
    )
    table = layout.once(chunk_table, segment)
    out_TC = torch.empty(segment.token_end - segment.token_start, channels, dtype=x_TC.dtype, device=x_TC.device)
    num_heads, width, rest = heads
    tiles = 2 * num_heads + triton.cdiv(channels - 2 * num_heads * width, rest)
    conv_kernel[(tiles, table.shape[0])](
        segment.cut(x_TC),
        weight_CW,
        windows_BWC,
        pool_SWC,
        segment.cut(layout.write_slot),
        table,
        out_TC,
        x_TC.stride(0),
        weight_CW.stride(0),
        weight_CW.stride(1),
        C=channels,
        TAPS=taps,
        HEADS=num_heads,
        WIDTH=width,
        REST=rest,
        CHUNK=CHUNK,
        BC=max(16, triton.next_power_of_2(max(width if num_heads else 1, rest))),
        num_warps=8,
    )
    return out_TC
