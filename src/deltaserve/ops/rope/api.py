"""Rotary position embedding. Knows positions and angles, nothing of attention.

Shape letters: T tokens, H query heads, G key heads, D head width, R rotary width (the first R of D are rotated).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltaserve.ops.rope import reference


def rope_table(
    max_len: int,
    rotary_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The cosines and sines of all positions below `max_len`. Made once, shared by all layers.

    `scaling` is the checkpoint's `rope_scaling` (or `rope_parameters` without `rope_theta` and
    `partial_rotary_factor`): None, type "default", or type "yarn" (arXiv 2309.00071) with `factor`,
    `original_max_position_embeddings` and optionally `attention_factor`, `beta_fast`, `beta_slow`, `mscale`,
    `mscale_all_dim`, `truncate`.

    Name       Shape          Dtype     Meaning
    returns    [max_len, R]   float32   columns 0 to R/2 - 1: cosines; R/2 to R - 1: sines; YaRN's attention factor
                                        is multiplied into both

    Raises ValueError for another type, an unknown key, or a missing one.
    """
    assert rotary_dim > 0, f"rope: rotary_dim is {rotary_dim}"
    assert rotary_dim % 2 == 0, f"rope: rotary_dim {rotary_dim} is odd, but dimensions are rotated in pairs"
    return reference.rope_table(max_len, rotary_dim, theta, scaling or {}, torch.device(device))


def apply_rope(q_THD: Tensor, k_TGD: Tensor, position_T: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of every head by its token's angles: dimension i pairs with i + R/2.

    Name        Shape          Dtype       Meaning
    q           [T, H, D]      any float   queries
    k           [T, G, D]      as q        keys
    position    [T]            int64       below max_len
    cos_sin     [max_len, R]   float32     from `rope_table`
    returns     [T, H, D]      as q        rotated in fp32 (fp64 for fp64 input); q and k are left as they are
                [T, G, D]      as q
    """
    assert q_THD.shape[0] == k_TGD.shape[0] == position_T.shape[0], "rope: q, k and position differ in tokens"
    assert q_THD.shape[2] == k_TGD.shape[2] >= cos_sin.shape[1], (
        f"rope: heads are {q_THD.shape[2]} and {k_TGD.shape[2]} wide, {cos_sin.shape[1]} of it to rotate"
    )
    return reference.apply_rope(q_THD, k_TGD, position_T, cos_sin)
