"""Drafts: tokens guessed behind the known ones, which the next step verifies. Knows no scheduler and no cache.

A drafter works on the device, behind the sampler and without waiting for it, in two moves:

1. It gives the MTP layer its entries for the tokens of the step, those that were sampled included. Entry j needs the
   hidden state after token j - 1; that of the token before the row's first one is in the row's read slot. Entries
   behind the last true token are wrong, are seen by no true one, and are written anew by the next step. So all shapes
   and positions follow from the plan; what was accepted only says which entry is the last true one.
2. From that one it chains: draft, entry of the draft (from the layer's own output), next draft.

A draft is drawn with the parameters, the seed and the noise that the token at its place will be drawn with, and it is
accepted if it is that token. So the output is what it would be without drafts, token for token, at any temperature.

While no drafts are in use, no entries are made. A row that drafts again begins anew: it sees no entry before its own
first one (`Layout.first_key`). Of each block the drafter knows whether all its entries are there, so that a request
that goes on from a stored prefix sees those that are.

Shape letters: B rows, T entries of a pass, D hidden width, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import NO_SLOT, Plan, Seating
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.ops.places.api import note_guess
from deltaserve.runner.draft_graphs import DraftGraphs, entry_layout
from deltaserve.runner.inputs import Batch, Inputs, Numbers, Span, lay_out, start_later
from deltaserve.runner.memory import Pools, blocks_of
from deltaserve.runner.model import Model, logits_to_draw
from deltaserve.runner.sampling import Sampled, Sampler
from deltaserve.runner.staging import Ints, to_device

FIRST_ENTRY = 1
"""The MTP layer has no entry for a sequence's first token: there is no hidden state before it."""


class Guesser(Protocol):
    """Whatever fills `Inputs.recent` with drafts."""

    def begin(self, plan: Plan) -> None:
        """Called with every plan, when its seatings and blocks are in the seats' tables."""

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None) -> None:
        """Called when the step's tokens are drawn, if the plan keeps drafts up. Does not wait for the device.

        hidden_TD: of the step's tokens. sampled: of its sampling rows. Writes `num_propose` tokens behind the last one
        that a row samples.
        """

    def learn(self, seats: Ints, num_more: Ints) -> None:
        """Called when the host knows how many tokens the rows of seats that still sit gave beyond the first; behind
        the step's `propose`, and perhaps behind that of the next step."""


@dataclass(frozen=True)
class Entries:
    """Of each row of a step [B]: the entries to make, from `starts` to `ends` - 1 by their positions, and the first
    that the row sees."""

    starts: Ints
    ends: Ints
    first: Ints


class LookAhead:
    """Drafts from the model's own MTP layer."""

    def __init__(self, model: Model, inputs: Inputs, sampler: Sampler, pools: Pools) -> None:
        self.model, self.inputs, self.seats, self.sampler, self.pools = model, inputs, inputs.seats, sampler, pools
        self.graphs: DraftGraphs | None = None
        num_blocks = pools.kv[-1].shape[1]
        self._is_whole = np.zeros(num_blocks, dtype=np.bool_)
        self._writer = np.full(num_blocks, -1)
        """The seat that a block was new to."""

    def begin(self, plan: Plan) -> None:
        for seating in plan.seatings:
            self._sit(seating)
        for row in plan.rows:
            if row.new_blocks:
                blocks = list(row.new_blocks)
                self._is_whole[blocks], self._writer[blocks] = False, row.seat

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None) -> None:
        numbers = batch.numbers
        entries = self._entries(numbers)
        self._note(numbers, entries)
        wanted = np.array([row.num_propose for row in plan.rows])
        if self._fits_graph(batch, entries) and sampled is not None and self.graphs is not None:
            rows = batch.graph_rows or 0
            self.graphs.enter(rows, sampled.token_ids.shape[1], entries.first)
            self._draw_recorded(numbers.seats.tolist(), int(wanted.max()), rows)
        else:
            self._propose_any(batch, hidden_TD, sampled, entries, wanted)

    def learn(self, seats: Ints, num_more: Ints) -> None:
        """As much further are the entries that are right than was sure when they were made."""
        self._advance(seats, np.minimum(self.seats.num_ahead[seats] + num_more, self._room(seats)))

    def is_whole(self, block: int) -> bool:
        """Whether all entries of a block are there."""
        return bool(self._is_whole[block])

    # ---- which entries ---------------------------------------------------------------------------------------------

    def _sit(self, seating: Seating) -> None:
        """What a stored prefix has of entries, from its end backwards."""
        blocks = seating.blocks
        first = len(blocks)
        while first and self._is_whole[blocks[first - 1]]:
            first -= 1
        self.seats.first_ahead[seating.seat] = max(first * BLOCK, FIRST_ENTRY)
        self.seats.num_ahead[seating.seat] = len(blocks) * BLOCK if first < len(blocks) else 0

    def _room(self, seats: Ints) -> Ints:
        return np.minimum(self.seats.num_blocks[seats] * BLOCK, self.seats.max_len)

    def _entries(self, numbers: Numbers) -> Entries:
        table, seats, starts = self.seats, numbers.seats, numbers.starts
        extends = np.arange(len(seats)) < numbers.num_decode
        is_cut = table.num_ahead[seats] < starts
        # Of a row that begins anew while it extends, the entry of its first token is left out: rows stay alike.
        begins_behind = (table.num_ahead[seats] > starts) | (is_cut & extends)
        begins = np.maximum(starts + begins_behind, FIRST_ENTRY)
        ends = np.minimum(numbers.ends + 1, self._room(seats))
        first = np.where(is_cut, begins, table.first_ahead[seats])
        return Entries(begins, np.maximum(ends, begins), first)

    def _note(self, numbers: Numbers, entries: Entries) -> None:
        """What is sure of the entries before the outcome is known: of the tokens behind the first that a row gives,
        nothing."""
        seats = numbers.seats
        self.seats.first_ahead[seats] = entries.first
        sure = np.minimum(numbers.ends - numbers.num_guesses + 1, self._room(seats))
        self._advance(seats, np.maximum(sure, entries.starts))

    def _advance(self, seats: Ints, ends: Ints) -> None:
        """The entries of the seats are there up to `ends`; blocks that are whole by that are noted."""
        before = self.seats.num_ahead[seats] // BLOCK
        self.seats.num_ahead[seats] = ends
        for number in np.flatnonzero(ends // BLOCK > before).tolist():
            seat, first = int(seats[number]), int(self.seats.first_ahead[seats[number]])
            for place in range(int(before[number]), int(ends[number]) // BLOCK):
                block = self.seats.block_table[seat, place]
                if max(place * BLOCK, FIRST_ENTRY) >= first and self._writer[block] == seat:
                    self._is_whole[block] = True

    # ---- steps of fixed shapes -------------------------------------------------------------------------------------

    def _fits_graph(self, batch: Batch, entries: Entries) -> bool:
        numbers = batch.numbers
        return batch.graph_rows is not None and bool(
            (entries.starts == numbers.starts + 1).all() and (entries.ends == numbers.ends + 1).all()
        )

    def _draw_recorded(self, seats: list[int], number: int, rows: int) -> None:
        """All rows get as many drafts; some may be of no use."""
        assert self.graphs is not None, "no graphs are recorded"
        graphs, count = self.graphs, len(seats)
        seat_B = graphs.seat[:count]
        for place in range(number):
            if place:
                graphs.chain(rows)
            draft_B = self._draw(graphs.hidden[:count], seats, graphs.place[:count])
            note_guess(draft_B, seat_B, self.inputs.recent, 1 + place, graphs.draft)

    def _draw(self, hidden_BD: Tensor, seats: Sequence[int], place_B: Tensor) -> Tensor:
        """What follows the entries at `place`."""
        return self.sampler.draft(logits_to_draw(self.model, hidden_BD), seats, place_B, behind=1)

    # ---- steps of any shape ----------------------------------------------------------------------------------------

    def _propose_any(
        self, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None, entries: Entries, wanted: Ints
    ) -> None:
        numbers, counts = batch.numbers, entries.ends - entries.starts
        rows = np.flatnonzero(counts)
        if not len(rows):
            return
        ahead_TD = self._enter(batch, hidden_TD, sampled, entries, rows)
        proposing = np.flatnonzero(wanted)
        if not len(proposing) or sampled is None:
            return
        firsts = (numbers.ends - numbers.num_guesses)[proposing]
        number_B = np.full(len(counts), -1)
        number_B[numbers.sampling] = np.arange(len(numbers.sampling))
        offset = (counts.cumsum() - counts)[proposing] + firsts - entries.starts[proposing]
        most = int(wanted.max())
        longest = int(numbers.ends[proposing].max()) + numbers.most_open + most
        seats, width = numbers.seats[proposing], min(longest, self.seats.max_len)
        seat_P, table_PN, first_key_P, number_P, offset_P, first_P, row_P = to_device(
            hidden_TD.device,
            seats,
            self.seats.block_table[seats, : blocks_of(width)],
            entries.first[proposing].astype(np.int32),
            number_B[proposing],
            offset,
            firsts,
            proposing,
        )
        if batch.later is not None:
            first_P = first_P + batch.later.index_select(0, row_P)
        behind_P = sampled.num_tokens.index_select(0, number_P) - 1
        hidden_PD, position_P = ahead_TD.index_select(0, offset_P + behind_P), first_P + behind_P
        bounds = torch.arange(len(seats) + 1, dtype=torch.int32, device=hidden_TD.device)
        for place in range(most):
            draft_P = self._draw(hidden_PD, seats.tolist(), position_P)
            self.inputs.recent[:, 1 + place].index_copy_(0, seat_P, draft_P)
            if place < most - 1:
                position_P = (position_P + 1).clamp(max=self.seats.max_len - 1)
                layout = entry_layout(table_PN, position_P, first_key_P, bounds)
                hidden_PD = self.model.look_ahead(draft_P, hidden_PD, self._context(layout))

    def _enter(self, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None, entries: Entries, rows: Ints) -> Tensor:
        """Makes the entries of `rows`; what the layer says after each, row after row."""
        numbers = batch.numbers
        starts, counts = entries.starts[rows], (entries.ends - entries.starts)[rows]
        offsets = counts.cumsum() - counts
        row_T = np.repeat(rows, counts)
        position_T = np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts)
        within_T = position_T - numbers.starts[row_T] + numbers.row_starts[:-1][row_T]
        resumes = np.flatnonzero(starts == numbers.starts[rows])
        drawn = torch.zeros(0, dtype=torch.int64) if sampled is None else sampled.token_ids
        _, layout, token_T, hidden_T, place_R, row_R, next_B, row_E = lay_out(
            hidden_TD.device,
            self.seats,
            Span(numbers.seats[rows], starts, counts, int((rows < numbers.num_decode).sum()), numbers.most_open),
            np.full(len(rows), NO_SLOT),
            np.full(len(row_T), NO_SLOT),
            self._sources(numbers, drawn.shape, row_T, position_T, within_T),
            np.maximum(within_T - 1, 0),
            offsets[resumes],
            rows[resumes],
            # What follows a chunk that is not the last of its prompt; elsewhere any token.
            self.seats.token_ids[numbers.seats, np.minimum(numbers.ends, self.seats.max_len)],
            rows,
            first_key_B=entries.first[rows],
        )
        if batch.later is not None:
            layout = start_later(layout, counts, batch.later.index_select(0, row_E), self.seats.max_len)
        tokens = [batch.token_ids, next_B] if sampled is None else [batch.token_ids, next_B, drawn.flatten()]
        before_TD = hidden_TD.index_select(0, hidden_T)
        if len(resumes):
            assert batch.before is not None, "hidden states of before the step are missing"
            before_TD.index_copy_(0, place_R, batch.before.index_select(0, row_R))
        return self.model.look_ahead(torch.cat(tokens).index_select(0, token_T), before_TD, self._context(layout))

    @staticmethod
    def _sources(numbers: Numbers, drawn: Sequence[int], row_T: Ints, position_T: Ints, within_T: Ints) -> Ints:
        """Where the token of each entry stands in [the step's tokens, what follows each row, what was drawn]."""
        number_B = np.zeros(len(numbers.counts), dtype=np.int64)
        number_B[numbers.sampling] = np.arange(len(numbers.sampling))
        samples_B = np.zeros(len(numbers.counts), dtype=np.bool_)
        samples_B[numbers.sampling] = True
        tokens, rows = int(numbers.row_starts[-1]), len(numbers.counts)
        behind_T = position_T - (numbers.ends - numbers.num_guesses)[row_T]
        drawn_T = tokens + rows + number_B[row_T] * (drawn[1] if len(drawn) > 1 else 0) + behind_T
        return np.where(behind_T < 0, within_T, np.where(samples_B[row_T], drawn_T, tokens + row_T))

    def _context(self, layout: Layout) -> ForwardContext:
        return ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)
