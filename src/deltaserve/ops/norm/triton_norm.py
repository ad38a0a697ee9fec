"""Root-mean-square norms on a GPU, one launch each. Knows no layer and no residual stream.

Work is split by rows of the last dimension: a program takes as many whole rows as make about 2,048 elements. Every
element is read once and written once, 16 bytes at a time; a row stays in registers between its sum of squares and its
product, so that nothing is read twice. At one token the time is that of one trip to memory.

Variants: the width, the number of heads of a strided input and the dtypes; the number of rows is none.

Shape letters: N rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, quantize, stored

TILE = 2048
"""Elements of a program, and the threads that hold 8 of each row of a wide norm."""


@triton.jit(do_not_specialize=["num_rows", "eps"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    x_outer,
    x_inner,
    residual_outer,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """FP8: whether, and how, the norm is stored quantised as well, with scales [N, blocks]."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    at = (row // HEADS * x_outer + row % HEADS * x_inner)[:, None] + column[None, :]
    wait_for_inputs(EARLY)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    to = row[:, None] * WIDTH + column[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row[:, None] * residual_outer + column[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + to, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    normed = (wide * scale[:, None] * weight[None, :]).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + to, normed, mask=mask)
    if FP8 != 0:
        blocks = tl.reshape(normed.to(tl.float32), (ROWS * BLOCK_D // 128, 128))
        q, scales = quantize(blocks, FP8)
        tl.store(q_ptr + to, stored(tl.reshape(q, (ROWS, BLOCK_D)), FP8), mask=mask)
        block = tl.arange(0, BLOCK_D // 128)
        NUM: tl.constexpr = (WIDTH + 127) // 128
        kept = (row < num_rows)[:, None] & (block < NUM)[None, :]
        scales = tl.reshape(scales, (ROWS, BLOCK_D // 128))
        tl.store(scale_ptr + row[:, None] * NUM + block[None, :], scales, mask=kept)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def gated_norm_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_outer,
    x_inner,
    z_outer,
    z_inner,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    outer, inner = row // HEADS, row % HEADS
    x_at = (outer * x_outer + inner * x_inner)[:, None] + column[None, :]
    z_at = (outer * z_outer + inner * z_inner)[:, None] + column[None, :]
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    out = x * scale[:, None] * weight[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def tile(width: int) -> tuple[int, int, int]:
    """(rows of a program, padded width, warps): 8 elements of a thread, which are one load of 16 bytes in bf16."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, max(1, min(16, rows * block // 256))


def norm_rows(x_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> Tensor:
    """The Gemma norm of x [..., D]; contiguous, as x in dtype."""
    normed_D = torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device)
    x_NHD = _by_head(x_D)
    _launch(x_NHD, x_NHD, weight_plus_one_D, normed_D, normed_D, eps, False)
    return normed_D


def add_norm_rows(x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The Gemma norm of x + residual, [..., D] both, and that sum; contiguous, as x in dtype."""
    normed_D = torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device)
    sum_D = torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device)
    x_NHD, residual_NHD = (_flat(x) for x in (x_D, residual_D))
    _launch(x_NHD, residual_NHD, weight_plus_one_D, normed_D, sum_D, eps, True)
    return normed_D, sum_D


def add_norm_rows_quantized(
    x_ND: Tensor, residual_ND: Tensor, weight_plus_one_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """As `add_norm_rows` of [N, D], and the norm as e4m3 [N, D] with float32 scales [N, d]."""
    normed_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    sum_ND = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    q_ND = torch.empty(x_ND.shape, dtype=torch.float8_e4m3fn, device=x_ND.device)
    scale_Nd = torch.empty((x_ND.shape[0], -(-x_ND.shape[1] // 128)), dtype=torch.float32, device=x_ND.device)
    x_NHD, residual_NHD = _flat(x_ND), _flat(residual_ND)
    _launch(x_NHD, residual_NHD, weight_plus_one_D, normed_ND, sum_ND, eps, True, (q_ND, scale_Nd))
    return normed_ND, sum_ND, (q_ND, scale_Nd)


def gated_norm_rows(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`w * x / rms(x) * silu(z)` of x and z [..., V]; contiguous, as x in dtype."""
    out_V = torch.empty(x_V.shape, dtype=x_V.dtype, device=x_V.device)
    x_NHV, z_NHV = _by_head(x_V), _by_head(z_V)
    if x_NHV.shape != z_NHV.shape:
        x_NHV, z_NHV = _flat(x_V), _flat(z_V)
    heads, width = x_NHV.shape[1:]
    num_rows = x_NHV.shape[0] * heads
    rows, block, warps = tile(width)
    if num_rows:
        gated_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x_NHV,
            z_NHV,
            weight_V,
            out_V,
            num_rows,
            x_NHV.stride(0),
            x_NHV.stride(1),
            z_NHV.stride(0),
            z_NHV.stride(1),
            eps,
            HEADS=heads,
            WIDTH=width,
            ROWS=rows,
            BLOCK_D=block,
            num_warps=warps,
        )
    return out_V


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    eps: float,
    adds: bool,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> None:
    heads, width = x.shape[1:]
    num_rows = x.shape[0] * heads
    rows, block, warps = tile(width)
    if not num_rows:
        return
    q, scale, way = normed, normed, 0
    if quantized is not None:
        block, (q, way), scale = max(128, block), fp8_way(*quantized), quantized[1]
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        normed,
        total,
        q,
        scale,
        num_rows,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK_D=block,
        HAS_RESIDUAL=adds,
        FP8=way,
        num_warps=warps,
        **early_options(x.device, tokens=num_rows // heads),
    )


def _flat(x_D: Tensor) -> Tensor:
    """As [N, 1, D]; a copy only where rows are not evenly spaced."""
    flat = x_D if x_D.dim() == 2 else x_D.reshape(-1, x_D.shape[-1])
    return (flat if flat.stride(1) == 1 else flat.contiguous()).unsqueeze(1)


def _by_head(x_D: Tensor) -> Tensor:
    """As [N, H, D]: the view itself where it is one of tokens and heads, else rows."""
    if x_D.dim() == 3 and x_D.stride(2) == 1:
        return x_D
    return _flat(x_D)
