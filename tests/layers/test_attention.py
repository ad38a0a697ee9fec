"""Gated attention over rows of different lengths equals the formula for each row alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.layers.attention import Attention
from deltaserve.layers.rotary import Rotary
from deltaserve.ops.layout import BLOCK
from tests.layers.filled import CPU, F64, context, filled

HEADS, KV_HEADS, WIDTH, HIDDEN = 6, 2, 8, 10


def attention(ordinal: int = 0) -> Attention:
    return filled(
        Attention(
            ordinal=ordinal,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            rotary=Rotary(128, 4, 100.0, None, CPU),
            eps=1e-6,
            dtype=F64,
            device=CPU,
        )
    )


def by_formula(layer: Attention, x_TE: Tensor) -> Tensor:
    """The layer on one whole row, from the fused weight's documented order q|gate|k|v."""
    parts = [HEADS * WIDTH] * 2 + [KV_HEADS * WIDTH] * 2
    q, gate, k, v = torch.split(x_TE @ layer.qgkv_proj.weight.T, parts, dim=-1)
    tokens = len(x_TE)
    q, k, v = q.view(tokens, HEADS, WIDTH), k.view(tokens, KV_HEADS, WIDTH), v.view(tokens, KV_HEADS, WIDTH)
    q, k = layer.rotary(layer.q_norm(q), layer.k_norm(k), torch.arange(tokens))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    out: Tensor = (o * gate.sigmoid()) @ layer.o_proj.weight.T
    return out


def pool() -> Tensor:
    return torch.full((2, 8, BLOCK, KV_HEADS, WIDTH), float("nan"), dtype=F64)


def test_ragged_rows_then_their_next_tokens() -> None:
    layer = attention()
    rows = [torch.randn(length, HIDDEN, dtype=F64) for length in (70, 1, 5)]
    kv = [pool()]
    cuts = [60, 1, 2]
    first = layer(torch.cat([row[:cut] for row, cut in zip(rows, cuts, strict=True)]), context(cuts, kv=kv))
    expected = [by_formula(layer, row) for row in rows]
    torch.testing.assert_close(first, torch.cat([part[:cut] for part, cut in zip(expected, cuts, strict=True)]))
    # The row of one token has none left; a token more for it keeps the rows' memory where it was.
    rows[1] = torch.cat([rows[1], torch.randn(1, HIDDEN, dtype=F64)])
    lengths = [len(row) - cut for row, cut in zip(rows, cuts, strict=True)]
    second = layer(
        torch.cat([row[cut:] for row, cut in zip(rows, cuts, strict=True)]), context(lengths, kv=kv, starts=cuts)
    )
    expected = [by_formula(layer, row)[cut:] for row, cut in zip(rows, cuts, strict=True)]
    torch.testing.assert_close(second, torch.cat(expected))


def test_the_ordinal_picks_the_pool() -> None:
    layer, pools = attention(ordinal=1), [pool(), pool()]
    layer(torch.randn(3, HIDDEN, dtype=F64), context([3], kv=pools))
    assert pools[0].isnan().all()
    assert not pools[1][:, 0, :3].isnan().any()
