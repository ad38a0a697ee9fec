"""One layer of the model: a token mixer and a channel mixer, each behind a norm. Knows no checkpoint and no request.

Shape letters: T tokens of the step, D hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.attention import Attention
from deltaserve.layers.context import ForwardContext
from deltaserve.layers.gated_delta_net import GatedDeltaNet
from deltaserve.layers.mlp import SwiGLU
from deltaserve.layers.moe import SparseMoe
from deltaserve.layers.norm import GemmaNorm
from deltaserve.layers.rotary import Rotary
from deltaserve.model_config import ModelConfig


class Block(nn.Module):
    """One layer. What it adds to the residual stream stays apart from the stream: the next norm adds it."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: GatedDeltaNet | Attention,
        mlp_kind: str,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ) -> None:
        """`quantized`: the MLP in FP8; the mixer comes as it is."""
        super().__init__()
        self.input_norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.mixer = mixer
        self.post_norm = GemmaNorm(config.hidden_size, config.eps, dtype, device)
        self.mlp = make_mlp(config, mlp_kind, dtype, device, quantized)
        self.quantized = quantized

    def forward(self, x_TD: Tensor, residual_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """`x` is what the layer below adds to `residual`, or rows [T, K, D] that the next norm adds up; returns the
        same pair for the layer above."""
        normed = self.input_norm.later(x_TD, residual_TD)
        x_TD = self.mixer(normed, context)
        normed = self.post_norm.later(x_TD, normed.total, self.quantized)
        return self.mlp(normed, context), normed.total


def make_mixer(
    config: ModelConfig,
    kind: str,
    ordinal: int,
    rotary: Rotary,
    dtype: torch.dtype,
    device: torch.device,
    quantized: bool = False,
) -> GatedDeltaNet | Attention:
    """A token mixer of one of the config's kinds; `ordinal` counts the layers of its own kind below it."""
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
            quantized=quantized,
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
        quantized=quantized,
    )


def make_mlp(
    config: ModelConfig, kind: str, dtype: torch.dtype, device: torch.device, quantized: bool = False
) -> SparseMoe | SwiGLU:
    """A channel mixer of one of the config's kinds."""
    if kind == "dense":
        return SwiGLU(config.hidden_size, config.dense_size, dtype, device, quantized)
    return SparseMoe(
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        inner_size=config.moe_size,
        shared_size=config.shared_size,
        renormalize=config.renormalize,
        dtype=dtype,
        device=device,
        quantized=quantized,
    )
