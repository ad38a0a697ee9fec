"""The MTP layer (multi-token prediction, arXiv 2404.19737 and 2412.19437): from a hidden state and the token that
followed it to the hidden state of one token later. Shares embeddings and head with the model.

Its entry for token j is made of the hidden state after token j - 1 and of token j itself: it stands at position j, so
that a block of keys and values depends on the tokens up to its own end alone. There is none at position 0.

Shape letters: T tokens of the step, D hidden width.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.linear import Linear
from deltaserve.layers.norm import GemmaNorm
from deltaserve.layers.rotary import Rotary
from deltaserve.model_config import ModelConfig
from deltaserve.models.block import Block, make_mixer


class Mtp(nn.Module):
    """Its keys and values are one more layer of the model's blocks, behind those of the attention layers."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: Rotary,
        dtype: torch.dtype,
        device: torch.device,
        quantized: Container[str] = (),
    ) -> None:
        """`quantized` may name `mtp.layer.mixer` and `mtp.layer.mlp`: held in FP8."""
        super().__init__()
        width = config.hidden_size
        self.pre_fc_norm_embedding = GemmaNorm(width, config.eps, dtype, device)
        self.pre_fc_norm_hidden = GemmaNorm(width, config.eps, dtype, device)
        self.fc = Linear(2 * width, width, dtype, device)
        mixer = make_mixer(
            config, "full", config.num_full_layers, rotary, dtype, device, "mtp.layer.mixer" in quantized
        )
        mlp_kind = "moe" if config.num_experts else "dense"
        self.layer = Block(config, mixer, mlp_kind, dtype, device, "mtp.layer.mlp" in quantized)
        self.norm = GemmaNorm(width, config.eps, dtype, device)

    def forward(self, embedding_TD: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """Both [T, D] -> the same, after the layer's own final norm. `hidden` is taken after a final norm too."""
        both = torch.cat([self.pre_fc_norm_embedding(embedding_TD), self.pre_fc_norm_hidden(hidden_TD)], dim=-1)
        x_TD = self.fc(both)
        x_TD, residual_TD = self.layer(x_TD, torch.zeros_like(x_TD), context)
        ahead_TD, _ = self.norm.add(x_TD, residual_TD)
        return ahead_TD
