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
from deltaserve.ops.linear.triton_fp8 import READY_ALONE, fp8_way, new_quantized, quantize, stored

TILE = 2048
"""Elements of a program, and the threads that hold 8 of each row of a wide norm."""


@triton.jit(do_not_specialize=["num_rows", "padded", "eps"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    padded,
    x_outer,
    x_inner,
    residual_outer,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADDENDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FP8: tl.constexpr,
    BY_ROW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ADDENDS: rows behind one another that x is the sum of, rounded; 0: x is itself. FP8: whether, and how, the norm
    is stored quantised as well, `padded` rows of it, with scales [blocks, padded], or [padded, blocks] BY_ROW."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    at = (row // HEADS * x_outer + row % HEADS * x_inner)[:, None] + column[None, :]
    wait_for_inputs(EARLY)
    if ADDENDS > 0:
        added = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for i in tl.static_range(ADDENDS):
            addend = x_ptr + (row * ADDENDS + i)[:, None] * WIDTH + column[None, :]
            added += tl.load(addend, mask=mask, other=0.0).to(tl.float32)
        x = added.to(sum_ptr.dtype.element_ty)
    else:
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
        is_stored = (row < padded)[:, None]
        q = stored(tl.reshape(q, (ROWS, BLOCK_D)), FP8)
        tl.store(q_ptr + to, q, mask=is_stored & (column < WIDTH)[None, :])
        block = tl.arange(0, BLOCK_D // 128)
        scales = tl.reshape(scales, (ROWS, BLOCK_D // 128))
        is_block = (block * 128 < WIDTH)[None, :]
        if BY_ROW:
            scale_at = row[:, None] * ((WIDTH + 127) // 128) + block[None, :]
        else:
            scale_at = block[None, :] * padded + row[:, None]
        tl.store(scale_ptr + scale_at, scales, mask=is_stored & is_block)


@triton.jit(do_not_specialize=["num_rows", "padded", "eps"])
def gated_norm_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    padded,
    x_outer,
    x_inner,
    z_outer,
    z_inner,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PLAIN: tl.constexpr,
    FP8: tl.constexpr,
):
    """Rows are heads of tokens. PLAIN: the outputs are stored. FP8: whether, and how, they are stored quantised,
    `padded` tokens of them, with scales [heads * blocks, padded]; a head's width is then 128, 256 or so on."""
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
    out = (x * scale[:, None] * weight[None, :] * (z / (1.0 + tl.exp(-z)))).to(out_ptr.dtype.element_ty)
    to = row[:, None] * WIDTH + column[None, :]
    if PLAIN:
        tl.store(out_ptr + to, out, mask=mask)
    if FP8 != 0:
        BLOCKS: tl.constexpr = BLOCK_D // 128
        q, scales = quantize(tl.reshape(out.to(tl.float32), (ROWS * BLOCKS, 128)), FP8)
        is_stored = (outer < padded)[:, None]
        tl.store(q_ptr + to, stored(tl.reshape(q, (ROWS, BLOCK_D)), FP8), mask=is_stored)
        block = inner[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        tl.store(scale_ptr + block * padded + outer[:, None], tl.reshape(scales, (ROWS, BLOCKS)), mask=is_stored)


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
    """The Gemma norm of x + residual [..., D], and that sum; contiguous, as the residual in dtype. x is as the
    residual, or [..., K, D]: K rows that are added up first, in their order, and rounded."""
    return _add_norm(x_D, residual_D, weight_plus_one_D, eps, None)


def add_norm_rows_quantized(
    x_ND: Tensor, residual_ND: Tensor, weight_plus_one_D: Tensor, eps: float, by_row: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """As `add_norm_rows` of [N, D] or [N, K, D], and the norm as `quantize_rows` would give it, or with a row's scales
    one behind the other."""
    ready = new_quantized(*residual_ND.shape, residual_ND.device, by_row)
    normed_ND, sum_ND = _add_norm(x_ND, residual_ND, weight_plus_one_D, eps, ready)
    return normed_ND, sum_ND, ready


def _add_norm(
    x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float, ready: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    normed_D, sum_D = (torch.empty(residual_D.shape, dtype=residual_D.dtype, device=x_D.device) for _ in range(2))
    addends = x_D.shape[-2] if x_D.dim() > residual_D.dim() else 0
    x_NHD = _flat(x_D.contiguous().view(residual_D.shape[:-1].numel(), -1) if addends else x_D)
    _launch(x_NHD, _flat(residual_D), weight_plus_one_D, normed_D, sum_D, eps, True, ready, addends)
    return normed_D, sum_D


def gated_norm_rows(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`w * x / rms(x) * silu(z)` of x and z [..., V]; contiguous, as x in dtype."""
    return _gated_norm(x_V, z_V, weight_V, eps, None)


def gated_norm_rows_quantized(
    x_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `gated_norm_rows` of [T, H, V], and the same as `quantize_rows` would give it of [T, H * V]; V is a power of
    two and a multiple of 128. Beyond READY_ALONE tokens the former is memory that holds anything."""
    tokens, heads, width = x_THV.shape
    assert width % 128 == 0, f"gated norm: rows of {width} are not whole blocks"
    assert width & (width - 1) == 0, f"gated norm: rows of {width} are no power of two"
    ready = new_quantized(tokens, heads * width, x_THV.device)
    return _gated_norm(x_THV, z_THV, weight_V, eps, ready), ready


def _gated_norm(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float, ready: tuple[Tensor, Tensor] | None) -> Tensor:
    out_V = torch.empty(x_V.shape, dtype=x_V.dtype, device=x_V.device)
    x_NHV, z_NHV = _by_head(x_V), _by_head(z_V)
    if x_NHV.shape != z_NHV.shape:
        x_NHV, z_NHV = _flat(x_V), _flat(z_V)
    heads, width = x_NHV.shape[1:]
    num_rows = x_NHV.shape[0] * heads
    rows, block, warps = tile(width)
    warps = max(1, warps // 2)  # 8,192 tokens of 32 heads of 128 take an H200 47 us, with as many warps as `norm` 53
    q, scale, way, padded = out_V, out_V, 0, x_NHV.shape[0]
    if ready is not None:
        (q, way), scale, padded = fp8_way(*ready), ready[1], len(ready[0])
    if num_rows:
        gated_norm_kernel[(triton.cdiv(padded * heads, rows),)](
            x_NHV,
            z_NHV,
            weight_V,
            out_V,
            q,
            scale,
            num_rows,
            padded,
            x_NHV.stride(0),
            x_NHV.stride(1),
            z_NHV.stride(0),
            z_NHV.stride(1),
            eps,
            HEADS=heads,
            WIDTH=width,
            ROWS=rows,
            BLOCK_D=block,
            PLAIN=ready is None or len(x_NHV) <= READY_ALONE,
            FP8=way,
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
    addends: int = 0,
) -> None:
    heads, width = x.shape[1], weight.shape[0]
    num_rows = x.shape[0] * heads
    rows, block, warps = tile(width)
    if not num_rows:
        return
    q, scale, way, padded = normed, normed, 0, num_rows
    if quantized is not None:
        block, (q, way), scale, padded = max(128, block), fp8_way(*quantized), quantized[1], len(quantized[0])
    norm_kernel[(triton.cdiv(padded, rows),)](
        x,
        residual,
        weight,
        normed,
        total,
        q,
        scale,
        num_rows,
        padded,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK_D=block,
        ADDENDS=addends,
        HAS_RESIDUAL=adds,
        FP8=way,
        BY_ROW=quantized is not None and quantized[1].stride(1) == 1,
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
