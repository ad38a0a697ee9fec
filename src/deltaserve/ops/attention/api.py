"""Causal attention over keys and values in blocks. Knows blocks and positions, not who owns them.

Shape letters: T tokens of the step, H query heads, G key heads, D head width. Query head h reads key head
h // (H // G).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.attention import reference
from deltaserve.ops.layout import BLOCK, Layout


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
    tokens, key_heads, width = k_TGD.shape
    assert q_THD.shape[0] == tokens == layout.kv_index.shape[0], "attention: q, k and the layout differ in tokens"
    assert k_TGD.shape == v_TGD.shape, f"attention: k is {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)}"
    assert q_THD.shape[1] % key_heads == 0, f"attention: {q_THD.shape[1]} query heads on {key_heads} key heads"
    assert kv_pool.shape == (2, kv_pool.shape[1], BLOCK, key_heads, width), (
        f"attention: pool {tuple(kv_pool.shape)} does not hold blocks of {BLOCK} x {key_heads} x {width}"
    )
    reference.store(k_TGD, v_TGD, kv_pool, layout)
    parts = [
        (reference.step if segment.is_step else reference.chunk)(q_THD, kv_pool, layout, segment, scale)
        for segment in layout.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
