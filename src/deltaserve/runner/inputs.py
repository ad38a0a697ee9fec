"""From a plan's integers to the tensors of one step.

Knows the seats' tokens, lengths and block tables, which outlive a step. Knows no model, no weights and no queue; a
plan is obeyed, not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import NO_SLOT, Plan, Row, Seating
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.ops.places import api as places
from deltaserve.ops.places.reference import kv_places
from deltaserve.runner.memory import Pools, blocks_of
from deltaserve.runner.staging import Ints, to_device


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
    gained       [seats]           tokens that the seat's last row gave beyond its first
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
        self.gained = np.zeros(num_seats, dtype=np.int64)

    def seat(self, seating: Seating) -> None:
        """A request takes the seat; nothing of the one before is left."""
        seat, known = seating.seat, seating.known
        self.token_ids[seat, : len(known)] = known
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


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Numbers:
    """A plan as arrays of the host. B rows, T tokens, N rows that sample.

    Name         Shape  Meaning
    seats        [B]    each row's seat
    starts       [B]    tokens of each row's sequence before the step, or as many as it has at least
    counts       [B]    tokens of each row
    num_guesses  [B]    guesses at each row's end
    read_slot    [B]    as the layout's
    write_slot   [T]    as the layout's
    row_starts   [B+1]  first token of each row in the step
    sampling     [N]    rows that sample
    num_decode          rows that extend; they come first
    num_open     [B]    by how much a row may start later, as its seat has gained in the step before
    later_slot   [B, O] the read slot if it does: by one, by two ...; O is the most of `num_open`

    The last two are empty where all starts are known.
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
    num_open: Ints = field(default_factory=_none)
    later_slot: Ints = field(default_factory=lambda: _none().reshape(0, 0))

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
            **_open_starts(rows),
        )

    @property
    def ends(self) -> Ints:
        """Tokens of each row's sequence after the step, all guesses included, from `starts` on."""
        return self.starts + self.counts

    @property
    def most_open(self) -> int:
        """0: all starts are known."""
        return int(self.later_slot.shape[1])

    def settled(self, gained: Ints) -> Numbers:
        """The numbers, when it is known what each seat has gained [seats]."""
        if not self.most_open:
            return self
        later = np.minimum(gained[self.seats], self.num_open)
        slots = np.column_stack((self.read_slot, self.later_slot))
        return replace(
            self,
            starts=self.starts + later,
            read_slot=slots[np.arange(len(later)), later],
            num_open=_none(),
            later_slot=_none().reshape(0, 0),
        )


def _open_starts(rows: Sequence[Row]) -> dict[str, Ints]:
    """`num_open` and `later_slot`"""
    if not any(row.later_slots for row in rows):
        return {}
    counts = [len(row.later_slots) for row in rows]
    later_slot = np.full((len(rows), max(counts)), NO_SLOT)
    for number, row in enumerate(rows):
        later_slot[number, : counts[number]] = row.later_slots
    return {"num_open": np.array(counts), "later_slot": later_slot}


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
    later        [B]    int64   by how much each row starts later than its numbers say; None: nothing is open
    """

    numbers: Numbers
    token_ids: Tensor
    context: ForwardContext
    last: Tensor | None
    before: Tensor | None = None
    graph_rows: int | None = None
    later: Tensor | None = None


class Inputs:
    """Builds the batch of a plan on the device of the pools."""

    def __init__(self, seats: Seats, pools: Pools, device: torch.device, max_guesses: int = 0) -> None:
        self.seats, self.pools, self.device = seats, pools, device
        self.recent = torch.zeros(len(seats.num_blocks) + 1, 1 + max_guesses, dtype=torch.int64, device=device)
        """[seats + 1, 1 + guesses] int64 on the device: each seat's newest token, and what is guessed behind it, be it
        of an older step; the last seat is nobody's."""
        self.gained = torch.zeros(len(seats.num_blocks) + 1, dtype=torch.int64, device=device)
        """[seats + 1] int64 on the device: as the seats' own, of the newest step."""
        self.given = torch.zeros(self.recent.numel(), dtype=torch.int64, device=device)
        self.num_given = torch.ones(len(self.recent), dtype=torch.int64, device=device)
        """What the rows of the newest step have given, row after row: as many tokens of each as it could have given at
        most, and how many are meant [seats + 1] int64."""
        self.runs_ahead = device.type != "cpu"
        """Steps are launched before the host knows the tokens of those before: they come from `recent`."""

    def build(self, numbers: Numbers) -> Batch:
        sampling, num_guesses = numbers.sampling, numbers.num_guesses
        last = tails(numbers.row_starts[1:][sampling], 1 + num_guesses[sampling])
        place, recent = self._recent(numbers)
        token_ids, layout, last_R, place_F, recent_F = lay_out(
            self.device,
            self.seats,
            Span(numbers.seats, numbers.starts, numbers.counts, numbers.num_decode, numbers.most_open),
            numbers.read_slot,
            numbers.write_slot,
            last,
            place,
            recent,
        )
        if len(place):
            token_ids.index_copy_(0, place_F, self.recent.view(-1).index_select(0, recent_F))
        later_B = self._later(numbers)
        if later_B is not None:
            [slot_BO] = to_device(self.device, np.column_stack((numbers.read_slot, numbers.later_slot)))
            layout = start_later(layout, numbers.counts, later_B, self.seats.max_len)
            layout = replace(layout, read_slot=slot_BO.gather(1, later_B[:, None]).squeeze(1))
        context = ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)
        # When every token samples (plain decode), there is nothing to pick.
        last_R = None if len(last) == len(token_ids) else last_R
        return Batch(numbers, token_ids, context, last_R, later=later_B)

    def _later(self, numbers: Numbers) -> Tensor | None:
        """`Batch.later`"""
        if not numbers.most_open:
            return None
        seat_B, open_B = to_device(self.device, numbers.seats, numbers.num_open)
        return torch.minimum(self.gained.index_select(0, seat_B), open_B)

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

    def remember(self, seat_N: Tensor, outcome_NX: Tensor) -> None:
        """What the seats' rows have given (`Sampled.outcome`), for the next step."""
        places.remember(outcome_NX, seat_N, self.recent, self.gained, self.given, self.num_given)

    def carry_hidden(self, batch: Batch, hidden_TD: Tensor) -> Tensor | None:
        """Where the model has an MTP layer: the hidden state before each row's first token [B, D], and those after the
        step's tokens go to their slots, as all does that the next token needs."""
        if not self.pools.hidden:
            return None
        [hidden_SD] = self.pools.hidden
        written = batch.numbers.write_slot
        kept = np.flatnonzero(written != NO_SLOT)
        token, write_slot = to_device(self.device, kept, written[kept])
        before_BD = hidden_SD.index_select(0, batch.context.layout.read_slot.clamp(min=0))
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
    most_open: int = 0
    """They may turn out to be so much later."""


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
        table.block_table[seats, : blocks_of(int(ends.max()) + span.most_open)],
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


def start_later(layout: Layout, counts: Ints, later_B: Tensor, max_len: int) -> Layout:
    """The layout of rows of `counts` tokens when each starts so much later. What lies beyond `max_len` then, which only
    entries for guesses do, is kept nowhere."""
    [row_T] = to_device(later_B.device, np.repeat(np.arange(len(counts)), counts))
    later_T = layout.position + later_B.index_select(0, row_T)
    position_T = later_T.clamp(max=max_len - 1)
    place_T = kv_places(layout.block_table[row_T, position_T // BLOCK], position_T)
    return replace(
        layout,
        position=position_T,
        kv_index=torch.where(later_T < max_len, place_T, -1),
        context_len=(layout.context_len + later_B.int()).clamp(max=max_len),
        memo={},
    )


def tails(ends: Ints, lengths: Ints) -> Ints:
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
