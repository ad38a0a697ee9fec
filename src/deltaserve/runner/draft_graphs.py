"""The passes of the MTP layer behind steps of extending rows, recorded as graphs. Knows no sampling and no plan.

Two kinds. *Enter*: the entries of all tokens of a step, one for each that was drawn; it leaves what the layer says
after each row's last true token. *Chain*: one entry more for each row, of the draft that was drawn from that. Both read
the numbers of the step's own graph (`StepGraphs`), whose padding is theirs: it has no blocks, and writes nothing.

Shape letters: B rows, T tokens, D hidden width, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.ops.places.api import entries_of, next_entries, note_guess
from deltaserve.ops.places.entries import Entries
from deltaserve.ops.places.reference import kv_places
from deltaserve.runner.graphs import Shape, StepGraphs, recorded
from deltaserve.runner.inputs import Inputs
from deltaserve.runner.staging import Ints, to_device


def entry_layout(table_BN: Tensor, position_B: Tensor, first_key_B: Tensor, bounds: Tensor) -> Layout:
    """Of rows of one entry each, at `position`. A place without a block is written nowhere, and sees nothing."""
    rows = len(table_BN)
    block_B = table_BN.gather(1, (position_B // BLOCK)[:, None]).view(-1)
    none = torch.full_like(position_B, -1)
    return Layout(
        segments=(Segment(True, 0, rows, 0, rows, 1, bounds),),
        read_slot=none,
        write_slot=none,
        position=position_B,
        block_table=table_BN,
        kv_index=kv_places(block_B, position_B),
        context_len=torch.where(block_B >= 0, position_B + 1, 0).int(),
        first_key=first_key_B,
    )


class DraftGraphs:
    """Owns the tensors that pass from one graph to the next."""

    def __init__(self, steps: StepGraphs, inputs: Inputs) -> None:
        self._steps, self._inputs, self._max_len = steps, inputs, steps.seats.max_len
        rows, device = max(*steps.rows, 2), steps.device
        self._sent = np.zeros(rows, dtype=np.int32)
        """What stands in the next."""
        self._none = torch.full((rows * max(steps.lengths),), -1, dtype=torch.int64, device=device)
        self._first_key = torch.zeros(rows, dtype=torch.int32, device=device)
        self._bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.draft = torch.zeros(rows, dtype=torch.int64, device=device)
        """[B] int64: the newest draft of each row; whoever draws it writes it here."""
        self.place = torch.zeros(rows, dtype=torch.int64, device=device)
        """[B] int64: the position of each row's newest entry."""
        self.hidden = torch.zeros(rows, steps.hidden.shape[1], dtype=steps.hidden.dtype, device=device)
        """[B, D]: what the layer says after it."""
        self._enter: dict[tuple[int, int], Callable[[], object]] = {}
        self._chain: dict[int, Callable[[], object]] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Records all graphs, behind those of the steps, whose memory they use again."""
        steps = self._steps
        for rows in reversed(steps.rows):
            for length in steps.lengths:
                steps.show_nothing(Shape(rows, rows * length, is_decode=True))
                self._enter[rows, length] = recorded(partial(self._run_enter, rows, length), steps)
            self._chain[rows] = recorded(partial(self._run_chain, rows), steps)
        note_guess(self.draft[:1], self.seat[:1], self._inputs.recent, 0, self.draft)  # compiled while nobody waits

    @property
    def seat(self) -> Tensor:
        """[B] int64: of each row of the last step of decoding."""
        return self._steps.columns.seat

    def enter(self, rows: int, length: int, first_key: Ints) -> None:
        """Behind the graph of rows of so many tokens each: the entries of the tokens that were drawn."""
        count = len(first_key)
        if not np.array_equal(self._sent[:count], first_key):
            self._sent[:count] = first_key
            [first_key_B] = to_device(self._first_key.device, self._sent[:count])
            self._first_key[:count].copy_(first_key_B)
        self._enter[rows, length]()

    def chain(self, rows: int) -> None:
        """The entries of the drafts."""
        self._chain[rows]()

    def _run_enter(self, rows: int, length: int) -> object:
        steps, inputs, tokens = self._steps, self._inputs, rows * length
        columns = steps.columns
        entries = entries_of(
            *(columns.seat[:rows], steps.block_table, columns.position[:tokens], columns.context_len[:rows]),
            *(inputs.num_given[:rows], self._max_len),
        )
        context = self._context(entries, columns.bounds[: rows + 1])
        ahead_TD = steps.model.look_ahead(inputs.given[:tokens], steps.hidden[:tokens], context)
        assert entries.last is not None, "rows have several entries"
        torch.index_select(ahead_TD, 0, entries.last, out=self.hidden[:rows])
        self.place[:rows].copy_(entries.place)
        return context

    def _run_chain(self, rows: int) -> object:
        steps = self._steps
        entries = next_entries(steps.columns.seat[:rows], steps.block_table, self.place[:rows], self._max_len)
        context = self._context(entries, self._bounds[: rows + 1])
        self.hidden[:rows].copy_(steps.model.look_ahead(self.draft[:rows], self.hidden[:rows], context))
        return context

    def _context(self, entries: Entries, bounds: Tensor) -> ForwardContext:
        rows, tokens, pools = len(entries.place), len(entries.position), self._steps.pools
        layout = Layout(
            segments=(Segment(True, 0, rows, 0, tokens, tokens // rows, bounds),),
            read_slot=self._none[:rows],
            write_slot=self._none[:tokens],
            position=entries.position,
            block_table=entries.block_table,
            kv_index=entries.kv_index,
            context_len=entries.context_len,
            first_key=self._first_key[:rows],
        )
        return ForwardContext(layout=layout, kv=pools.kv, conv=pools.conv, state=pools.state)
