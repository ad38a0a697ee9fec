"""Sparse mixture of experts with one shared expert. Knows no device and no placement of experts.

Shape letters: T tokens, D hidden width, E experts, K experts per token, I inner width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.layers.linear import FP8, Linear
from deltaserve.layers.mlp import SwiGLU
from deltaserve.layers.normed import Normed
from deltaserve.ops.moe.api import allocate, allocate_scales, sparse_moe, takes_shared


class SparseMoe(nn.Module):
    """The chosen experts' weighted sum, plus `sigmoid(gate(x)) * shared(x)`.

    Quantised experts are FP8 with a factor for each 128 x 128 block, in `w13_scale` and `w2_scale`; the router is not.
    """

    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        inner_size: int,
        shared_size: int,
        renormalize: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.router = Linear(hidden_size, num_experts + 1, dtype, device)
        """Rows: one per expert, then the shared expert's gate."""
        self.holds_shared = takes_shared(device) and shared_size == inner_size
        held = num_experts + self.holds_shared
        w13, w2 = allocate(held, inner_size, hidden_size, FP8 if quantized else dtype, device)
        self.held: dict[str, Tensor] = {"w13": w13, "w2": w2}
        """All that the op is given. The weights below are views of it."""
        if quantized:
            scales = allocate_scales(held, inner_size, hidden_size, device)
            self.held |= dict(zip(("w13_scale", "w2_scale"), scales, strict=True))
        for name, tensor in self.held.items():
            self.register_parameter(name, _view(tensor[:num_experts]))
        place = torch.device("meta") if self.holds_shared else device
        self.shared_expert = SwiGLU(hidden_size, shared_size, dtype, place, quantized)
        if self.holds_shared:
            for which, projection in (("w13", self.shared_expert.gate_up_proj), ("w2", self.shared_expert.down_proj)):
                projection.weight = _view(self.held[which][num_experts])
                if quantized:
                    projection.weight_scale_inv = _view(self.held[f"{which}_scale"][num_experts])
        self.apart: tuple[Tensor, Tensor] | None = None
        """The shared expert's weights, where the op takes them beside the others."""
        if not (self.holds_shared or quantized):
            self.apart = self.shared_expert.gate_up_proj.weight, self.shared_expert.down_proj.weight

    def forward(self, x_TD: Tensor | Normed, context: ForwardContext | None = None) -> Tensor:
        """[T, hidden_size] -> the same, or rows [T, K, hidden_size] that the next norm adds up."""
        scores_TF, ready = self.router(x_TD), None
        if isinstance(x_TD, Normed):
            ready, x_TD = x_TD.ready, x_TD.norm
        y_TD = sparse_moe(
            x_TD,
            scores_TF,
            top_k=self.top_k,
            renormalize=self.renormalize,
            ready=ready,
            adds_up=not self.holds_shared,
            shared=self.apart,
            place=context.layout.kv_index if context is not None and context.layout.is_padded else None,
            **self.held,
        )
        if self.holds_shared or self.apart is not None:
            return y_TD
        return torch.addcmul(y_TD, self.shared_expert(x_TD), scores_TF[:, -1:].sigmoid())


def _view(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
