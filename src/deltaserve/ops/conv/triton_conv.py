"""The causal convolution of rows of any length, on a GPU. Knows no more of its channels than which to normalise.

Two launches. The first copies the windows that rows start from, zeros for a row that starts from none: a window may be
kept in the slot that it was read from, by a program that computes other tokens of the row. The second computes tiles of
64 tokens by one head's channels. A tile is cut into groups of 8 tokens, which its warps walk through side by side: an
input is loaded once, four tokens ahead of its use, and moves on through registers from tap to tap; only the inputs
before a group are loaded twice, the second time from the nearest cache. Whoever keeps windows loads them once more, at
the end: few tokens do.

For a gated delta net the tile is as wide as a head, and queries and keys leave with length 1 (queries scaled), which
saves the kernels after it from doing so.

At most four taps. A kernel variant follows from the number of channels and taps, the heads' widths, and the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

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


@triton.jit
def inputs(
    x,
    windows,
    token,
    first,
    end,
    x_stride,
    channel,
    in_channel,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    START: tl.constexpr,
):
    """Of one token of each group, [groups, channels]; from the row's window for tokens before its first, if START."""
    in_x = ((token >= first) & (token < end))[:, None] & in_channel[None, :]
    part = tl.load(x + token[:, None] * x_stride + channel[None, :], mask=in_x, other=0)
    if START:
        # Two loads, of which one is masked: an address chosen for each token would not be known to be aligned.
        is_before = (token >= first - (TAPS - 1)) & (token < tl.minimum(first, end))
        place = windows + (token - first + TAPS - 1)[:, None] * C + channel[None, :]
        before = tl.load(place, mask=is_before[:, None] & in_channel[None, :], other=0)
        part = tl.where(is_before[:, None], before, part)
    return part


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """x as DTYPE."""
    if FAST == 2 and tl.bfloat16 == DTYPE:  # two at a time; one by one, as for a result that is widened again, is slow
        convert: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(convert, "=r,f,f", [x], tl.bfloat16, is_pure=True, pack=2)
    return x.to(DTYPE)


@triton.jit
def _exp_of_minus(x, FAST: tl.constexpr):
    """exp(-x)."""
    if FAST == 2:  # the sign is the constant's, where a minus would be an instruction of its own
        exp2: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(exp2, "=f,f", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1)
    return libdevice.fast_expf(-x)


@triton.jit
def output(x0, x1, x2, x3, w0, w1, w2, w3, scale, DTYPE: tl.constexpr, NORMALISED: tl.constexpr, FAST: tl.constexpr):
    """From four inputs, the oldest first; of length `scale` if NORMALISED. FAST as `fast_way` has it."""
    total = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    if FAST:  # denormal numbers become zeros, which saves a third of the instructions
        y = _rounded(libdevice.fast_dividef(total, 1 + _exp_of_minus(total, FAST)), DTYPE, FAST)
    else:
        y = (total / (1 + tl.exp(-total))).to(DTYPE)
    if NORMALISED:
        wide = y.to(tl.float32)
        y = (wide * (tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale)[:, None]).to(DTYPE)
    return y


@triton.jit
def _walk(
    x,
    windows,
    out,
    token,
    first,
    end,
    x_stride,
    channel,
    in_channel,
    w0,
    w1,
    w2,
    w3,
    scale,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    START: tl.constexpr,
    NORMALISED: tl.constexpr,
    FAST: tl.constexpr,
):
    """STEPS tokens of each group, from `token` on."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    x0 = inputs(x, windows, token - 3, first, end, x_stride, channel, in_channel, TAPS, C, START)
    x1 = inputs(x, windows, token - 2, first, end, x_stride, channel, in_channel, TAPS, C, START)
    x2 = inputs(x, windows, token - 1, first, end, x_stride, channel, in_channel, TAPS, C, START)
    a = inputs(x, windows, token, first, end, x_stride, channel, in_channel, TAPS, C, START)
    b = inputs(x, windows, token + 1, first, end, x_stride, channel, in_channel, TAPS, C, START)
    c = inputs(x, windows, token + 2, first, end, x_stride, channel, in_channel, TAPS, C, START)
    d = inputs(x, windows, token + 3, first, end, x_stride, channel, in_channel, TAPS, C, START)
    x0, x1, x2 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)
    for step in tl.static_range(0, STEPS, 4):  # unrolled, or a load would be waited for where it is handed on
        here = token + step
        x3, x4, x5, x6 = a, b, c, d
        if step + 4 < STEPS:
            ahead = here + 4
            a = inputs(x, windows, ahead, first, end, x_stride, channel, in_channel, TAPS, C, START)
            b = inputs(x, windows, ahead + 1, first, end, x_stride, channel, in_channel, TAPS, C, START)
            c = inputs(x, windows, ahead + 2, first, end, x_stride, channel, in_channel, TAPS, C, START)
            d = inputs(x, windows, ahead + 3, first, end, x_stride, channel, in_channel, TAPS, C, START)
        x3, x4, x5, x6 = x3.to(tl.float32), x4.to(tl.float32), x5.to(tl.float32), x6.to(tl.float32)
        y3 = output(x0, x1, x2, x3, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
        y4 = output(x1, x2, x3, x4, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
        y5 = output(x2, x3, x4, x5, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
        y6 = output(x3, x4, x5, x6, w0, w1, w2, w3, scale, DTYPE, NORMALISED, FAST)
        place = out + here[:, None] * C + channel[None, :]
        within = in_channel[None, :]
        tl.store(place, y3, mask=((here >= first) & (here < end))[:, None] & within)
        tl.store(place + C, y4, mask=((here + 1 >= first) & (here + 1 < end))[:, None] & within)
        tl.store(place + 2 * C, y5, mask=((here + 2 >= first) & (here + 2 < end))[:, None] & within)
        tl.store(place + 3 * C, y6, mask=((here + 3 >= first) & (here + 3 < end))[:, None] & within)
        x0, x1, x2 = x4, x5, x6


@triton.jit
def taps(
    weight,
    channel,
    in_channel,
    channel_stride,
    tap_stride,
    BACK: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """fp32 [groups, channels]: what multiplies the input BACK tokens ago; zeros if there are fewer taps. Each group
    loads it, as it loads its inputs: one load for all would be handed around through shared memory."""
    place = (channel * channel_stride + (TAPS - 1 - BACK) * tap_stride)[None, :] + tl.zeros([GROUPS, 1], tl.int32)
    return tl.load(weight + place, mask=(in_channel & (BACK < TAPS))[None, :], other=0).to(tl.float32)


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
    GROUPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Grid [tiles of channels, chunks]. Of the first 2 * HEADS tiles, WIDTH channels wide, the rows leave with length
    1, and those of the first HEADS are divided by sqrt(WIDTH); the other tiles are REST wide."""
    STEPS: tl.constexpr = CHUNK // GROUPS
    tile = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    row = tl.load(entry).to(tl.int64)
    base = tl.load(entry + 1).to(tl.int64)
    first = tl.load(entry + 2).to(tl.int64)
    end = tl.load(entry + 3).to(tl.int64)
    if end == first:
        return
    is_head = tile < 2 * HEADS if HEADS else False
    low = tl.where(is_head, tile * WIDTH, 2 * HEADS * WIDTH + (tile - 2 * HEADS) * REST)
    high = tl.minimum(low + tl.where(is_head, WIDTH, REST), C)
    channel = low + tl.arange(0, BC)
    FULL: tl.constexpr = (HEADS == 0 or WIDTH == BC) and REST == BC and (C - 2 * HEADS * WIDTH) % REST == 0
    in_channel = tl.full([BC], True, tl.int1) if FULL else channel < high  # loads are wide where no mask is in the way
    windows += row * ((TAPS - 1) * C)
    chunk = base + tl.arange(0, CHUNK)
    keep = tl.load(write_slot + chunk, mask=(chunk >= first) & (chunk < end), other=-1)

    w0 = taps(weight, channel, in_channel, channel_stride, tap_stride, 3, TAPS, GROUPS)
    w1 = taps(weight, channel, in_channel, channel_stride, tap_stride, 2, TAPS, GROUPS)
    w2 = taps(weight, channel, in_channel, channel_stride, tap_stride, 1, TAPS, GROUPS)
    w3 = taps(weight, channel, in_channel, channel_stride, tap_stride, 0, TAPS, GROUPS)
    token = base + tl.arange(0, GROUPS) * STEPS
    scale = tl.where(tile < HEADS, WIDTH**-0.5, 1.0)
    # Whether the inputs before a token may be a window's.
    if base < first + TAPS - 1:
        if is_head:
            _walk(
                *(x, windows, out, token, first, end, x_stride, channel, in_channel, w0, w1, w2, w3, scale),
                *(TAPS, C, STEPS, True, True, FAST),
            )
        else:
            _walk(
                *(x, windows, out, token, first, end, x_stride, channel, in_channel, w0, w1, w2, w3, scale),
                *(TAPS, C, STEPS, True, False, FAST),
            )
    elif is_head:
        _walk(
            *(x, windows, out, token, first, end, x_stride, channel, in_channel, w0, w1, w2, w3, scale),
            *(TAPS, C, STEPS, False, True, FAST),
        )
    else:
        _walk(
            *(x, windows, out, token, first, end, x_stride, channel, in_channel, w0, w1, w2, w3, scale),
            *(TAPS, C, STEPS, False, False, FAST),
        )

    if tl.max(keep, 0) >= 0:
        for step in range(STEPS):
            here = token + step
            slot = tl.load(write_slot + here, mask=(here >= first) & (here < end), other=-1)
            kept_end = tl.where(slot >= 0, end, first - TAPS)  # nothing is loaded for the others
            window = pool + tl.where(slot >= 0, slot, 0).to(tl.int64) * ((TAPS - 1) * C)
            for tap in tl.static_range(TAPS - 1):
                source = here - (TAPS - 2 - tap)
                part = inputs(x, windows, source, first, kept_end, x_stride, channel, in_channel, TAPS, C, True)
                in_window = (slot >= 0)[:, None] & in_channel[None, :]
                tl.store(window[:, None] + tap * C + channel[None, :], part, mask=in_window)


def fast_way(x: Tensor) -> int:
    """How kernels compute exponentials of this tensor: 0 as the interpreter can, 1 fast, 2 by NVIDIA's instructions."""
    return 0 if not x.is_cuda else 1 if torch.version.hip is not None else 2


def starting_windows(pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """[rows, taps - 1, C]: copies of the windows that rows start from, zeros where they start from none."""
    rows, size = segment.row_end - segment.row_start, pool_SWC.shape[1:].numel()
    windows_BWC = torch.empty(rows, *pool_SWC.shape[1:], dtype=pool_SWC.dtype, device=pool_SWC.device)
    window_kernel[(rows, triton.cdiv(size, 2048))](
        pool_SWC, layout.read_slot, windows_BWC, segment.row_start, SIZE=size, BLOCK=2048, num_warps=4
    )
    return windows_BWC


def conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    pool_SWC: Tensor,
    layout: Layout,
    segment: Segment,
    heads: tuple[int, int, int] = (0, 1, 128),
    num_groups: int = 8,
    registers: int = 128,
) -> Tensor:
    """`causal_conv` of one segment's tokens, [tokens, C]. x may be a view with a row stride.

    heads        query heads, their width, and the width of a tile of all other channels: the first and as many key
                 heads after them leave with length 1, queries divided by the square root of their width
    num_groups   of tokens in a tile: half as many warps
    registers    that a thread has at most, on NVIDIA's GPUs: with 128 a fourth tile fits a multiprocessor, and only
                 tiles at the beginning of a row put some aside
    """
    channels, taps = weight_CW.shape
    assert taps <= 4, f"conv: the kernel has 4 taps, not {taps}"
    windows_BWC = starting_windows(pool_SWC, layout, segment)
    table = layout.once(chunk_table, segment)
    out_TC = torch.empty(segment.token_end - segment.token_start, channels, dtype=x_TC.dtype, device=x_TC.device)
    (num_heads, width, rest), way = heads, fast_way(x_TC)
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
        GROUPS=num_groups,
        FAST=way,
        num_warps=num_groups // 2,
        **({"maxnreg": registers} if way == 2 else {}),
    )
    return out_TC
