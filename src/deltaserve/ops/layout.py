"""Where the rows of one step keep their memory, as tensors. Built once a step; read by the stateful ops only.

Shape letters: B rows of the step, T tokens of the step (no padding), N the longest block table of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 64
"""Tokens in one KV block."""


@dataclass(frozen=True)
class Segment:
    """Contiguous rows of one step that are computed alike. Only the facades in `api.py` loop over segments.

    Rows of a *step* segment have `max_len` tokens each (decode: 1; more when several tokens are checked at once).
    Rows of a *chunk* segment have any number of tokens from 1 to `max_len` (prefill).
    """

    is_step: bool
    row_start: int
    row_end: int
    token_start: int
    token_end: int
    max_len: int
    cu_seqlens: Tensor
    """int32 [rows + 1]: first token of each row, counted from `token_start`."""


@dataclass(frozen=True)
class Layout:
    """
    Name           Shape      Dtype   Meaning
    read_slot      [B]        int64   the state before a row's first token; -1 is the zero state
    write_slot     [T]        int64   where to keep the state after a token; -1 keeps nothing
    position       [T]        int64   a token's number in its sequence
    block_table    [B, N]     int32   KV blocks of a row's sequence, -1 beyond its end
    kv_index       [T]        int64   block * BLOCK + offset, where a token's key and value go; -1 goes nowhere
    context_len    [B]        int32   tokens of the row's sequence after this step
    """

    segments: tuple[Segment, ...]
    read_slot: Tensor
    write_slot: Tensor
    position: Tensor
    block_table: Tensor
    kv_index: Tensor
    context_len: Tensor
