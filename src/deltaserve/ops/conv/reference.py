"""Causal depthwise convolution in torch.

A row's window followed by its inputs is its *extended* row, in which every token sees W consecutive inputs. Extended
rows laid end to end have P places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.ops.layout import Kept, Layout, Segment, keep_slots, kept_by_place, read_slots, slot_index
from deltaserve.ops.numeric import cast, wide_dtype


@dataclass(frozen=True)
class Places:
    """Where things are in the extended rows of a chunk segment."""

    token: Tensor | None
    """int64 [tokens]: the first of the W inputs that a token sees; None for one row, where it is the token's number."""
    kept: Tensor
    """int64 [kept * (W - 1)]: the windows after the tokens whose state is kept."""


def step(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """All rows have `max_len` tokens, N: the extended rows are one rectangle."""
    (channels, taps), length = weight_CW.shape, segment.max_len
    wide = wide_dtype(x_TC.dtype)
    x_BNC = segment.cut(x_TC).view(-1, length, channels)
    extended_BPC = torch.cat([read_slots(pool_SWC, layout.once(slot_index, segment)), x_BNC], dim=1)
    weight_WC, wide_BPC = cast(weight_CW, wide).t(), cast(extended_BPC, wide)
    outputs = []
    for place, kept in enumerate(layout.once(kept_by_place, segment)):
        outputs.append((wide_BPC[:, place : place + taps] * weight_WC).sum(1))
        keep_slots(pool_SWC, extended_BPC[:, place + 1 : place + taps], kept)
    y_TC = outputs[0] if length == 1 else torch.stack(outputs, dim=1).view(-1, channels)
    return cast(functional.silu(y_TC), x_TC.dtype)


def chunk(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """Rows of any length: convolved as one, and what straddles two rows is not taken."""
    taps, wide = weight_CW.shape[1], wide_dtype(x_TC.dtype)
    places, index = layout.once(extended_places, segment, taps), layout.once(slot_index, segment)
    windows = read_slots(pool_SWC, index).unbind(0)
    rows = segment.cut(x_TC).split_with_sizes(layout.once(row_lengths, segment))
    extended_PC = torch.cat([part for row in zip(windows, rows, strict=True) for part in row])

    weight_WC, wide_PC = cast(weight_CW, wide).t().contiguous(), cast(extended_PC, wide)
    last = wide_PC.shape[0] - taps + 1
    y_PC = wide_PC[:last] * weight_WC[0]
    for tap in range(1, taps):
        y_PC.addcmul_(wide_PC[tap : tap + last], weight_WC[tap])
    y_TC = y_PC if places.token is None else y_PC.index_select(0, places.token)
    kept_WC = extended_PC.index_select(0, places.kept).view(-1, *pool_SWC.shape[1:])
    keep_slots(pool_SWC, kept_WC, Kept(None, index.kept_slot))
    return cast(functional.silu(y_TC), x_TC.dtype)


def extended_places(layout: Layout, segment: Segment, taps: int) -> Places:
    device = segment.cu_seqlens.device
    row = torch.arange(segment.row_end - segment.row_start, device=device)
    row_of_token = row.repeat_interleave(segment.cu_seqlens.diff())
    token = torch.arange(segment.token_end - segment.token_start, device=device) + row_of_token * (taps - 1)
    kept_token = layout.once(slot_index, segment).kept_token
    kept = token[kept_token, None] + torch.arange(1, taps, device=device)
    return Places(None if row.shape[0] == 1 else token, kept.flatten())


def row_lengths(layout: Layout, segment: Segment) -> list[int]:
    lengths: list[int] = segment.cu_seqlens.diff().tolist()
    return lengths
