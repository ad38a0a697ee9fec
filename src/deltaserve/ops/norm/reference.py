"""Root-mean-square norms in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaserve.ops.numeric import cast, constant, wide_dtype


def gemma_rms_norm(x_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> Tensor:
    return cast(_weighted_norm(x_D, weight_plus_one_D, eps), x_D.dtype)


def add_gemma_rms_norm(x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_D = x_D + residual_D
    return cast(_weighted_norm(sum_D, weight_plus_one_D, eps), x_D.dtype), sum_D


def add_up(x_KD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the last axis but one, row after row."""
    total_D, *rest = cast(x_KD, wide_dtype(x_KD.dtype)).unbind(-2)
    for row_D in rest:
        total_D = total_D + row_D
    return cast(total_D, dtype)


def gated_rms_norm(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    normed_V = _weighted_norm(x_V, weight_V, eps)
    return cast(normed_V.mul_(silu(cast(z_V, normed_V.dtype))), x_V.dtype)


def _weighted_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x * w / sqrt(mean(x^2) + eps)`, whose root is `hypot(|x|, sqrt(D * eps)) / sqrt(D)`, which takes fewer calls."""
    width, wide, device = x_D.shape[-1], wide_dtype(x_D.dtype), x_D.device
    x_D = cast(x_D, wide)
    length = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True)
    root = torch.hypot(length, constant(math.sqrt(width * eps), wide, device)).mul_(width**-0.5)
    return (x_D * cast(weight_D, wide)).div_(root)
