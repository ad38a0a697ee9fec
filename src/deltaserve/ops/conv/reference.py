"""Causal depthwise convolution in torch."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.layout import Layout, Segment


def step(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    raise NotImplementedError


def chunk(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    raise NotImplementedError
