"""Layers of the training model as plain functions of activations and weights, so that one compilation serves them all.

Weights keep the layout of the published Qwen3-Next checkpoints: in_proj_qkvz and in_proj_ba interleaved by key head,
q_proj with its gate interleaved by head, norms stored as w of 1 + w.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from training import delta_rule

EPS = 1e-6
HIT_WEIGHT = 0.9


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm with 1 + weight, in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())
    return y.type_as(x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dims of x [B, T, H, D] (halves paired); cos, sin [T, R]."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    c, s = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    half = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), -1)
    return torch.cat((turned * c + half * s, rest), -1)


class GdnDims(NamedTuple):
    """Key heads, their dim, value heads for each key head, their dim."""

    heads: int
    k_dim: int
    repeat: int
    v_dim: int


def gdn_split(qkvz: Tensor, ba: Tensor, dims: GdnDims) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Undoes the interleaving by key head: (q, k, v side by side), z, b, a."""
    lead, wide = qkvz.shape[:-1], dims.repeat * dims.v_dim
    grouped = qkvz.view(*lead, dims.heads, 2 * dims.k_dim + 2 * wide)
    q, k, v, z = grouped.split_with_sizes([dims.k_dim, dims.k_dim, wide, wide], -1)
    b, a = ba.view(*lead, dims.heads, 2 * dims.repeat).split_with_sizes([dims.repeat, dims.repeat], -1)
    mixed = torch.cat([x.reshape(*lead, -1) for x in (q, k, v)], -1)
    return mixed, z.reshape(*lead, dims.heads * dims.repeat, dims.v_dim), b.reshape(*lead, -1), a.reshape(*lead, -1)


def gdn_heads(mixed: Tensor, dims: GdnDims) -> tuple[Tensor, Tensor, Tensor]:
    lead, keys = mixed.shape[:-1], dims.heads * dims.k_dim
    q, k, v = mixed.split_with_sizes([keys, keys, dims.heads * dims.repeat * dims.v_dim], -1)
    q, k = (x.reshape(*lead, dims.heads, dims.k_dim).contiguous() for x in (q, k))
    return q, k, v.reshape(*lead, dims.heads * dims.repeat, dims.v_dim).contiguous()


def gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """beta and the log decay g, in fp32."""
    return b.float().sigmoid(), -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())


def gdn_in(x: Tensor, layer: dict[str, Tensor], dims: GdnDims, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x [B, T, H] -> q, k, v, g, beta, z."""
    h = rms(x, layer["ln1"]).to(dtype)
    mixed, z, b, a = gdn_split(linear(h, layer["qkvz"]), linear(h, layer["ba"]), dims)
    length = x.shape[1]
    padded, taps = functional.pad(mixed, (0, 0, 3, 0)), layer["conv"][:, 0, :].to(dtype)
    mixed = functional.silu(
        sum((padded[:, i : length + i] * taps[:, i] for i in range(1, 4)), padded[:, :length] * taps[:, 0])
    )
    beta, g = gates(b, a, layer["a_log"], layer["dt_bias"])
    return *gdn_heads(mixed, dims), g, beta, z


def gdn_gate_out(o: Tensor, z: Tensor, layer: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The gated norm of each value head and the output projection."""
    y = o.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    y = layer["norm"].float() * y.to(dtype).float() * functional.silu(z.float())
    return linear(y.to(dtype).flatten(-2), layer["out"])


def moe(x: Tensor, layer: dict[str, Tensor], top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + experts(norm x), and the load-balance loss; computed densely with zero weights for unselected experts."""
    experts, wide, hidden = layer["gate_up"].shape
    h = rms(x, layer["ln2"]).to(dtype).reshape(-1, hidden)
    probabilities = linear(h, layer["router"]).float().softmax(-1)
    top, chosen = probabilities.topk(top_k, -1)
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    balance = experts * ((weights > 0).float().mean(0) * probabilities.mean(0)).sum()
    y = linear(h, layer["gate_up"].reshape(experts * wide, hidden)).view(-1, experts, wide)
    gate, up = y.chunk(2, -1)
    inner = functional.silu(gate) * up * weights.to(dtype)[..., None]
    down = layer["down"].to(dtype).permute(0, 2, 1).reshape(experts * wide // 2, hidden)
    out = inner.reshape(-1, experts * wide // 2) @ down
    shared = linear(
        functional.silu(linear(h, layer["shared_gate"])) * linear(h, layer["shared_up"]), layer["shared_down"]
    )
    out = out + torch.sigmoid(linear(h, layer["shared_mix"])) * shared
    return x + out.view_as(x), balance


def gdn_out(
    x: Tensor, o: Tensor, z: Tensor, layer: dict[str, Tensor], top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return moe(x + gdn_gate_out(o, z, layer, dtype), layer, top_k, dtype)


class AttentionDims(NamedTuple):
    """Query heads, key and value heads, their dim."""

    heads: int
    kv_heads: int
    dim: int


def attention_in(
    x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor, dims: AttentionDims, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [.., heads, D], k and v [.., kv_heads, D], gate [.., heads * D]."""
    h = rms(x, layer["ln1"]).to(dtype)
    lead = h.shape[:-1]
    q, gate = linear(h, layer["q"]).view(*lead, dims.heads, 2 * dims.dim).chunk(2, -1)
    k, v = (linear(h, layer[n]).view(*lead, dims.kv_heads, dims.dim) for n in "kv")
    return rope(rms(q, layer["q_norm"]), cos, sin), rope(rms(k, layer["k_norm"]), cos, sin), v, gate.reshape(*lead, -1)


def attention(
    x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor, dims: AttentionDims, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One whole layer with gated causal attention."""
    q, k, v, gate = attention_in(x, layer, cos, sin, dims, dtype)
    k, v = (y.repeat_interleave(dims.heads // dims.kv_heads, 2) for y in (k, v))
    o = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    o = o.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
    return moe(x + linear(o, layer["o"]), layer, top_k, dtype)


def head_loss(h: Tensor, head: Tensor, target: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weighted cross-entropy sum, weight sum, hits and count among the answer tokens."""
    logits = linear(h.to(dtype), head).float()
    loss = logits.logsumexp(-1) - logits.gather(-1, target[..., None]).squeeze(-1)
    hit, counted = (logits.argmax(-1) == target).float(), (weight > HIT_WEIGHT).float()
    return (loss * weight).sum(), weight.sum(), (hit * counted).sum(), counted.sum()


@dataclass(frozen=True)
class Functions:
    """The functions a model calls: plain ones, or compiled ones for training on a GPU."""

    gdn_in: Callable[..., Any] = gdn_in
    gdn_out: Callable[..., Any] = gdn_out
    attention: Callable[..., Any] = attention
    head_loss: Callable[..., Any] = head_loss
    rule: Callable[..., Tensor] = delta_rule.chunked

    @classmethod
    def compiled(cls, fla: bool) -> Self:
        def fast(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False)

        rule = delta_rule.fla_rule(compiled=True) if fla else fast(delta_rule.chunked)
        return cls(fast(gdn_in), fast(gdn_out), fast(attention), fast(head_loss), rule)
