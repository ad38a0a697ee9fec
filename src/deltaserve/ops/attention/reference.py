"""Paged causal attention in torch."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.layout import Layout


def store(k_TGD: Tensor, v_TGD: Tensor, kv_pool: Tensor, layout: Layout) -> None:
    raise NotImplementedError


def attend(q_THD: Tensor, kv_pool: Tensor, layout: Layout, scale: float) -> Tensor:
    raise NotImplementedError
