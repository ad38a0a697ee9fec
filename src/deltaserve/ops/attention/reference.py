"""Paged causal attention in torch: blocks are gathered into a private copy, then attended to as one stretch.

What a sequence does not own never enters a product, because zero times NaN is NaN: the gathered copy is cut at the end
of the context, and where rows of different length are computed together it is zeroed beyond each row's end.

Shape letters beyond api.py's: B rows of a group, Q tokens per row, L keys, P query heads per key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.ops.numeric import cast, wide_dtype

SHORT = 128
"""Contexts up to this many keys count as equally long."""
GROUP_BYTES = 1 << 21
"""Size of the private copy for rows that are computed together: more would not stay in a core's cache."""
TILE = 256
"""Queries of a prompt that are computed at once."""
TILE_SCORES = 1 << 22
"""Most queries times keys of a tile: bounds the mask of a long context."""


@dataclass(frozen=True)
class Stored:
    token: Tensor | None
    """int64: tokens whose key and value are stored; None if all are."""
    kv_index: Tensor
    """int64: where."""


@dataclass(frozen=True)
class Group:
    """Rows of a step segment whose contexts are about equally long."""

    token: Tensor | None
    """int64 [B * Q]: their tokens, counted from the segment's first; None if the group is the whole segment."""
    block: Tensor
    """int32 [B * N]: their blocks; any valid id beyond a row's end."""
    num_keys: int
    """The longest context, L."""
    beyond: Tensor | None
    """int64: places of the gathered keys, counted over [B, N * BLOCK], that are within L but beyond the row's own
    context; None if there are none."""
    hidden: Tensor | None
    """float32 [B, Q, L]: -inf where a key comes after the token, else 0; None if all are 0."""


def store(k_TGD: Tensor, v_TGD: Tensor, kv_pool: Tensor, layout: Layout) -> None:
    stored = layout.once(stored_tokens)
    kv = torch.stack([k_TGD, v_TGD])
    if stored.token is not None:
        kv = kv.index_select(1, stored.token)
    kv_pool.view(2, -1, *k_TGD.shape[1:]).index_copy_(1, stored.kv_index, cast(kv, kv_pool.dtype))


def stored_tokens(layout: Layout) -> Stored:
    is_stored = layout.kv_index >= 0
    if bool(is_stored.all()):
        return Stored(None, layout.kv_index)
    token = is_stored.nonzero().squeeze(1)
    return Stored(token, layout.kv_index[token])


def step(q_THD: Tensor, kv_pool: Tensor, layout: Layout, segment: Segment, scale: float) -> Tensor:
    q_THD = segment.cut(q_THD)
    bytes_per_key = 2 * kv_pool.shape[3] * kv_pool.shape[4] * kv_pool.element_size()
    groups = layout.once(step_groups, segment, GROUP_BYTES // bytes_per_key)
    if len(groups) == 1 and groups[0].token is None:
        return _attend_group(q_THD, kv_pool, groups[0], segment.max_len, scale)
    out_THD = torch.zeros_like(q_THD)  # what padding rows return
    for group in groups:
        assert group.token is not None, "attention: a group of several is a whole segment"
        o_THD = _attend_group(q_THD.index_select(0, group.token), kv_pool, group, segment.max_len, scale)
        out_THD.index_copy_(0, group.token, o_THD)
    return out_THD


def _attend_group(q_THD: Tensor, kv_pool: Tensor, group: Group, length: int, scale: float) -> Tensor:
    heads, width = q_THD.shape[1:]
    k_heads = kv_pool.shape[3]
    wide = wide_dtype(q_THD.dtype)
    # The heads of one key head stand where queries stand: they read the same keys.
    q_BQGPD = cast(q_THD, wide).view(-1, length, k_heads, heads // k_heads, width)
    rows = q_BQGPD.shape[0]
    q_BGSD = q_BQGPD.permute(0, 2, 3, 1, 4).reshape(rows, k_heads, -1, width)
    hidden_B1SL = None
    if group.hidden is not None:
        hidden_BPQL = cast(group.hidden[:, None], wide).expand(-1, heads // k_heads, -1, -1)
        hidden_B1SL = hidden_BPQL.reshape(rows, 1, -1, group.num_keys)
    kv = kv_pool.index_select(1, group.block)
    if group.beyond is not None:
        kv.view(2, -1, k_heads, width).index_fill_(1, group.beyond, 0)
    kv_2BLGD = kv.view(2, rows, -1, k_heads, width)[:, :, : group.num_keys]
    k_BGLD, v_BGLD = cast(kv_2BLGD, wide).transpose(2, 3).unbind(0)
    o_BGSD = scaled_dot_product_attention(q_BGSD, k_BGLD, v_BGLD, attn_mask=hidden_B1SL, scale=scale)
    o_BQGPD = o_BGSD.view(rows, k_heads, -1, length, width).permute(0, 3, 1, 2, 4)
    return cast(o_BQGPD.reshape(-1, heads, width), q_THD.dtype)


def step_groups(layout: Layout, segment: Segment, max_keys: int) -> list[Group]:
    """Rows whose contexts are within a factor of two are computed together, up to about `max_keys`."""
    contexts = layout.context_len[segment.row_start : segment.row_end].tolist()
    open_groups: dict[int, list[int]] = {}
    closed: list[list[int]] = []
    for row, context in enumerate(contexts):
        if context == 0:
            continue
        size = max(context - 1, SHORT - 1).bit_length()
        rows = open_groups.setdefault(size, [])
        rows.append(row)
        if len(rows) << size >= max_keys:
            closed.append(open_groups.pop(size))
    closed += open_groups.values()
    return [_group(layout, segment, rows, {contexts[row] for row in rows}) for rows in closed]


def _group(layout: Layout, segment: Segment, rows: list[int], contexts: set[int]) -> Group:
    length, num_keys = segment.max_len, max(contexts)
    num_blocks = -(-num_keys // BLOCK)
    table = layout.block_table[segment.row_start : segment.row_end, :num_blocks]
    device = table.device
    if len(rows) == len(table) and len(contexts) == length == 1 and layout.first_key is None:
        return Group(None, table.flatten(), num_keys, None, None)  # what follows for one row, for less
    row = torch.tensor(rows, device=device)
    context = layout.context_len[segment.row_start : segment.row_end].long()[row]
    key = torch.arange(num_blocks * BLOCK, device=device)
    is_missing = key >= context[:, None]
    if layout.first_key is not None:
        is_missing |= key < layout.first_key[segment.row_start : segment.row_end][row][:, None]
    beyond = (is_missing & (key < num_keys)).flatten().nonzero().squeeze(1)
    last_seen_BQ = context[:, None] - length + torch.arange(length, device=device)
    is_hidden_BQL = (key[:num_keys] > last_seen_BQ[..., None]) | is_missing[:, None, :num_keys]
    hidden_BQL = torch.zeros(is_hidden_BQL.shape, device=device).masked_fill_(is_hidden_BQL, -torch.inf)
    return Group(
        token=None
        if len(rows) == len(table)
        else (row[:, None] * length + torch.arange(length, device=device)).flatten(),
        block=table.index_select(0, row).clamp_(min=0).flatten(),
        num_keys=num_keys,
        beyond=beyond if len(beyond) else None,
        hidden=hidden_BQL if bool(is_hidden_BQL.any()) else None,
    )


def chunk(q_THD: Tensor, kv_pool: Tensor, layout: Layout, segment: Segment, scale: float) -> Tensor:
    """Row by row: each gathers its context once and goes through it in tiles of queries."""
    q_THD = segment.cut(q_THD)
    out_THD = torch.zeros_like(q_THD)
    bounds = segment.cu_seqlens.tolist()
    contexts = layout.context_len[segment.row_start : segment.row_end].tolist()
    first_key = [0] * len(contexts)
    if layout.first_key is not None:
        first_key = layout.first_key[segment.row_start : segment.row_end].tolist()
    for row, (context, first) in enumerate(zip(contexts, first_key, strict=True)):
        if context <= first:  # no key is seen
            continue
        block = layout.block_table[segment.row_start + row, : -(-context // BLOCK)].long()
        kv = kv_pool.index_select(1, block).flatten(1, 2)[:, first:context]
        own = slice(bounds[row], bounds[row + 1])
        _attend_row(q_THD[own], kv, out_THD[own], scale)
    return out_THD


def _attend_row(q_THD: Tensor, kv_2LGD: Tensor, out_THD: Tensor, scale: float) -> None:
    """`q` are the last tokens of the context `kv`. Writes `out`."""
    tokens, heads, width = q_THD.shape
    context, k_heads = kv_2LGD.shape[1:3]
    wide = wide_dtype(q_THD.dtype)
    q_GPTD = cast(q_THD, wide).view(tokens, k_heads, -1, width).permute(1, 2, 0, 3)
    k_GPLD, v_GPLD = cast(kv_2LGD, wide).permute(0, 2, 1, 3)[:, :, None].expand(-1, -1, heads // k_heads, -1, -1)
    tile = max(1, min(TILE, TILE_SCORES // context))
    for first in range(0, tokens, tile):
        last = min(first + tile, tokens)
        end = context - tokens + last
        seen = torch.ones(last - first, end, dtype=torch.bool, device=q_THD.device).tril(end - last + first)
        o_GPTD = scaled_dot_product_attention(
            q_GPTD[:, :, first:last], k_GPLD[:, :, :end], v_GPLD[:, :, :end], attn_mask=seen, scale=scale
        )
        out_THD[first:last] = o_GPTD.permute(2, 0, 1, 3).reshape(last - first, heads, width)
