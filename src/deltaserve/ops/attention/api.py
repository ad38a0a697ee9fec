"""Causal attention over keys and values in blocks. Knows blocks and positions, not who owns them.

`gated_attention` is what a layer of the model does between its projections; `paged_attention` its middle alone.

Shape letters: T tokens of the step, H query heads, G key heads, D head width. Query head h reads key head
h // (H // G).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.attention import cpu, reference
from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.ops.norm.api import gemma_rms_norm
from deltaserve.ops.rope.api import apply_rope


def gated_attention(
    q_THD: Tensor,
    gate_TX: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin: Tensor,
    kv_pool: Tensor,
    layout: Layout,
    scale: float,
) -> Tensor:
    """Norm and rotate queries and keys, `paged_attention`, and gate its output by sigmoid.

    Name       Shape                       Dtype       Meaning
    q          [T, H, D]                   any float   as projected; heads side by side, any stride from token to token
    gate       [T, H * D]                  as q        before its sigmoid
    k, v       [T, G, D]                   as q        as projected
    q_weight   [D]                         float32     1 + w of the queries' norm (see ops/norm)
    k_weight   [D]                         float32     and of the keys'
    eps        -                           -           of both norms
    cos_sin    [max_len, R]                float32     from `rope_table`; read at layout.position
    kv_pool    [2, num_blocks, 64, G, D]   any float   as in `paged_attention`
    scale      -                           -           factor on the scores, above 0
    returns    [T, H * D]                  as q        zeros for padding rows, where their gate is a number
    """
    _check(q_THD, k_TGD, v_TGD, kv_pool, layout)
    assert gate_TX.shape == (q_THD.shape[0], q_THD.shape[1] * q_THD.shape[2]), (
        f"attention: the gate is {tuple(gate_TX.shape)}, queries {tuple(q_THD.shape)}"
    )
    if has_kernels(q_THD):
        from deltaserve.ops.attention.triton_entry import enter

        q_THD = enter(
            q_THD, k_TGD, v_TGD, q_weight_D, k_weight_D, eps, cos_sin, layout.position, kv_pool, layout.kv_index
        )
        return _look_back(q_THD, gate_TX, kv_pool, layout, scale).flatten(1)
    weights = (q_weight_D, k_weight_D, eps, cos_sin)
    if cpu.takes(q_THD, gate_TX, k_TGD, v_TGD, weights, kv_pool):
        return cpu.attend(q_THD, gate_TX, k_TGD, v_TGD, weights, kv_pool, layout, scale)
    q_THD, k_TGD = gemma_rms_norm(q_THD, q_weight_D, eps), gemma_rms_norm(k_TGD, k_weight_D, eps)
    q_THD, k_TGD = apply_rope(q_THD, k_TGD, layout.position, cos_sin)
    return paged_attention(q_THD, k_TGD, v_TGD, kv_pool, layout, scale).flatten(1) * gate_TX.sigmoid()


def paged_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, kv_pool: Tensor, layout: Layout, scale: float
) -> Tensor:
    """Store the step's keys and values, then let every token attend to its sequence up to itself.

    Name       Shape                       Dtype       Meaning
    q          [T, H, D]                   any float   rows one after the other, without padding
    k, v       [T, G, D]                   as q
    kv_pool    [2, num_blocks, 64, G, D]   any float   keys, then values. Written at layout.kv_index (-1: nowhere),
                                                       read through layout.block_table. What a row does not own, and
                                                       the tail of its last block, may hold anything, NaN included
    scale      -                           -           factor on the scores
    returns    [T, H, D]                   as q        softmax in fp32 (fp64 for fp64 input); zeros for padding rows
                                                       (context_len 0)
    """
    _check(q_THD, k_TGD, v_TGD, kv_pool, layout)
    if has_kernels(q_THD):
        from deltaserve.ops.attention.triton_entry import store

        store(k_TGD, v_TGD, kv_pool, layout.kv_index)
        return _look_back(q_THD.contiguous(), None, kv_pool, layout, scale)
    reference.store(k_TGD, v_TGD, kv_pool, layout)
    parts = [
        (reference.step if segment.is_step else reference.chunk)(q_THD, kv_pool, layout, segment, scale)
        for segment in layout.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _look_back(q_THD: Tensor, gate_TX: Tensor | None, kv_pool: Tensor, layout: Layout, scale: float) -> Tensor:
    """By kernels: keys and values are in the pool, queries contiguous. Returns [T, H, D]."""
    from deltaserve.ops.attention.triton_chunk import chunk
    from deltaserve.ops.attention.triton_step import step

    out_THD = torch.empty_like(q_THD)
    for segment in layout.segments:
        (step if segment.is_step else chunk)(q_THD, gate_TX, out_THD, kv_pool, layout, segment, scale)
    return out_THD


def _check(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, kv_pool: Tensor, layout: Layout) -> None:
    tokens, key_heads, width = k_TGD.shape
    assert q_THD.shape[0] == tokens == layout.kv_index.shape[0], "attention: q, k and the layout differ in tokens"
    assert k_TGD.shape == v_TGD.shape, f"attention: k is {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)}"
    assert q_THD.shape[1] % key_heads == 0, f"attention: {q_THD.shape[1]} query heads on {key_heads} key heads"
    assert kv_pool.shape == (2, kv_pool.shape[1], BLOCK, key_heads, width), (
        f"attention: pool {tuple(kv_pool.shape)} does not hold blocks of {BLOCK} x {key_heads} x {width}"
    )
