"""Causal depthwise convolution in torch.

A row's window followed by its inputs is its *extended* row, in which every token sees W consecutive inputs. Extended
rows laid end to end have P places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.ops.layout import Layout, Segment, read_slots, slot_index


@dataclass(frozen=True)
class Places:
    """Where things are in the extended rows of a segment."""

    token: Tensor
    """int64 [tokens]: a token's own input."""
    window: Tensor
    """int64 [rows * (W - 1)]: the windows before the rows."""
    kept: Tensor
    """int64 [kept * (W - 1)]: the windows after the tokens whose state is kept."""


def step(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """All rows have `max_len` tokens, N: the extended rows are one rectangle."""
    taps = weight_CW.shape[1]
    x_BNC = x_TC[segment.token_start : segment.token_end].view(-1, segment.max_len, x_TC.shape[1])
    window_BWC = read_slots(pool_SWC, layout.once(slot_index, segment))
    extended_BPC = torch.cat([window_BWC, x_BNC], dim=1)
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    y_BNC = (extended_BPC.to(wide).unfold(1, taps, 1) * weight_CW.to(wide)).sum(-1)
    _keep(extended_BPC.flatten(0, 1), pool_SWC, layout, segment)
    return functional.silu(y_BNC).to(x_TC.dtype).flatten(0, 1)


def chunk(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """Rows of any length: convolved as one, and what straddles two rows is not taken."""
    taps = weight_CW.shape[1]
    places = layout.once(extended_places, segment, taps)
    window_BWC = read_slots(pool_SWC, layout.once(slot_index, segment))
    extended_PC = x_TC.new_empty(len(places.window) + len(places.token), x_TC.shape[1])
    extended_PC.index_copy_(0, places.window, window_BWC.flatten(0, 1))
    extended_PC.index_copy_(0, places.token, x_TC[segment.token_start : segment.token_end])

    wide = torch.promote_types(x_TC.dtype, torch.float32)
    weight_WC = weight_CW.t().to(wide).contiguous()
    wide_PC = extended_PC.to(wide)
    last = len(wide_PC) - taps + 1
    y_PC = wide_PC[:last] * weight_WC[0]
    for tap in range(1, taps):
        y_PC.addcmul_(wide_PC[tap : tap + last], weight_WC[tap])
    y_TC = y_PC.index_select(0, places.token - (taps - 1))
    _keep(extended_PC, pool_SWC, layout, segment)
    return functional.silu(y_TC).to(x_TC.dtype)


def extended_places(layout: Layout, segment: Segment, taps: int) -> Places:
    cu_seqlens = segment.cu_seqlens.long()
    device = cu_seqlens.device
    row = torch.arange(len(cu_seqlens) - 1, device=device)
    row_of_token = row.repeat_interleave(cu_seqlens.diff())
    token = torch.arange(len(row_of_token), device=device) + (row_of_token + 1) * (taps - 1)
    window = (cu_seqlens[:-1] + row * (taps - 1))[:, None] + torch.arange(taps - 1, device=device)
    kept_token = layout.once(slot_index, segment).kept_token
    kept = token[kept_token, None] + torch.arange(2 - taps, 1, device=device)
    return Places(token, window.flatten(), kept.flatten())


def _keep(extended_PC: Tensor, pool_SWC: Tensor, layout: Layout, segment: Segment) -> None:
    taps = pool_SWC.shape[1] + 1
    kept_PC = extended_PC.index_select(0, layout.once(extended_places, segment, taps).kept)
    pool_SWC.index_copy_(0, layout.once(slot_index, segment).kept_slot, kept_PC.view(-1, *pool_SWC.shape[1:]))
