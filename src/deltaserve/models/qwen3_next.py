"""Qwen3-Next: three gated delta nets to one gated attention, each followed by a mixture of experts.

Knows no checkpoint (load.py fills the weights) and no request: a step's tokens come in, their hidden states go out.

Shape letters: T tokens of the step, N those whose logits are wanted, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.attention import Attention
from deltaserve.layers.context import ForwardContext
from deltaserve.layers.embedding import Embedding
from deltaserve.layers.gated_delta_net import GatedDeltaNet
from deltaserve.layers.mlp import SwiGLU
from deltaserve.layers.moe import SparseMoe
from deltaserve.layers.norm import GemmaNorm
from deltaserve.layers.rotary import Rotary
from deltaserve.model_config import ModelConfig


class Block(nn.Module):
    """One layer. What it adds to the residual stream stays apart from the stream: the next norm adds it."""

    def __init__(
        self, config: ModelConfig, index: int, rotary: Rotary, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.mixer = make_mixer(config, index, rotary, dtype, device)
        self.post_norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.mlp = make_mlp(config, index, dtype, device)

    def forward(self, x_TD: Tensor, residual_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """`x` is what the layer below adds to `residual`; returns the same pair for the layer above."""
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        x_TD = self.mixer(x_TD, context)
        x_TD, residual_TD = self.post_norm.add(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class Qwen3Next(nn.Module):
    """The model with weights not yet filled; `models.load.load_model` makes a filled one."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        rotary = Rotary(config.max_position, config.rotary_dim, config.rope_theta, config.rope_scaling, device)
        self.layers = nn.ModuleList(Block(config, index, rotary, dtype, device) for index in range(config.num_layers))
        self.norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.lm_head = (
            self.embed_tokens if config.tied else Embedding(config.vocab_size, config.hidden_size, dtype, device)
        )

    def forward(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """int64 [T], rows one after the other -> hidden states [T, D] after the final norm."""
        residual_TD = self.embed_tokens(token_ids_T)
        x_TD = torch.zeros_like(residual_TD)
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, context)
        hidden_TD, _ = self.norm.add(x_TD, residual_TD)
        return hidden_TD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, D] -> [N, V], float32 (float64 in float64)."""
        return self.lm_head.project(hidden_ND)


def make_mixer(
    config: ModelConfig, index: int, rotary: Rotary, dtype: torch.dtype, device: torch.device
) -> GatedDeltaNet | Attention:
    """The token mixer of layer `index`; it counts the layers of its own kind below it."""
    kind = config.layer_kinds[index]
    ordinal = config.layer_kinds[:index].count(kind)
    if kind == "full":
        return Attention(
            ordinal=ordinal,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary=rotary,
            eps=config.eps,
            dtype=dtype,
            device=device,
        )
    return GatedDeltaNet(
        ordinal=ordinal,
        hidden_size=config.hidden_size,
        num_k_heads=config.gdn_k_heads,
        num_v_heads=config.gdn_v_heads,
        k_dim=config.gdn_k_dim,
        v_dim=config.gdn_v_dim,
        conv_width=config.conv_width,
        eps=config.eps,
        dtype=dtype,
        device=device,
    )


def make_mlp(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> SparseMoe | SwiGLU:
    """The channel mixer of layer `index`."""
    if config.mlp_kinds[index] == "dense":
        return SwiGLU(config.hidden_size, config.dense_size, dtype, device)
    return SparseMoe(
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        inner_size=config.moe_size,
        shared_size=config.shared_size,
        renormalize=config.renormalize,
        dtype=dtype,
        device=device,
    )
