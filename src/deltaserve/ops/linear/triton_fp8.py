"""Numbers of 8 bits inside kernels, and the kernel that quantises an input. Knows no product.

`FP8` says how a kernel sees a weight: 0 as a plain float, 1 as e4m3 that the hardware converts and multiplies, 2 as
bytes that are converted here, for hardware that does not know e4m3. All ways give the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs

READY_ALONE = 64
"""Tokens beyond which a product with a quantised weight reads nothing of an input but its quantised form, if that comes
with it."""


def fp8_way(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, int]:
    """The weight as kernels take it, and their `FP8`."""
    if scale is None:
        return weight, 0
    return (weight, 1) if properties(weight.device).has_fp8 else (weight.view(torch.uint8), 2)


@triton.jit
def widen(w, FP8: tl.constexpr):
    """In fp32."""
    return operand(w, FP8).to(tl.float32)


@triton.jit
def operand(w, FP8: tl.constexpr):
    """As an operand of `tl.dot`. All of e4m3's numbers are numbers of fp16, 2^8 times those with the same bits."""
    if FP8 == 2:
        bits = w.to(tl.uint16)
        w = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return w


@triton.jit
def round_e4m3(v):
    """To the nearest number of e4m3, still in fp32; of two equally near ones to the even one."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
    # Below 2^-6 the numbers are multiples of 2^-9: so are fp32's just above 2^14.
    subnormal = (v + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(v) < 0.015625, subnormal, normal)
    return tl.minimum(tl.maximum(rounded, -448.0), 448.0)


@triton.jit
def divide(x, scale):
    """x [R, 128] / scale [R], rounded as a division is: the product with the inverse, mended by what is left over."""
    inverse = tl.minimum(tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 3e38)[:, None]
    q = x * inverse
    return tl.fma(tl.fma(-q, tl.broadcast_to(scale[:, None], x.shape), x), tl.broadcast_to(inverse, x.shape), q)


@triton.jit
def quantize(x, FP8: tl.constexpr):
    """x fp32 [R, 128] -> (operand of `tl.dot` [R, 128], scale [R])."""
    amax = tl.max(tl.abs(x), 1)
    scale = tl.math.div_rn(tl.where(amax == 0, 448.0, amax), tl.full(amax.shape, 448.0, tl.float32))
    if FP8 == 1:
        q = divide(x, scale).to(tl.float8e4nv)
    else:
        q = round_e4m3(tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))).to(tl.float16)
    return q, scale


@triton.jit
def stored(q, FP8: tl.constexpr):
    """What `quantize` gave, as memory holds it."""
    if FP8 == 2:
        bits = (q * 0.00390625).to(tl.uint16, bitcast=True)
        q = (((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)).to(tl.uint8)
    return q


@triton.jit
def scaled_input(x_ptr, scale_ptr, start, WIDTH: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr):
    """fp32 [BK]: one input from `start` on; quantised, times its own scales and those of a row of weight blocks."""
    k = start + tl.arange(0, BK)
    x = tl.load(x_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    if FP8 != 0:
        x_q, scale = quantize(tl.reshape(x, (BK // 128, 128)), FP8)
        block = start // 128 + tl.arange(0, BK // 128)
        scale *= tl.load(scale_ptr + block, mask=block * 128 < WIDTH, other=0.0)
        x = tl.reshape(x_q.to(tl.float32) * scale[:, None], (BK,))
    return x


@triton.jit(do_not_specialize=["tokens", "stride"])
def quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    tokens,
    stride,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    x = tl.load(x_ptr + t * WIDTH + k, mask=k < tl.where(t < tokens, WIDTH, 0), other=0.0).to(tl.float32)
    x_q, scale = quantize(tl.reshape(x, (BK // 128, 128)), FP8)
    q = tl.reshape(x_q, (BK,))
    tl.store(q_ptr + t * WIDTH + k, stored(q, FP8), mask=k < WIDTH)
    block = tl.program_id(1) * (BK // 128) + tl.arange(0, BK // 128)
    tl.store(scale_ptr + block * stride + t, scale, mask=block * 128 < WIDTH)


def quantize_rows(x_TI: Tensor, early: bool | None = None) -> tuple[Tensor, Tensor]:
    """[T, I] -> e4m3 [T', I] and float32 scales [T', i] as `new_quantized` makes them; the rows past T are zero. One
    program per row, bytes move once."""
    tokens, width = x_TI.shape
    x_q, scale = new_quantized(tokens, width, x_TI.device)
    padded = len(x_q)
    out, way = fp8_way(x_q, scale)
    block = min(2048, max(128, triton.next_power_of_2(width)))
    grid = (padded, triton.cdiv(width, block))
    quantize_rows_kernel[grid](
        x_TI.contiguous(),
        out,
        scale,
        tokens,
        padded,
        WIDTH=width,
        BK=block,
        FP8=way,
        num_warps=4 if block > 512 else 1,
        **early_options(x_TI.device, early, tokens),
    )
    return x_q, scale


def new_quantized(tokens: int, width: int, device: torch.device, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """Room for a quantised input [T, I]: e4m3 [T', I] and float32 scales [T', i] that stand column by column in memory,
    as the vendor's product wants them, or `by_row`. T' is T up to a multiple of 4."""
    padded, blocks = -(-tokens // 4) * 4, -(-width // 128)
    x_q = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
    if by_row:
        return x_q, torch.empty(padded, blocks, dtype=torch.float32, device=device)
    return x_q, torch.empty(blocks, padded, dtype=torch.float32, device=device).t()
