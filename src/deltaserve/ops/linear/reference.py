"""Dense projection in torch. Quantised operands are multiplied as what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.ops.numeric import cast, wide_dtype

BLOCK = 128
"""Rows and columns of a weight, and columns of an input, that share a scale."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def linear(x_TI: Tensor, weight_OI: Tensor, scale_oi: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    dtype = x_TI.dtype if dtype is None else dtype
    if scale_oi is None:
        return cast(functional.linear(x_TI, weight_OI), dtype)
    wide = wide_dtype(x_TI.dtype)
    x_q_TI, x_scale_Ti = quantize_rows(x_TI)
    x_TI = dequantize_rows(x_q_TI, x_scale_Ti, wide)
    return functional.linear(x_TI, dequantize_weight(weight_OI, scale_oi, wide)).to(dtype)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(x_TI, -1)
    scale_Ti = _scale(blocks.abs().amax(-1))
    x_q = _e4m3(blocks / scale_Ti[..., None])
    return x_q.flatten(-2)[..., : x_TI.shape[-1]].contiguous(), scale_Ti


def dequantize_rows(x_TI: Tensor, scale_Ti: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TI.to(dtype) * _spread(scale_Ti, x_TI.shape[-1], -1).to(dtype)


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    height, width = weight_OI.shape[-2:]
    blocks = _blocks(_blocks(weight_OI, -1), -3)  # [.., o, 128, i, 128]
    scale_oi = _scale(blocks.abs().amax((-3, -1)))
    weight_q = _e4m3(blocks / scale_oi[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    return weight_q[..., :height, :width].contiguous(), scale_oi


def dequantize_weight(weight_OI: Tensor, scale_oi: Tensor, dtype: torch.dtype) -> Tensor:
    height, width = weight_OI.shape[-2:]
    scale_OI = _spread(_spread(scale_oi, width, -1), height, -2)
    # Both factors are exact in fp32, and rounding their product is the only error.
    wide = wide_dtype(dtype)
    return (weight_OI.to(wide) * scale_OI.to(wide)).to(dtype)


def _blocks(x: Tensor, dim: int) -> Tensor:
    """fp32, the dimension split into blocks of 128 of which the last is filled up with zeros."""
    missing = -x.shape[dim] % BLOCK
    if missing:
        x = functional.pad(x, [0, 0] * (-dim - 1) + [0, missing])
    shape = list(x.shape)
    shape[dim : dim + 1 or None] = [-1, BLOCK]
    return x.float().reshape(shape)


def _scale(amax: Tensor) -> Tensor:
    # By a tensor: some devices multiply by the rounded inverse of a number instead.
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, FP8_MAX))


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _spread(scale: Tensor, size: int, dim: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
