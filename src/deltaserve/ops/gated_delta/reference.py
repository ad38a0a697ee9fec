"""The gated delta rule in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.layout import Layout, Segment

Gates = tuple[Tensor, Tensor]


def gates(a_TV: Tensor, b_TV: Tensor, A_log_V: Tensor, dt_bias_V: Tensor, dtype: torch.dtype) -> Gates:
    raise NotImplementedError


def step(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TVD: Tensor,
    gates: Gates,
    pool_SVKD: Tensor,
    layout: Layout,
    segment: Segment,
) -> Tensor:
    raise NotImplementedError


def chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TVD: Tensor,
    gates: Gates,
    pool_SVKD: Tensor,
    layout: Layout,
    segment: Segment,
) -> Tensor:
    raise NotImplementedError
