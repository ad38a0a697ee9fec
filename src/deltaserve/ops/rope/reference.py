"""Rotary position embedding in torch: RoFormer (arXiv 2104.09864) with YaRN scaling (arXiv 2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltaserve.ops.numeric import cast, wide_dtype

YARN_KEYS = frozenset(
    {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)


def rope_table(max_len: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any], device: torch.device) -> Tensor:
    inv_freq_R2, attention_factor = rope_frequencies(rotary_dim, theta, scaling)
    # fp32 throughout, as these models were trained: a more exact angle would be another one at large positions.
    angle = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq_R2
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * attention_factor).to(device)


def apply_rope(q_THD: Tensor, k_TGD: Tensor, position_T: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    wide, heads, rotary_dim = wide_dtype(q_THD.dtype), q_THD.shape[1], cos_sin.shape[1]
    cos_T1R, sin_T1R = cast(cos_sin.index_select(0, position_T)[:, None], wide).chunk(2, dim=-1)
    qk = torch.cat([q_THD, k_TGD], dim=1)
    first, second = cast(qk[..., :rotary_dim], wide).chunk(2, dim=-1)
    rotated = torch.cat([first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R], dim=-1)
    qk[..., :rotary_dim] = rotated
    return qk[:, :heads], qk[:, heads:]


def rope_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Radians per position [R / 2], and what cosines and sines are multiplied by."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope scaling of type {kind!r} is not supported; supported are 'default' and 'yarn'")
    unknown = scaling.keys() - {"rope_type", "type"} - (YARN_KEYS if kind == "yarn" else frozenset())
    if unknown:
        raise ValueError(f"rope scaling of type {kind!r} does not know {sorted(unknown)}; remove them from the config")
    period_R2 = torch.pow(theta, torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if kind == "default":
        return 1.0 / period_R2, 1.0
    for key in ("factor", "original_max_position_embeddings"):
        if scaling.get(key) is None:
            raise ValueError(f"rope scaling of type 'yarn' needs {key!r}; add it to the config")
    return _yarn_frequencies(period_R2, rotary_dim, theta, scaling), _yarn_attention_factor(scaling)


def _yarn_frequencies(period_R2: Tensor, rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, a ramp joins them (section 3.2)."""
    factor, original_len = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])

    def dim_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original length."""
        return rotary_dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp_R2 = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep_R2 = 1 - ramp_R2
    return 1.0 / (factor * period_R2) * (1 - keep_R2) + 1.0 / period_R2 * keep_R2


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The temperature of section 3.4, folded into cosines and sines."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    factor = float(scaling["factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
