"""The dtype that reference ops compute in, and numbers as tensors. Knows no op."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` without the call where it would do nothing."""
    return x if x.dtype == dtype else x.to(dtype)


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor without dimensions. Made once: on a CPU, making it takes longer than using it."""
    return torch.tensor(value, dtype=dtype, device=device)
