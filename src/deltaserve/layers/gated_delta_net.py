"""Gated delta net (arXiv 2412.06464): the layers whose memory has a fixed size. Knows no pool but by its context.

Shape letters: T tokens of the step, C channels of the convolution, Hk and Hv key and value heads, K and V their widths,
E hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.linear import Linear, weight
from deltaserve.layers.normed import Normed
from deltaserve.ops.gated_delta.api import gated_delta_net


class GatedDeltaNet(nn.Module):
    """Project, convolve q, k and v, run the gated delta rule, normalise and gate by z, project back.

    `ordinal` counts the gated delta nets: it picks this layer's pools in the context.
    """

    def __init__(
        self,
        *,
        ordinal: int,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        k_dim: int,
        v_dim: int,
        conv_width: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ) -> None:
        """`quantized`: `in_proj` (q|k|v|z) and `out_proj` in FP8. b and a, which steer the state, then have a
        projection of their own in `dtype`; else they are the last rows of `in_proj`.
        """
        super().__init__()
        self.ordinal = ordinal
        self.eps = eps
        keys, values = num_k_heads * k_dim, num_v_heads * v_dim
        wide = torch.promote_types(dtype, torch.float32)
        channels = 2 * keys + values
        self.widths = [channels, values, num_v_heads, num_v_heads]
        in_widths = self.widths[:2] if quantized else self.widths
        self.in_proj = Linear(hidden_size, sum(in_widths), dtype, device, quantized)
        self.ba_proj = Linear(hidden_size, 2 * num_v_heads, dtype, device) if quantized else None
        # [C, W] in shape, [W, C] in memory: the convolution takes one tap of all channels at a time.
        taps_WC = torch.empty(conv_width, channels, dtype=dtype, device=device)
        self.conv_weight = nn.Parameter(taps_WC.t(), requires_grad=False)
        self.A_log = weight(num_v_heads, dtype=wide, device=device)
        self.dt_bias = weight(num_v_heads, dtype=wide, device=device)
        self.norm_weight = weight(v_dim, dtype=wide, device=device)
        self.out_proj = Linear(values, hidden_size, dtype, device, quantized)

    def forward(self, x_TE: Tensor | Normed, context: ForwardContext) -> Tensor:
        """[T, hidden_size] -> the same; keeps the convolution's window and the state where the context says."""
        if self.ba_proj is None:
            mixed_TC, z, b_TV, a_TV = self.in_proj(x_TE).split_with_sizes(self.widths, dim=-1)
        else:
            mixed_z, ba = self.in_proj.beside(x_TE, self.ba_proj)
            mixed_TC, z = mixed_z.split_with_sizes(self.widths[:2], dim=-1)
            b_TV, a_TV = ba.split_with_sizes(self.widths[2:], dim=-1)
        o_THV, ready = gated_delta_net(
            *(mixed_TC, z, b_TV, a_TV, self.conv_weight, self.A_log, self.dt_bias, self.norm_weight, self.eps),
            *(context.conv[self.ordinal], context.state[self.ordinal], context.layout),
            quantizes=self.ba_proj is not None,
        )
        out_TE: Tensor = self.out_proj(o_THV.flatten(1), ready)
        return out_TE
