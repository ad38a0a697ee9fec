"""Gated full attention: the layers whose memory grows with the sequence. Knows no block table but by its context.

Shape letters: T tokens of the step, H query heads, G key heads, D head width, E hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.linear import Linear
from deltaserve.layers.norm import GemmaNorm
from deltaserve.layers.normed import Normed
from deltaserve.layers.rotary import Rotary
from deltaserve.ops.attention.api import gated_attention


class Attention(nn.Module):
    """Project, normalise and rotate queries and keys, attend, gate each head's output by sigmoid, project back.

    `ordinal` counts the full-attention layers: it picks this layer's pool in the context.
    """

    def __init__(
        self,
        *,
        ordinal: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ) -> None:
        """`quantized`: all projections in FP8."""
        super().__init__()
        self.ordinal = ordinal
        self.head_dim = head_dim
        self.rotary = rotary
        q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.widths = [q_width, q_width, kv_width, kv_width]
        self.qgkv_proj = Linear(hidden_size, sum(self.widths), dtype, device, quantized)
        self.q_norm = GemmaNorm(head_dim, eps, dtype, device)
        self.k_norm = GemmaNorm(head_dim, eps, dtype, device)
        self.o_proj = Linear(q_width, hidden_size, dtype, device, quantized)

    def forward(self, x_TE: Tensor | Normed, context: ForwardContext) -> Tensor:
        """[T, hidden_size] -> the same; stores the step's keys and values."""
        q, gate, k, v = self.qgkv_proj(x_TE).split_with_sizes(self.widths, dim=-1)
        q_THD, k_TGD, v_TGD = (part.view(part.shape[0], -1, self.head_dim) for part in (q, k, v))
        out_TX = gated_attention(
            q_THD,
            gate,
            k_TGD,
            v_TGD,
            self.q_norm.weight_plus_one,
            self.k_norm.weight_plus_one,
            self.q_norm.eps,
            self.rotary.cos_sin,
            context.kv[self.ordinal],
            context.layout,
            self.head_dim**-0.5,
        )
        out_TE: Tensor = self.o_proj(out_TX)
        return out_TE
