"""The whole model in float64, one token after the other, from a checkpoint's own names and layouts.

Shares no code with the package: no ops, no loader, no config reader. Where it and transformers agree in float32, it
says in float64 what is right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.models.factory import layer_kinds

Choice = tuple[str, int]
"""An MLP with experts (its prefix) and a token: the last expert taken and the first left out compete."""


class Reference:
    """Logits of one sequence, whole."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.eps: float = config["rms_norm_eps"]
        self.gaps: dict[Choice, float] = {}
        """How far apart the two scores (before softmax) were in the last sequence."""
        self._turned: Collection[Choice] = ()

    def logits(self, token_ids: Sequence[int], turned: Collection[Choice] = ()) -> Tensor:
        """float64 [tokens, vocab]. `turned`: choices in which the expert that scores less is taken."""
        self._turned = turned
        self.gaps.clear()
        embeddings = self.tensors["model.embed_tokens.weight"]
        x = embeddings[torch.tensor(token_ids)]
        for layer, kind in enumerate(layer_kinds(self.config)):
            prefix = f"model.layers.{layer}."
            mixer = self.attention if kind == "full_attention" else self.gated_delta_net
            x = x + mixer(prefix, self.gemma_norm(x, f"{prefix}input_layernorm.weight"))
            x = x + self.mlp(f"{prefix}mlp.", self.gemma_norm(x, f"{prefix}post_attention_layernorm.weight"))
        head = embeddings if self.config["tie_word_embeddings"] else self.tensors["lm_head.weight"]
        return self.gemma_norm(x, "model.norm.weight") @ head.T

    def gemma_norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.tensors[name])

    def project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def gated_delta_net(self, prefix: str, x: Tensor) -> Tensor:
        config, prefix = self.config, f"{prefix}linear_attn."
        k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        k_dim, v_dim, ratio = config["linear_key_head_dim"], config["linear_value_head_dim"], v_heads // k_heads
        num_tokens = len(x)
        groups = self.project(x, f"{prefix}in_proj_qkvz").view(num_tokens, k_heads, -1)
        q, k, v, z = torch.split(groups, [k_dim, k_dim, ratio * v_dim, ratio * v_dim], dim=-1)
        b, a = torch.split(self.project(x, f"{prefix}in_proj_ba").view(num_tokens, k_heads, -1), [ratio, ratio], dim=-1)
        mixed = self.convolve(f"{prefix}conv1d.weight", torch.cat([part.flatten(1) for part in (q, k, v)], dim=1))
        q, k, v = torch.split(mixed, [k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], dim=-1)
        q, k = (self.unit(part.view(num_tokens, k_heads, k_dim)).repeat_interleave(ratio, 1) for part in (q, k))
        v = v.view(num_tokens, v_heads, v_dim)
        decay = -self.tensors[f"{prefix}A_log"].exp() * functional.softplus(
            a.flatten(1) + self.tensors[f"{prefix}dt_bias"]
        )
        beta = b.flatten(1).sigmoid()
        state = torch.zeros(v_heads, k_dim, v_dim, dtype=torch.float64)
        out = torch.zeros_like(v)
        for t in range(num_tokens):
            state = state * decay[t].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(k_dim)
        out = out / (out.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[f"{prefix}norm.weight"]
        out = out * functional.silu(z.reshape(num_tokens, v_heads, v_dim))
        return self.project(out.flatten(1), f"{prefix}out_proj")

    def convolve(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[name][:, 0]
        out = torch.zeros_like(x)
        for back in range(weight.shape[1]):
            out[back:] += x[: len(x) - back] * weight[:, -1 - back]
        return functional.silu(out)

    def unit(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        config, prefix = self.config, f"{prefix}self_attn."
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        num_tokens = len(x)
        q, gate = self.project(x, f"{prefix}q_proj").view(num_tokens, heads, 2, width).unbind(2)
        k = self.project(x, f"{prefix}k_proj").view(num_tokens, kv_heads, width)
        v = self.project(x, f"{prefix}v_proj").view(num_tokens, kv_heads, width)
        q = self.rotate(self.gemma_norm(q, f"{prefix}q_norm.weight"))
        k = self.rotate(self.gemma_norm(k, f"{prefix}k_norm.weight"))
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        future = torch.ones(num_tokens, num_tokens).triu(1).bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        return self.project((out * gate.sigmoid()).flatten(1), f"{prefix}o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Angles in float32, as the models were trained."""
        inv_freq, factor = self.frequencies()
        angle = torch.arange(len(x), dtype=torch.float32)[:, None] * inv_freq
        cos, sin = ((part * factor).double()[:, None] for part in (angle.cos(), angle.sin()))
        half = len(inv_freq)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def frequencies(self) -> tuple[Tensor, float]:
        config = self.config
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        both = config | rope
        theta, width = float(both["rope_theta"]), int(config["head_dim"] * both["partial_rotary_factor"])
        period = theta ** (torch.arange(0, width, 2).float() / width)
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            return 1 / period, 1.0
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        assert set(rope) <= {
            "rope_type",
            "factor",
            "original_max_position_embeddings",
            "rope_theta",
            "partial_rotary_factor",
        }

        def dim_of(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(dim_of(32)), 0), min(math.ceil(dim_of(1)), width - 1)
        ramp = ((torch.arange(width // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        return 1 / (factor * period) * ramp + 1 / period * (1 - ramp), 0.1 * math.log(factor) + 1

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        if f"{prefix}gate.weight" not in self.tensors:
            return self.swiglu(prefix, x)
        scores, num_taken = self.project(x, f"{prefix}gate"), self.config["num_experts_per_tok"]
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        for t in range(len(x)) if num_taken < scores.shape[-1] else ():
            last, next_one = order[t, num_taken - 1 : num_taken + 1].tolist()
            self.gaps[prefix, t] = float(scores[t, last] - scores[t, next_one])
            if (prefix, t) in self._turned:
                order[t, num_taken - 1] = next_one
        experts = order[:, :num_taken]
        weights = scores.softmax(-1).gather(-1, experts)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.project(x, f"{prefix}shared_expert_gate").sigmoid() * self.swiglu(f"{prefix}shared_expert.", x)
        for t in range(len(x)):
            for weight, expert in zip(weights[t], experts[t].tolist(), strict=True):
                out[t] += weight * self.swiglu(f"{prefix}experts.{expert}.", x[t])
        return out

    def swiglu(self, prefix: str, x: Tensor) -> Tensor:
        inner = functional.silu(self.project(x, f"{prefix}gate_proj")) * self.project(x, f"{prefix}up_proj")
        return self.project(inner, f"{prefix}down_proj")
