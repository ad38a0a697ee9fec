"""How rows of any length are cut into chunks, on their device. Knows no op.

Chunks begin at multiples of CHUNK of the position in the sequence, wherever a row begins: so the state at the end of a
block is the state at the end of a chunk, and a row's rounding does not depend on how its prompt was cut into steps at
the ends of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.layout import BLOCK, Layout, Segment

CHUNK = BLOCK
"""Tokens in one chunk."""


def chunk_table(layout: Layout, segment: Segment) -> Tensor:
    """int32 [chunks at most, 4]: row; token at the chunk's first place; first token of the row; token after its last.

    Tokens are counted from the segment's first. Where a row begins inside a chunk, the chunk's first place lies before
    the row's first token, and may be negative. Spare entries have a row without tokens, and such a row has no other.
    Through `Layout.once`; nothing waits for the device: the number of entries is what rows of these many tokens could
    need.
    """
    rows, num_tokens = segment.row_end - segment.row_start, segment.token_end - segment.token_start
    bound = num_tokens // CHUNK + 2 * rows
    bounds = segment.cu_seqlens.long()
    first, end = bounds[:-1], bounds[1:]
    offset = segment.cut(layout.position)[first.clamp(max=num_tokens - 1)] % CHUNK
    count = torch.where(end > first, (offset + end - first + CHUNK - 1) // CHUNK, 0)
    last = count.cumsum(0)
    number = torch.arange(bound, device=bounds.device)
    row = torch.searchsorted(last, number, right=True)
    own = row.clamp(max=rows - 1)
    base = first[own] - offset[own] + (number - last[own] + count[own]) * CHUNK
    table = torch.stack([own, base, first[own], end[own]], dim=1)
    return torch.where((row < rows)[:, None], table, 0).int()
