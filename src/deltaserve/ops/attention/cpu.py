"""Gated attention on a CPU that kernels compute rather than torch: in float32. Knows no kernel's inside."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.attention import reference
from deltaserve.ops.cpu import LANES, floats, is_worth_threads, kernels, takes_tensors
from deltaserve.ops.layout import BLOCK, Layout, Segment

Weights = tuple[Tensor, Tensor, float, Tensor]
"""q_weight, k_weight, eps and cos_sin of `api.gated_attention`."""


MANY_THREADS = 6
"""That torch needs to be as fast for rows that extend: it copies the keys and values that it reads."""


def takes(q_THD: Tensor, gate_TX: Tensor, k_TGD: Tensor, v_TGD: Tensor, weights: Weights, kv_pool: Tensor) -> bool:
    """Whether `attend` computes this."""
    q_weight_D, k_weight_D, _, cos_sin = weights
    width = q_THD.shape[2]
    return (
        width % LANES == 0
        and takes_tensors(q_THD, gate_TX, k_TGD, v_TGD, q_weight_D, k_weight_D, cos_sin, kv_pool)
        and q_THD.stride()[1:] == k_TGD.stride()[1:] == v_TGD.stride()[1:] == (width, 1)
        and gate_TX.stride(1) == 1
        and cos_sin.is_contiguous()
        and kv_pool.is_contiguous()
    )


def attend(
    q_THD: Tensor,
    gate_TX: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    weights: Weights,
    kv_pool: Tensor,
    layout: Layout,
    scale: float,
) -> Tensor:
    """As `api.gated_attention`. Products of a prompt's many queries are left to torch, and what is for many threads."""
    numba_attention = kernels("attention.numba_attention")
    q_THD = numba_attention.enter(q_THD, k_TGD, v_TGD, *weights, kv_pool, layout)
    out_TX = floats(q_THD.shape[0], gate_TX.shape[1])
    for segment in layout.segments:
        if segment.is_step and not _is_worth_threads(q_THD, layout, segment):
            numba_attention.step(q_THD, gate_TX, out_TX, kv_pool, layout, segment, scale)
        else:
            look_back = reference.step if segment.is_step else reference.chunk
            o_TX = look_back(q_THD, kv_pool, layout, segment, scale).flatten(1)
            torch.mul(o_TX, segment.cut(gate_TX).sigmoid(), out=segment.cut(out_TX))
    return out_TX


def _is_worth_threads(q_THD: Tensor, layout: Layout, segment: Segment) -> bool:
    keys, (_, heads, width) = layout.block_table.shape[1] * BLOCK, q_THD.shape
    tokens = segment.token_end - segment.token_start
    return is_worth_threads(2 * tokens * keys * heads * width, MANY_THREADS)
