"""From a plan's integers to the tensors of one step.

Knows the seats' tokens, lengths and block tables, which outlive a step. Knows no model, no weights and no queue; a
plan is obeyed, not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.core.plan import Plan, Seating
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.runner.memory import Pools, blocks_of

Ints = npt.NDArray[np.int64]


class Seats:
    """What the runner remembers of each request between steps, one row per seat.

    Name         Shape             Meaning
    token_ids    [seats, max_len]  tokens known so far, sampled ones included
    block_table  [seats, blocks]   KV blocks in the sequence's order
    num_blocks   [seats]           how many of them are set
    num_prompt   [seats]           tokens of the prompt
    num_top      [seats]           likely tokens to tell for each prompt token; -1 tells nothing
    num_ahead    [seats]           the MTP layer's entries are there for positions 1 to num_ahead - 1, since the request
                                   took its seat
    """

    def __init__(self, num_seats: int, max_model_len: int) -> None:
        self.max_len = max_model_len
        # One token more than the context: the last token is sampled, and never fed.
        self.token_ids = np.zeros((num_seats, max_model_len + 1), dtype=np.int64)
        self.block_table = np.full((num_seats, blocks_of(max_model_len)), -1, dtype=np.int32)
        self.num_blocks = np.zeros(num_seats, dtype=np.int64)
        self.num_prompt = np.zeros(num_seats, dtype=np.int64)
        self.num_top = np.full(num_seats, -1, dtype=np.int64)
        self.num_ahead = np.zeros(num_seats, dtype=np.int64)

    def seat(self, seating: Seating) -> None:
        """A request takes the seat; nothing of the one before is left."""
        seat, num_tokens = seating.seat, len(seating.token_ids)
        self.token_ids[seat, :num_tokens] = seating.token_ids
        self.num_prompt[seat] = seating.num_prompt
        num_top = seating.params.prompt_logprobs
        self.num_top[seat] = -1 if num_top is None else num_top
        self.num_ahead[seat] = 0
        self.block_table[seat] = -1
        self.num_blocks[seat] = 0
        self.append_blocks(seat, seating.blocks)

    def append_blocks(self, seat: int, blocks: Sequence[int]) -> None:
        if blocks:
            first = self.num_blocks[seat]
            self.block_table[seat, first : first + len(blocks)] = blocks
            self.num_blocks[seat] = first + len(blocks)


@dataclass(frozen=True)
class Batch:
    """One step, ready to run.

    Name         Shape  Dtype   Meaning
    token_ids    [T]    int64   tokens to compute, row after row
    context             -       where their memory is
    last         [R]    int64   the tokens whose logits give new ones, by their number in the step: of each sampling row
                                the last one, and one more for each guess at its end
    row_starts   [B+1]  -       first token of each row in the step (numpy)
    sampling     [N]    -       rows that sample (numpy)
    seats        [B]    -       each row's seat (numpy)
    starts       [B]    -       tokens of each row's sequence before the step (numpy)
    ends         [B]    -       and after it (numpy), all guesses included
    num_guesses  [B]    -       guesses at each row's end (numpy)
    scored              -       (row, likely tokens to tell) of rows whose prompt tokens' logprobs are asked for
    """

    token_ids: Tensor
    context: ForwardContext
    last: Tensor
    row_starts: Ints
    sampling: Ints
    seats: Ints
    starts: Ints
    ends: Ints
    num_guesses: Ints
    scored: list[tuple[int, int]]


class Inputs:
    """Builds the batch of a plan on the device of the pools."""

    def __init__(self, seats: Seats, pools: Pools, device: torch.device) -> None:
        self.seats, self.pools, self.device = seats, pools, device

    def build(self, plan: Plan) -> Batch:
        rows, table = plan.rows, self.seats
        for row in rows:
            table.append_blocks(row.seat, row.new_blocks)
        seats = np.array([row.seat for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        row_starts = np.concatenate(([0], counts.cumsum()))
        sampling = np.flatnonzero(np.array([row.samples for row in rows]))
        num_guesses = np.array([row.num_guesses for row in rows], dtype=np.int64)
        ends = starts + counts
        token_ids, layout, last = lay_out(
            self.device,
            table,
            Span(seats, starts, counts, plan.num_decode),
            read_slot_B=np.array([row.read_slot for row in rows], dtype=np.int64),
            write_slot_T=np.fromiter(
                chain.from_iterable(row.write_slots for row in rows), np.int64, int(row_starts[-1])
            ),
            take_along=_tails(row_starts[1:][sampling], 1 + num_guesses[sampling]),
        )
        context = ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)
        num_top = table.num_top[seats]
        scored = [
            (int(row), int(num_top[row]))
            for row in np.flatnonzero((num_top >= 0) & (starts + 1 < table.num_prompt[seats]))
        ]
        return Batch(token_ids, context, last, row_starts, sampling, seats, starts, ends, num_guesses, scored)


@dataclass(frozen=True)
class Span:
    """Tokens `starts` to `starts + counts - 1` of the sequences in `seats`; the first `num_decode` rows extend."""

    seats: Ints
    starts: Ints
    counts: Ints
    num_decode: int


def lay_out(
    device: torch.device,
    table: Seats,
    span: Span,
    read_slot_B: Ints,
    write_slot_T: Ints,
    take_along: Ints,
    first_key: int = 0,
) -> tuple[Tensor, Layout, Tensor]:
    """The span's token ids [T] int64 and their layout, in one copy to the device, and `take_along` with them."""
    seats, counts = span.seats, span.counts
    row_starts = np.concatenate(([0], counts.cumsum()))
    seat_T = np.repeat(seats, counts)
    position_T = np.arange(int(row_starts[-1])) + np.repeat(span.starts - row_starts[:-1], counts)
    block_T = table.block_table[seat_T, position_T // BLOCK].astype(np.int64)
    assert block_T.min() >= 0, "a token has no KV block"
    ends = span.starts + counts
    ranges = _alike(counts, span.num_decode)
    token_ids, read_slot, write_slot, position, kv_index, block_table, context_len, along, *cu_seqlens = to_device(
        device,
        table.token_ids[seat_T, position_T],
        read_slot_B,
        write_slot_T,
        position_T,
        block_T * BLOCK + position_T % BLOCK,
        table.block_table[seats, : blocks_of(int(ends.max()))],
        ends.astype(np.int32),
        take_along,
        *((row_starts[first : end + 1] - row_starts[first]).astype(np.int32) for first, end, _ in ranges),
    )
    segments = tuple(
        Segment(
            is_step=is_step,
            row_start=first,
            row_end=end,
            token_start=int(row_starts[first]),
            token_end=int(row_starts[end]),
            max_len=int(counts[first:end].max()),
            cu_seqlens=cu,
        )
        for (first, end, is_step), cu in zip(ranges, cu_seqlens, strict=True)
    )
    layout = Layout(segments, read_slot, write_slot, position, block_table, kv_index, context_len, first_key=first_key)
    return token_ids, layout, along


def _tails(ends: Ints, lengths: Ints) -> Ints:
    """The last `lengths[i]` numbers before each of `ends`."""
    starts = lengths.cumsum() - lengths
    return np.arange(int(lengths.sum())) + np.repeat(ends - lengths - starts, lengths)


def _alike(counts: Ints, num_decode: int) -> list[tuple[int, int, bool]]:
    """(first row, row after the last, is a step) of each segment: extending rows of one length, then the rest."""
    cuts = [0, *(1 + np.flatnonzero(np.diff(counts[:num_decode]))), num_decode] if num_decode else [0]
    ranges = [(int(first), int(end), True) for first, end in pairwise(cuts)]
    if num_decode < len(counts):
        ranges.append((num_decode, len(counts), False))
    return ranges


def to_device(device: torch.device, *arrays: npt.NDArray[np.int32] | Ints) -> list[Tensor]:
    """The arrays as tensors: on a CPU the same memory, elsewhere one pinned buffer and one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return _unpack(_pack(arrays).pin_memory().to(device, non_blocking=True), arrays)


def _pack(arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> Tensor:
    """One buffer of bytes; each array starts at a multiple of 8."""
    parts = [array.tobytes() + bytes(-array.nbytes % 8) for array in arrays]
    return torch.frombuffer(bytearray(b"".join(parts) or bytes(8)), dtype=torch.uint8)


def _unpack(buffer: Tensor, arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> list[Tensor]:
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        tensors.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += array.nbytes + -array.nbytes % 8
    return tensors
