"""The gated delta rule for training: chunked in torch, and flash-linear-attention's Triton kernels on a GPU.

flash-linear-attention 0.6.0 refuses the backward of its output kernel on Hopper with Triton 3.4 to 3.7.0; that part is
replaced here by torch.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32
EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule in fp32 over chunks of 32 tokens (Yang et al., Gated Delta Networks, 2024, section 3.3).

    q, k [B, T, Hk, K]; v [B, T, Hv, V]; g (log decay), beta [B, T, Hv]; returns [B, T, Hv, V].  q and k are
    L2-normalised here, q is scaled by K ** -0.5.
    """
    batch, length, heads, dim = v.shape
    repeat = heads // k.shape[2]
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    pad = -length % CHUNK
    if pad:
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (functional.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    n = (length + pad) // CHUNK
    q, k, v = (x.reshape(batch, n, CHUNK, heads, -1).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (x.reshape(batch, n, CHUNK, heads).permute(0, 3, 1, 2) for x in (g, beta))
    total = g.cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    lower = torch.tril((k * beta[..., None]) @ k.transpose(-1, -2) * decay, -1)
    right = torch.cat((v * beta[..., None], k * (beta * total.exp())[..., None]), -1)
    unit = torch.eye(CHUNK, device=q.device)
    solved = torch.linalg.solve_triangular(lower + unit, right, upper=False, unitriangular=True)
    u, w = solved[..., :dim], solved[..., dim:]
    k_end = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    carry = total[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, k.shape[-1], dim, device=q.device)
    states, news = [], []
    for i in range(n):
        new = u[:, :, i] - w[:, :, i] @ state
        states.append(state)
        news.append(new)
        state = state * carry[:, :, i] + k_end[:, :, i] @ new
    across = (q * total.exp()[..., None]) @ torch.stack(states, 2)
    within = (q @ k.transpose(-1, -2) * decay) @ torch.stack(news, 2)
    return (across + within).permute(0, 2, 3, 1, 4).reshape(batch, length + pad, heads, dim)[:, :length]


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, Hk, K], v [B, Hv, V], g, beta [B, Hv], state [B, Hv, K, V] -> (out [B, Hv, V], state)."""
    repeat = v.shape[1] // k.shape[1]
    q = (l2norm(q.float()) * q.shape[-1] ** -0.5).repeat_interleave(repeat, 1)
    k = l2norm(k.float()).repeat_interleave(repeat, 1)
    state = state * g.exp()[..., None, None]
    new = (v.float() - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state = state + k[..., None] * new[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def _output_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, dv: Tensor, g: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dw, dg) of the chunk output; v holds the new values, g the cumulative decay in log2 units,
    h and dh [B, n, Hv, K, V] the states at the start and end of each chunk."""
    batch, length, heads, dim = q.shape
    n, v_heads = h.shape[1], h.shape[2]
    repeat, chunk = v_heads // heads, length // n

    def fold(x: Tensor) -> Tensor:
        return x.reshape(batch, n, chunk, x.shape[2], -1).transpose(2, 3)

    def unfold(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(batch, length, v_heads, -1)

    qc, kc = fold(q.repeat_interleave(repeat, 2)), fold(k.repeat_interleave(repeat, 2))
    vc, doc, dvc, gc = fold(v), fold(do), fold(dv), fold(g.float())
    hb, dhb = h.to(v.dtype), dh.to(v.dtype)
    last = gc[..., -1:, :]
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = torch.exp2((gc - gc.transpose(-1, -2)).masked_fill(above, float("-inf")))
    ds = ((doc @ vc.transpose(-1, -2)).float() * decay * scale).to(k.dtype)
    dq = (doc @ hb.transpose(-1, -2)).float() * torch.exp2(gc) * scale
    dk = (vc @ dhb.transpose(-1, -2)).float() * torch.exp2(last - gc)
    dw = -(dvc.to(v.dtype) @ hb.transpose(-1, -2))
    dlast = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(last)[..., 0, 0] + (dk * kc.float()).sum((-1, -2))
    dq = dq + (ds @ kc).float()
    dk = dk + (ds.transpose(-1, -2) @ qc).float()
    dg = (dq * qc.float()).sum(-1) - (dk * kc.float()).sum(-1)
    dg = torch.cat((dg[..., :-1], dg[..., -1:] + dlast[..., None]), -1)
    dq = unfold(dq).view(batch, length, heads, repeat, dim).sum(3)
    dk = unfold(dk).view(batch, length, heads, repeat, dim).sum(3)
    return (
        dq.to(q.dtype),
        dk.to(k.dtype),
        unfold(dw.to(v.dtype)).contiguous(),
        unfold(dg[..., None]).squeeze(-1).contiguous(),
    )


def one_config_per_kernel() -> None:
    """Keeps one configuration of each autotuned Triton kernel: tuning them all costs more than it saves here."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def cost(config: Any) -> tuple[bool, bool, bool]:
        largest = max([v for v in config.kwargs.values() if isinstance(v, int)] + [0])
        return config.num_warps != 4, config.num_stages != 2, largest > 64

    def patched(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, sorted(configs, key=cost)[:1] if len(configs) > 1 else configs, *args, **kwargs)

    autotuner.Autotuner.__init__ = patched


def fla_rule(compiled: bool) -> Callable[..., Tensor]:
    """flash-linear-attention's rule with the replaced backward; the same arguments as `chunked`."""
    one_config_per_kernel()
    kernels: Any = importlib.import_module("fla.ops.gated_delta_rule.chunk")

    backward = torch.compile(_output_backward, dynamic=False) if compiled else _output_backward

    def replaced(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Any = None, g: Any = None,
        g_gamma: Any = None, dv: Any = None, scale: Any = None, state_v_first: bool = False,
        cu_seqlens: Any = None, chunk_size: int = 64, chunk_indices: Any = None,
    ) -> Any:  # fmt: skip
        assert (cu_seqlens, g_gamma, state_v_first) == (None, None, False), "only the plain form is replaced"
        return backward(q, k, v, do, h, dh, dv, g, scale)

    kernels.chunk_bwd_dqkwg = replaced

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out: Tensor = kernels.chunk_gated_delta_rule(q, k, v, g, beta.float(), use_qk_l2norm_in_kernel=True)[0]
        return out

    return rule
