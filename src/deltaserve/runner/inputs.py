"""From a plan's integers to the tensors of one step.

Knows the seats' tokens, lengths and block tables, which outlive a step. Knows no model, no weights and no queue; a
plan is obeyed, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.core.plan import NO_SLOT, Plan, Seating
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
    first_ahead  [seats]           the MTP layer's entries are there from this position ...
    num_ahead    [seats]           ... up to this one, itself excluded; 0 if there are none
    num_copied   [seats]           blocks that the device's table has (runner/graphs.py)
    turn         [seats]           how many requests have taken the seat
    """

    def __init__(self, num_seats: int, max_model_len: int) -> None:
        self.max_len = max_model_len
        # One token more than the context: the last token is sampled, and never fed.
        self.token_ids = np.zeros((num_seats, max_model_len + 1), dtype=np.int64)
        self.block_table = np.full((num_seats, blocks_of(max_model_len)), -1, dtype=np.int32)
        self.num_blocks = np.zeros(num_seats, dtype=np.int64)
        self.num_prompt = np.zeros(num_seats, dtype=np.int64)
        self.num_top = np.full(num_seats, -1, dtype=np.int64)
        self.first_ahead = np.zeros(num_seats, dtype=np.int64)
        self.num_ahead = np.zeros(num_seats, dtype=np.int64)
        self.num_copied = np.zeros(num_seats, dtype=np.int64)
        self.turn = np.zeros(num_seats, dtype=np.int64)

    def seat(self, seating: Seating) -> None:
        """A request takes the seat; nothing of the one before is left."""
        seat, num_tokens = seating.seat, len(seating.token_ids)
        self.token_ids[seat, :num_tokens] = seating.token_ids
        self.num_prompt[seat] = seating.num_prompt
        num_top = seating.params.prompt_logprobs
        self.num_top[seat] = -1 if num_top is None else num_top
        self.first_ahead[seat] = self.num_ahead[seat] = 0
        self.block_table[seat] = -1
        self.num_blocks[seat] = self.num_copied[seat] = 0
        self.turn[seat] += 1
        self.append_blocks(seat, seating.blocks)

    def append_blocks(self, seat: int, blocks: Sequence[int]) -> None:
        if blocks:
            first = self.num_blocks[seat]
            self.block_table[seat, first : first + len(blocks)] = blocks
            self.num_blocks[seat] = first + len(blocks)


@dataclass(frozen=True)
class Numbers:
    """A plan as arrays of the host. B rows, T tokens, N rows that sample.

    Name         Shape  Meaning
    seats        [B]    each row's seat
    starts       [B]    tokens of each row's sequence before the step
    counts       [B]    tokens of each row
    num_guesses  [B]    guesses at each row's end
    read_slot    [B]    as the layout's
    write_slot   [T]    as the layout's
    row_starts   [B+1]  first token of each row in the step
    sampling     [N]    rows that sample
    num_decode          rows that extend; they come first
    """

    seats: Ints
    starts: Ints
    counts: Ints
    num_guesses: Ints
    read_slot: Ints
    write_slot: Ints
    row_starts: Ints
    sampling: Ints
    num_decode: int

    @classmethod
    def of(cls, plan: Plan) -> Numbers:
        rows = plan.rows

        def column(values: Iterable[int], count: int = len(rows)) -> Ints:
            return np.fromiter(values, np.int64, count)

        counts = column(row.num_tokens for row in rows)
        row_starts = np.concatenate(([0], counts.cumsum()))
        return cls(
            seats=column(row.seat for row in rows),
            starts=column(row.start for row in rows),
            counts=counts,
            num_guesses=column(row.num_guesses for row in rows),
            read_slot=column(row.read_slot for row in rows),
            write_slot=column(chain.from_iterable(row.write_slots for row in rows), int(row_starts[-1])),
            row_starts=row_starts,
            sampling=np.flatnonzero(column(row.samples for row in rows)),
            num_decode=plan.num_decode,
        )

    @property
    def ends(self) -> Ints:
        """Tokens of each row's sequence after the step, all guesses included."""
        return self.starts + self.counts


@dataclass(frozen=True)
class Batch:
    """One step, ready to run.

    Name         Shape  Dtype   Meaning
    numbers             -       the plan's, on the host
    token_ids    [T]    int64   tokens to compute, row after row
    context             -       where their memory is
    last         [R]    int64   the tokens whose logits give new ones, by their number in the step: of each sampling row
                                the last one, and one more for each guess at its end; None if all are
    before       [B, D] model's the hidden state before each row's first token, where there is one and the model has an
                                MTP layer
    graph_rows          -       rows of the graph of extending rows that has run, with its padding; None: another step
    """

    numbers: Numbers
    token_ids: Tensor
    context: ForwardContext
    last: Tensor | None
    before: Tensor | None = None
    graph_rows: int | None = None


class Inputs:
    """Builds the batch of a plan on the device of the pools."""

    def __init__(self, seats: Seats, pools: Pools, device: torch.device, max_guesses: int = 0) -> None:
        self.seats, self.pools, self.device = seats, pools, device
        self.recent = torch.zeros(len(seats.num_blocks) + 1, 1 + max_guesses, dtype=torch.int64, device=device)
        """[seats + 1, 1 + guesses] int64 on the device: each seat's newest token, and what is guessed behind it, be it
        of an older step; the last seat is nobody's."""
        self.runs_ahead = device.type != "cpu"
        """Steps are launched before the host knows the tokens of those before: they come from `recent`."""

    def build(self, numbers: Numbers) -> Batch:
        sampling, num_guesses = numbers.sampling, numbers.num_guesses
        last = _tails(numbers.row_starts[1:][sampling], 1 + num_guesses[sampling])
        place, recent = self._recent(numbers)
        token_ids, layout, last_R, place_F, recent_F = lay_out(
            self.device,
            self.seats,
            Span(numbers.seats, numbers.starts, numbers.counts, numbers.num_decode),
            numbers.read_slot,
            numbers.write_slot,
            last,
            place,
            recent,
        )
        if len(place):
            token_ids.index_copy_(0, place_F, self.recent.view(-1).index_select(0, recent_F))
        context = ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)
        # When every token samples (plain decode), there is nothing to pick.
        return Batch(numbers, token_ids, context, None if len(last) == len(token_ids) else last_R)

    def _recent(self, numbers: Numbers) -> tuple[Ints, Ints]:
        """Tokens that are known only to `recent`, by their number in the step, and where they stand there: those of
        extending rows, and where the host knows what was sampled, only their guesses."""
        counts = numbers.counts[: numbers.num_decode]
        place = np.arange(int(counts.sum()))
        column = place - np.repeat(numbers.row_starts[: numbers.num_decode], counts)
        source = np.repeat(numbers.seats[: numbers.num_decode] * self.recent.shape[1], counts) + column
        if self.runs_ahead:
            return place, source
        return place[column > 0], source[column > 0]

    def guesses(self, seats: Ints, counts: Ints) -> Tensor:
        """[sum(counts)] int64: the first `counts` guesses of each seat."""
        column = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        [source] = to_device(self.device, np.repeat(seats * self.recent.shape[1] + 1, counts) + column)
        return self.recent.view(-1).index_select(0, source)

    def carry_hidden(self, numbers: Numbers, hidden_TD: Tensor) -> Tensor | None:
        """Where the model has an MTP layer: the hidden state before each row's first token [B, D], and those after the
        step's tokens go to their slots, as all does that the next token needs."""
        if not self.pools.hidden:
            return None
        [hidden_SD] = self.pools.hidden
        kept = np.flatnonzero(numbers.write_slot != NO_SLOT)
        read_slot, token, write_slot = to_device(
            self.device, np.maximum(numbers.read_slot, 0), kept, numbers.write_slot[kept]
        )
        before_BD = hidden_SD.index_select(0, read_slot)
        hidden_SD.index_copy_(0, write_slot, hidden_TD.index_select(0, token))
        return before_BD

    def scored(self, numbers: Numbers) -> list[tuple[int, int]]:
        """(row, likely tokens to tell) of rows whose prompt tokens' logprobs are asked for."""
        num_top = self.seats.num_top[numbers.seats]
        asked = np.flatnonzero((num_top >= 0) & (numbers.starts + 1 < self.seats.num_prompt[numbers.seats]))
        return [(int(row), int(num_top[row])) for row in asked]


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
    *take_along: Ints,
    first_key_B: Ints | None = None,
) -> Any:
    """The span's token ids [T] int64, their layout, and each of `take_along` as a tensor: a tuple, in one copy to the
    device."""
    seats, counts = span.seats, span.counts
    row_starts = np.concatenate(([0], counts.cumsum()))
    seat_T = np.repeat(seats, counts)
    position_T = np.arange(int(row_starts[-1])) + np.repeat(span.starts - row_starts[:-1], counts)
    block_T = table.block_table[seat_T, position_T // BLOCK].astype(np.int64)
    assert block_T.min() >= 0, "a token has no KV block"
    ends = span.starts + counts
    ranges = _alike(counts, span.num_decode)
    token_ids, read_slot, write_slot, position, kv_index, block_table, context_len, first, *rest = to_device(
        device,
        table.token_ids[seat_T, position_T],
        read_slot_B,
        write_slot_T,
        position_T,
        block_T * BLOCK + position_T % BLOCK,
        table.block_table[seats, : blocks_of(int(ends.max()))],
        ends.astype(np.int32),
        (ends if first_key_B is None else first_key_B).astype(np.int32),
        *take_along,
        *((row_starts[first : end + 1] - row_starts[first]).astype(np.int32) for first, end, _ in ranges),
    )
    along, cu_seqlens = rest[: len(take_along)], rest[len(take_along) :]
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
    first_key = None if first_key_B is None else first
    layout = Layout(segments, read_slot, write_slot, position, block_table, kv_index, context_len, first_key)
    return token_ids, layout, *along


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
    size = sum(array.nbytes + -array.nbytes % 8 for array in arrays)
    return _unpack(_staging(device).send(lambda buffer: _pack(buffer, arrays), size), arrays)


class Staging:
    """Pinned buffers on their way to one device. A buffer is filled again once its last copy is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, torch.Event]] = []

    def send(self, fill: Callable[[npt.NDArray[np.uint8]], None], size: int) -> Tensor:
        """uint8 [size] on the device, as `fill` wrote it."""
        for number, (buffer, copied) in enumerate(self._buffers):
            if len(buffer) >= size and copied.query():
                self._buffers.append(self._buffers.pop(number))  # the next call looks at those that are longest over
                break
        else:
            buffer = torch.empty(1 << max(16, size.bit_length()), dtype=torch.uint8, pin_memory=True)
            copied = torch.Event(self._device)
            self._buffers.append((buffer, copied))
        fill(buffer.numpy())
        sent = buffer[:size].to(self._device, non_blocking=True)
        copied.record()
        return sent


@lru_cache(maxsize=16)
def _staging(device: torch.device) -> Staging:
    return Staging(device)


def _pack(buffer: npt.NDArray[np.uint8], arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> None:
    """Each array starts at a multiple of 8."""
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += array.nbytes + -array.nbytes % 8


def _unpack(buffer: Tensor, arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> list[Tensor]:
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        tensors.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += array.nbytes + -array.nbytes % 8
    return tensors
