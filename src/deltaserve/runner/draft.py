"""Drafts: tokens guessed behind the known ones, which the next step verifies. Knows no scheduler and no cache.

A drafter fills the seats' tables in two moves, after the tokens of a step are known:

1. It gives the MTP layer its entries for the tokens of the step, the one that was sampled included. Entry j needs the
   hidden state after token j - 1; that of the token before the row's first one is in the row's read slot. Entries
   behind the last true token are wrong, are seen by no true one, and are written anew by the next step.
2. From the entry of the last true token it chains: draft, entry of the draft (from the layer's own output), next draft.

A draft is drawn with the parameters, the seed and the noise that the token at its place will be drawn with, and it is
accepted if it is that token. So the output is what it would be without drafts, token for token, at any temperature.

Shape letters: B rows, T entries of a pass, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import NO_SLOT, Plan
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK
from deltaserve.runner.inputs import Batch, Ints, Seats, Span, lay_out
from deltaserve.runner.memory import Pools
from deltaserve.runner.model import Model
from deltaserve.runner.sampling import Drafts, Sampler

FIRST_ENTRY = 1
"""The MTP layer has no entry for a sequence's first token: there is no hidden state before it."""


class Guesser(Protocol):
    """Whatever fills the seats' tables with drafts."""

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, known_B: Ints) -> None:
        """Called once a step, after its tokens are in the seats' tables.

        hidden_TD: of the step's tokens. known_B: number, in its sequence, of the token behind each row's last true one;
        for a row that samples it is the one that was sampled last. Writes `num_propose` tokens behind it.
        """


def guesses_of(
    table: Seats, seats: Sequence[int], firsts: Sequence[int], counts: Sequence[int], device: torch.device
) -> Drafts | None:
    """The drafts that stand at the ends of a step's sampling rows, from number `firsts` on; None if there are none."""
    if not any(counts):
        return None
    parts = [table.token_ids[seat, first : first + n] for seat, first, n in zip(seats, firsts, counts, strict=True)]
    return Drafts(tuple(counts), torch.from_numpy(np.concatenate(parts)).to(device))


class LookAhead:
    """Drafts from the model's own MTP layer."""

    def __init__(self, model: Model, seats: Seats, sampler: Sampler, pools: Pools) -> None:
        self.model, self.seats, self.sampler, self.pools = model, seats, sampler, pools
        [self.hidden_SD] = pools.hidden

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, known_B: Ints) -> None:
        starts, ends = self._span(batch)
        before_BD = self._resume(plan, batch, starts)
        self._keep(batch, hidden_TD)
        chosen = np.flatnonzero(ends > starts)
        ahead_TD, firsts = None, starts
        if len(chosen):
            hidden = self._shifted(batch, hidden_TD, before_BD, starts, ends, chosen)
            num_decode = int((chosen < plan.num_decode).sum())
            ahead_TD = self._enter(batch.numbers.seats[chosen], starts[chosen], ends[chosen], hidden, num_decode)
            firsts = np.full(len(starts), -1)
            firsts[chosen] = (ends - starts)[chosen].cumsum() - (ends - starts)[chosen]
        self.seats.num_ahead[batch.numbers.seats] = np.minimum(known_B + 1, ends)
        if ahead_TD is not None:
            self._chain(plan, batch, ahead_TD, firsts - starts + known_B, known_B)

    def _span(self, batch: Batch) -> tuple[Ints, Ints]:
        """The entries that the step makes: from `starts` to `ends` - 1, by their positions."""
        table, seats = self.seats, batch.numbers.seats
        starts = np.where(
            table.num_ahead[seats] <= batch.numbers.starts, batch.numbers.starts, batch.numbers.starts + 1
        )
        room = np.minimum(table.num_blocks[seats] * BLOCK, table.max_len)
        return np.maximum(starts, FIRST_ENTRY), np.minimum(batch.numbers.ends + 1, room)

    def _resume(self, plan: Plan, batch: Batch, starts: Ints) -> dict[int, Tensor]:
        """The hidden states from before the step of rows whose first entry needs one; read before any is written."""
        rows = np.flatnonzero(starts == batch.numbers.starts).tolist()
        return {row: self.hidden_SD[plan.rows[row].read_slot].clone() for row in rows}

    def _keep(self, batch: Batch, hidden_TD: Tensor) -> None:
        """The hidden state belongs to the slot, as all does that the next token needs."""
        write_slot = batch.context.layout.write_slot
        kept = (write_slot != NO_SLOT).nonzero().squeeze(1)
        self.hidden_SD.index_copy_(0, write_slot[kept], hidden_TD[kept])

    def _shifted(
        self, batch: Batch, hidden_TD: Tensor, before: dict[int, Tensor], starts: Ints, ends: Ints, chosen: Ints
    ) -> Tensor:
        """For each entry the hidden state of the token before it."""
        parts = []
        for row in chosen.tolist():
            first, shift = int(batch.numbers.row_starts[row]), int(batch.numbers.starts[row]) + 1
            if row in before:
                parts.append(before[row][None])
            low = max(int(starts[row]), shift)
            parts.append(hidden_TD[first + low - shift : first + int(ends[row]) - shift])
        return torch.cat(parts)

    def _enter(self, seats: Ints, starts: Ints, ends: Ints, hidden_TD: Tensor, num_decode: int) -> Tensor:
        """Makes the entries from `starts` to `ends` - 1 of each row; what the layer says after each."""
        counts = ends - starts
        token_ids, layout = lay_out(
            hidden_TD.device,
            self.seats,
            Span(seats, starts, counts, num_decode),
            read_slot_B=np.full(len(seats), NO_SLOT),
            write_slot_T=np.full(int(counts.sum()), NO_SLOT),
            first_key=FIRST_ENTRY,
        )
        context = ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)
        return self.model.look_ahead(token_ids, hidden_TD, context)

    def _chain(self, plan: Plan, batch: Batch, ahead_TD: Tensor, last_B: Ints, known_B: Ints) -> None:
        """Draft by draft, all rows at once. `last_B`: number of each row's last true entry among `ahead_TD`."""
        wanted = np.array([row.num_propose for row in plan.rows])
        rows, number = np.flatnonzero(wanted), 0
        hidden_BD = ahead_TD[last_B[rows]]
        while len(rows):
            seats, positions = batch.numbers.seats[rows], known_B[rows] + number + 1
            tokens = self.sampler.draft(self.model.logits(hidden_BD), seats.tolist(), positions.tolist())
            self.seats.token_ids[seats, positions] = tokens
            number += 1
            more = wanted[rows] > number
            if not more.any():
                return
            rows, hidden_BD = rows[more], hidden_BD[torch.from_numpy(more).to(hidden_BD.device)]
            starts = known_B[rows] + number
            hidden_BD = self._enter(batch.numbers.seats[rows], starts, starts + 1, hidden_BD, len(rows))
