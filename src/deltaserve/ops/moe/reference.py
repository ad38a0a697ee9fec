"""Mixture of experts in torch."""

from __future__ import annotations

from torch import Tensor


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def experts(x_TD: Tensor, w13_E2ID: Tensor, w2_EDI: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    raise NotImplementedError
