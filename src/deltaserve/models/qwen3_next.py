"""Qwen3-Next: three gated delta nets to one gated attention, each followed by a mixture of experts.

Knows no checkpoint (load.py fills the weights) and no request: a step's tokens come in, their hidden states go out.

Shape letters: T tokens of the step, N those whose logits are wanted, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.embedding import Embedding
from deltaserve.layers.norm import GemmaNorm
from deltaserve.layers.rotary import Rotary
from deltaserve.model_config import ModelConfig
from deltaserve.models.block import Block, make_mixer
from deltaserve.models.mtp import Mtp
from deltaserve.models.names import is_scale


class Qwen3Next(nn.Module):
    """The model with weights not yet filled; `models.load.load_model` makes a filled one."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        with_mtp: bool = False,
        quantized: Container[str] = (),
    ) -> None:
        """`with_mtp`: with the layer that looks one token further, `mtp`. `quantized` names the mixers and MLPs, such
        as `layers.3.mlp`, whose projections are held in FP8.
        """
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        rotary = Rotary(config.max_position, config.rotary_dim, config.rope_theta, config.rope_scaling, device)
        self.layers = nn.ModuleList()
        self._depth: int | None = None
        """Layers that a pass goes through, from the first; None: all."""
        for index, (kind, mlp_kind) in enumerate(zip(config.layer_kinds, config.mlp_kinds, strict=True)):
            ordinal = config.layer_kinds[:index].count(kind)
            name = f"layers.{index}"
            mixer = make_mixer(config, kind, ordinal, rotary, dtype, device, f"{name}.mixer" in quantized)
            self.layers.append(Block(config, mixer, mlp_kind, dtype, device, f"{name}.mlp" in quantized))
        self.norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.lm_head = (
            self.embed_tokens
            if config.tied
            else Embedding(config.vocab_size, config.hidden_size, dtype, device, only_projects=True)
        )
        self.mtp = Mtp(config, rotary, dtype, device, quantized) if with_mtp else None

    @property
    def num_parameters(self) -> int:
        """Numbers that the model learned; scales of quantised weights are not counted."""
        return sum(parameter.numel() for name, parameter in self.named_parameters() if not is_scale(name))

    def forward(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """int64 [T], rows one after the other -> hidden states [T, D] after the final norm."""
        residual_TD = self.embed_tokens(token_ids_T)
        x_TD = torch.zeros_like(residual_TD)
        for layer in islice(self.layers, self._depth):
            x_TD, residual_TD = layer(x_TD, residual_TD, context)
        hidden_TD, _ = self.norm.add(x_TD, residual_TD)
        return hidden_TD

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within it passes go through the first few layers only: as many as run whatever the others run. What comes
        out means nothing."""
        kinds = [_kind(layer) for layer in self.layers]
        behind = list(zip([None, *kinds], kinds, strict=False))  # what a layer runs depends on the one before, too
        depth = max(behind.index(pair) for pair in behind) + 1
        depth += kinds[depth - 1 :].index(kinds[-1])  # the last norm stands behind such a layer as it does
        self._depth = depth
        try:
            yield
        finally:
            self._depth = None

    def logits(self, hidden_ND: Tensor, wide: bool = True) -> Tensor:
        """[N, D] -> [N, V], float32 (float64 in float64); not `wide`: as `hidden`."""
        return self.lm_head.project(hidden_ND, wide)

    def look_ahead(self, token_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """One token further than `forward`: each token and the hidden state of the one before it -> hidden states
        [T, D] whose logits are a guess at the token after next. Hidden states may be `forward`'s or this method's own.
        """
        assert self.mtp is not None, "the model was made without its MTP layer"
        ahead_TD: Tensor = self.mtp(self.embed_tokens(token_ids_T), hidden_TD, context)
        return ahead_TD


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Equal for layers that run the same kernels: types of modules, shapes and dtypes of weights."""
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    return *modules, *((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
