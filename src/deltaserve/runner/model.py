"""The surface of a model that a runner uses. Knows no weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.gpu import has_kernels


class Model(Protocol):
    """What the runner asks of a model."""

    @property
    def mtp(self) -> nn.Module | None:
        """The layer that looks one token further, where there is one."""

    def __call__(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """The hidden states [T, D] after the final norm."""

    def shortened(self) -> AbstractContextManager[None]:
        """Within it passes go through few layers, which run the kernels of all."""

    def logits(self, hidden_ND: Tensor, wide: bool = True) -> Tensor:
        """[N, vocab], float32; float64 of a float64 model; not `wide`: as `hidden`, for who widens what must be."""

    def look_ahead(self, token_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] of one token further, where the model has an MTP layer."""


def logits_to_draw(model: Model, hidden_ND: Tensor) -> Tensor:
    """What a sampler is given: not wide where kernels take them as they are."""
    return model.logits(hidden_ND, wide=False) if has_kernels(hidden_ND) else model.logits(hidden_ND)
