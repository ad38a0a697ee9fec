"""Root-mean-square norms in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def gemma_rms_norm(x_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x_D.dtype, torch.float32)
    normed_D = functional.rms_norm(x_D.to(wide), weight_plus_one_D.shape, weight_plus_one_D.to(wide), eps)
    return normed_D.to(x_D.dtype)


def add_gemma_rms_norm(x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_D = x_D + residual_D
    return gemma_rms_norm(sum_D, weight_plus_one_D, eps), sum_D


def gated_rms_norm(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x_V.dtype, torch.float32)
    normed_V = functional.rms_norm(x_V.to(wide), weight_V.shape, weight_V.to(wide), eps)
    return (normed_V * functional.silu(z_V.to(wide))).to(x_V.dtype)
