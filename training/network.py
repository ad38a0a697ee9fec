"""The training model: Qwen3-Next with its MTP layer, parameters and forward passes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training import delta_rule
from training.layers import (
    AttentionDims,
    Functions,
    GdnDims,
    attention_in,
    gates,
    gdn_gate_out,
    gdn_heads,
    gdn_split,
    linear,
    moe,
    rms,
)

Losses = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Config:
    """The keys of config.json that the model needs."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full_attention_interval: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    max_position_embeddings: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float

    @classmethod
    def read(cls, path: Path) -> "Config":
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{k: values[k] for k in cls.__dataclass_fields__})

    @property
    def rotary(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


def parameter(*shape: int, std: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std if std else torch.zeros(*shape))


class Layer(nn.Module):
    """A norm, a mixer and a mixture of experts; `weights()` hands the parameters to the functions of layers.py."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, wide, shared = c.hidden_size, c.moe_intermediate_size, c.shared_expert_intermediate_size
        self.std = 0.5 / math.sqrt(hidden)
        self.out_std = self.std / math.sqrt(2 * c.num_hidden_layers)
        self.top_k = c.num_experts_per_tok
        self.ln1, self.ln2 = parameter(hidden), parameter(hidden)
        self.router = parameter(c.num_experts, hidden, std=0.02)
        self.gate_up = parameter(c.num_experts, 2 * wide, hidden, std=self.std)
        self.down = parameter(c.num_experts, hidden, wide, std=self.out_std)
        self.shared_gate, self.shared_up = (
            parameter(shared, hidden, std=self.std),
            parameter(shared, hidden, std=self.std),
        )
        self.shared_down, self.shared_mix = parameter(hidden, shared, std=self.out_std), parameter(1, hidden, std=0.02)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class GdnLayer(Layer):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        heads, v_heads, k_dim, v_dim = (
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
        )
        self.dims = GdnDims(heads, k_dim, v_heads // heads, v_dim)
        channels = 2 * heads * k_dim + v_heads * v_dim
        self.qkvz = parameter(channels + v_heads * v_dim, c.hidden_size, std=self.std)
        self.ba, self.conv = parameter(2 * v_heads, c.hidden_size, std=self.std), parameter(channels, 1, 4, std=0.3)
        self.a_log = nn.Parameter(torch.empty(v_heads).uniform_(1, 16).log())
        dt = torch.exp(torch.rand(v_heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm, self.out = (
            nn.Parameter(torch.ones(v_dim)),
            parameter(c.hidden_size, v_heads * v_dim, std=self.out_std),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, functions: Functions
    ) -> tuple[Tensor, Tensor]:
        weights = self.weights()
        q, k, v, g, beta, z = functions.gdn_in(x, weights, self.dims, dtype)
        out: tuple[Tensor, Tensor] = functions.gdn_out(
            x, functions.rule(q, k, v, g, beta), z, weights, self.top_k, dtype
        )
        return out

    def state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        d = self.dims
        shape = (batch, d.heads * d.repeat, d.k_dim, d.v_dim)
        return {
            "conv": torch.zeros(batch, 3, self.conv.shape[0], device=device, dtype=dtype),
            "rule": torch.zeros(shape, device=device),
        }

    def step(
        self, x: Tensor, state: dict[str, Tensor], at: int, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """x [B, H] of position `at`."""
        w = self.weights()
        h = rms(x, w["ln1"]).to(dtype)
        mixed, z, b, a = gdn_split(linear(h, w["qkvz"]), linear(h, w["ba"]), self.dims)
        window = torch.cat((state["conv"], mixed[:, None]), 1)
        state["conv"] = window[:, 1:]
        mixed = functional.silu((window * w["conv"][:, 0, :].t().to(dtype)).sum(1))
        beta, g = gates(b, a, w["a_log"], w["dt_bias"])
        o, state["rule"] = delta_rule.step(*gdn_heads(mixed, self.dims), g, beta, state["rule"])
        return moe(x + gdn_gate_out(o.to(dtype), z, w, dtype), w, self.top_k, dtype)[0]


class AttentionLayer(Layer):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.dims = AttentionDims(c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        wide, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_norm, self.k_norm = parameter(c.head_dim), parameter(c.head_dim)
        self.q, self.o = (
            parameter(2 * wide, c.hidden_size, std=self.std),
            parameter(c.hidden_size, wide, std=self.out_std),
        )
        self.k, self.v = parameter(kv, c.hidden_size, std=self.std), parameter(kv, c.hidden_size, std=self.std)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, functions: Functions
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = functions.attention(x, self.weights(), cos, sin, self.dims, self.top_k, dtype)
        return out

    def state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        shape = (batch, length, self.dims.kv_heads, self.dims.dim)
        return {n: torch.zeros(shape, device=device, dtype=dtype) for n in "kv"}

    def step(
        self, x: Tensor, state: dict[str, Tensor], at: int, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> Tensor:
        w, d = self.weights(), self.dims
        q, k, v, gate = attention_in(x, w, cos[at : at + 1], sin[at : at + 1], d, dtype)
        state["k"][:, at], state["v"][:, at] = k, v
        keys, values = state["k"][:, : at + 1], state["v"][:, : at + 1]
        q = q.view(-1, d.kv_heads, d.heads // d.kv_heads, d.dim)
        scores = torch.einsum("bgrd,btgd->bgrt", q, keys).float() * d.dim**-0.5
        o = torch.einsum("bgrt,btgd->bgrd", scores.softmax(-1).to(dtype), values).reshape(gate.shape) * torch.sigmoid(
            gate
        )
        return moe(x + linear(o, w["o"]), w, self.top_k, dtype)[0]


def shift(x: Tensor, k: int) -> Tensor:
    """x [B, T, ..] moved k places to the left, zeros behind."""
    return torch.cat((x[:, k:], x.new_zeros((x.shape[0], k, *x.shape[2:]))), 1)


class Network(nn.Module):
    """The model; the MTP layer takes the hidden state after the final norm."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.functions = c, Functions()
        hidden = c.hidden_size
        self.embed, self.head = parameter(c.vocab_size, hidden, std=0.05), parameter(c.vocab_size, hidden, std=0.02)
        self.norm = parameter(hidden)
        self.layers = nn.ModuleList(
            (AttentionLayer if c.is_attention(i) else GdnLayer)(c) for i in range(c.num_hidden_layers)
        )
        self.mtp_fc = parameter(hidden, 2 * hidden, std=0.5 / math.sqrt(hidden))
        self.mtp_norm_embedding, self.mtp_norm_hidden, self.mtp_norm = (
            parameter(hidden),
            parameter(hidden),
            parameter(hidden),
        )
        self.mtp_layer = AttentionLayer(c)
        inverse = 1.0 / (c.rope_theta ** (torch.arange(0, c.rotary, 2).float() / c.rotary))
        angles = torch.outer(torch.arange(c.max_position_embeddings).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def trunk(self, embedded: Tensor, dtype: torch.dtype, stream: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """embedded [B, T, H] -> hidden states after the final norm and the mean load-balance loss."""
        length, x = embedded.shape[1], embedded.to(stream)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, b = layer(x, self.cos[:length], self.sin[:length], dtype, self.functions)
            x, balance = x.to(stream), balance + b
        return rms(x, self.norm), balance / len(self.layers)

    def mtp(self, hidden: Tensor, embedded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """hidden of position i and the embedding of token i + 1 -> the hidden whose head predicts token i + 2."""
        length = hidden.shape[1]
        e = embedded.to(hidden.dtype)
        both = torch.cat((rms(e, self.mtp_norm_embedding), rms(hidden, self.mtp_norm_hidden)), -1)
        x = linear(both.to(dtype), self.mtp_fc).to(hidden.dtype)
        x, balance = self.mtp_layer(x, self.cos[:length], self.sin[:length], dtype, self.functions)
        return rms(x.to(hidden.dtype), self.mtp_norm), balance

    def losses(self, tokens: Tensor, weights: Tensor, dtype: torch.dtype, drafts: int) -> tuple[Losses, Tensor]:
        """tokens, weights [B, T] -> the head losses of the next token and of each chained draft, the balance loss."""
        embedded = functional.embedding(tokens, self.embed)
        hidden, balance = self.trunk(embedded, dtype)
        head = self.functions.head_loss
        out: Losses = {"main": head(hidden, self.head, shift(tokens, 1), shift(weights, 1), dtype)}
        for j in range(1, drafts + 1):
            hidden, b = self.mtp(hidden, shift(embedded, j), dtype)
            out[f"mtp{j}"] = head(hidden, self.head, shift(tokens, j + 1), shift(weights, j + 1), dtype)
            balance = balance + 0.1 * b
        return out, balance

    @torch.no_grad()
    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        hidden, _ = self.trunk(functional.embedding(tokens, self.embed), dtype, dtype)
        return linear(hidden, self.head)
