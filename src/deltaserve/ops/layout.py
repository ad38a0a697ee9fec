"""Where the rows of one step keep their memory, as tensors. Built once a step; read by the stateful ops only.

Shape letters: B rows of the step, T tokens of the step (no padding), N the longest block table of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Derived = TypeVar("Derived")

BLOCK = 64
"""Tokens in one KV block."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Contiguous rows of one step that are computed alike. Only the facades in `api.py` loop over segments.

    Rows of a *step* segment have `max_len` tokens each (decode: 1; more when several tokens are checked at once).
    Rows of a *chunk* segment have any number of tokens from 1 to `max_len` (prefill). Rows of padding may
    have none, and begin where the next row does or behind the last token of all.
    """

    is_step: bool
    row_start: int
    row_end: int
    token_start: int
    token_end: int
    max_len: int
    cu_seqlens: Tensor
    """int32 [rows + 1]: first token of each row, counted from `token_start`."""

    def cut(self, x: Tensor) -> Tensor:
        """The segment's tokens of `x` [T, ...]."""
        if self.token_start == 0 and self.token_end == x.shape[0]:
            return x
        return x[self.token_start : self.token_end]


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
    first_key      [B]        int32   attention sees no key of the row before this position; None: there are all
    is_padded      -          -       whether tokens without a place for their key (kv_index) belong to nobody
    """

    segments: tuple[Segment, ...]
    read_slot: Tensor
    write_slot: Tensor
    position: Tensor
    block_table: Tensor
    kv_index: Tensor
    context_len: Tensor
    first_key: Tensor | None = None
    is_padded: bool = False

    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `once` has derived so far; dies with the layout."""

    def once(self, derive: Callable[..., Derived], *args: Any) -> Derived:
        """`derive(self, *args)`, computed at the first layer that asks and shared by the others of the step.

        The tensors of a layout are not changed after the first call.
        """
        key = (derive, *args)
        if key not in self.memo:
            self.memo[key] = derive(self, *args)
        result: Derived = self.memo[key]
        return result

    @staticmethod
    def from_rows(
        lengths: Sequence[int],
        *,
        num_step: int = 0,
        starts: Sequence[int] | None = None,
        read_slots: Sequence[int] | None = None,
        write_slots: Sequence[Sequence[int]] | None = None,
        blocks: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """The layout of rows given as plain integers; -1 wherever nothing is given.

        lengths        tokens of each row; the first `num_step` rows, all equally long, are the step segment
        starts         tokens of each row's sequence before this step; 0 by default
        read_slots     one per row
        write_slots    one per token of each row
        blocks         KV blocks of each row's sequence, enough for starts + lengths
        """
        rows = range(len(lengths))
        starts = [0 for _ in rows] if starts is None else starts
        read_slots = [-1 for _ in rows] if read_slots is None else read_slots
        write_slots = [[-1] * length for length in lengths] if write_slots is None else write_slots
        blocks = [[] for _ in rows] if blocks is None else blocks
        assert all(len(slots) == length for slots, length in zip(write_slots, lengths, strict=True)), (
            "layout: one write slot per token"
        )
        positions = [[starts[row] + i for i in range(lengths[row])] for row in rows]
        table = torch.full((len(lengths), max(map(len, blocks), default=0)), -1, dtype=torch.int32)
        for row in rows:
            table[row, : len(blocks[row])] = torch.tensor(blocks[row], dtype=torch.int32)
        kv_index = [
            blocks[row][position // BLOCK] * BLOCK + position % BLOCK if blocks[row] else -1
            for row in rows
            for position in positions[row]
        ]

        def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Layout(
            segments=_segments(lengths, num_step, device),
            read_slot=tensor(read_slots),
            write_slot=tensor([slot for slots in write_slots for slot in slots]),
            position=tensor([position for row in positions for position in row]),
            block_table=table.to(device),
            kv_index=tensor(kv_index),
            context_len=tensor([starts[row] + lengths[row] if blocks[row] else 0 for row in rows], torch.int32),
        )


def plain(layout: Layout) -> Layout:
    """The layout itself, whose tensors are as its table says and lie without gaps: kernels take their addresses."""
    longs = (layout.read_slot, layout.write_slot, layout.position, layout.kv_index)
    ints = [layout.block_table, layout.context_len, *(segment.cu_seqlens for segment in layout.segments)]
    ints += [] if layout.first_key is None else [layout.first_key]
    for kind, tensors in ((torch.int64, longs), (torch.int32, ints)):
        for tensor in tensors:
            assert tensor.dtype == kind, f"layout: {tensor.dtype} where {kind} is said"
            assert tensor.is_contiguous(), f"layout: strides {tensor.stride()} of {tuple(tensor.shape)}"
    return layout


def _segments(lengths: Sequence[int], num_step: int, device: torch.device | str) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    token = 0
    for is_step, first, last in ((True, 0, num_step), (False, num_step, len(lengths))):
        if first == last:
            continue
        own = lengths[first:last]
        assert not is_step or len(set(own)) == 1, f"layout: rows of a step segment have {sorted(set(own))} tokens"
        bounds = [0]
        for length in own:
            assert length > 0, "layout: a row has no token"
            bounds.append(bounds[-1] + length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        segments.append(Segment(is_step, first, last, token, token + bounds[-1], max(own), cu_seqlens))
        token += bounds[-1]
    return tuple(segments)


@dataclass(frozen=True)
class SlotIndex:
    """The slots of one segment, for ops in torch. Made by `slot_index`, through `Layout.once`."""

    read: Tensor
    """int64 [rows]: what to gather; a row that starts from the zero state has a valid id here all the same."""
    fresh: Tensor | None
    """int64: rows that start from the zero state; None if no row does."""
    kept_token: Tensor
    """int64 [kept]: tokens, counted from the segment's first, after which the state is kept."""
    kept_slot: Tensor
    """int64 [kept]: where."""
    in_place: slice | None
    """Set if the rows have one token, are all kept where they were read, and these slots are neighbours in order."""


@dataclass(frozen=True)
class Kept:
    """The states to keep of one place in the rows of a step segment."""

    row: Tensor | None
    """int64; None if it is all rows, in order."""
    slot: Tensor
    """int64"""


def slot_index(layout: Layout, segment: Segment) -> SlotIndex:
    read = layout.read_slot[segment.row_start : segment.row_end]
    write = segment.cut(layout.write_slot)
    reads, writes = read.tolist(), write.tolist()
    fresh = [row for row, slot in enumerate(reads) if slot < 0]
    kept = [token for token, slot in enumerate(writes) if slot >= 0]
    in_place = slice(reads[0], reads[0] + len(reads))
    is_in_place = reads == writes == list(range(in_place.start, in_place.stop)) and reads[0] >= 0
    kept_token = torch.tensor(kept, dtype=torch.int64, device=read.device)
    return SlotIndex(
        read=read.clamp(min=0) if fresh else read,
        fresh=torch.tensor(fresh, device=read.device) if fresh else None,
        kept_token=kept_token,
        kept_slot=write if len(kept) == len(writes) else write[kept_token],
        in_place=in_place if segment.is_step and is_in_place else None,
    )


def kept_by_place(layout: Layout, segment: Segment) -> list[Kept]:
    """For each place in the rows of a step segment, what to keep."""
    index = layout.once(slot_index, segment)
    num_rows, length = segment.row_end - segment.row_start, segment.max_len
    if length == 1 and len(index.kept_token) == num_rows:
        return [Kept(None, index.kept_slot)]
    row, place = index.kept_token // length, index.kept_token % length
    kept = []
    for i in range(length):
        here = (place == i).nonzero().squeeze(1)
        kept.append(Kept(None if len(here) == num_rows else row[here], index.kept_slot[here]))
    return kept


def read_slots(pool: Tensor, index: SlotIndex) -> Tensor:
    """A copy of the states that the rows of a segment start from: [rows, ...].

    The zero state is written over what was gathered, never multiplied: a slot may hold NaN.
    """
    state = pool.index_select(0, index.read)
    return state if index.fresh is None else state.index_fill_(0, index.fresh, 0)


def keep_slots(pool: Tensor, state: Tensor, kept: Kept) -> None:
    """Write the states [rows, ...] of one place."""
    if kept.row is not None:
        state = state.index_select(0, kept.row)
    pool.index_copy_(0, kept.slot, state if state.dtype == pool.dtype else state.to(pool.dtype))
