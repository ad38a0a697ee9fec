"""The passes of the MTP layer behind steps of extending rows, recorded as graphs. Knows no sampling and no plan.

Two kinds. *Enter*: the entries of all tokens of a step, one for each that was drawn; it leaves what the layer says
after each row's last true token. *Chain*: one entry more for each row, of the draft that was drawn from that. Both read
the numbers of the step's own graph (`StepGraphs`), whose padding is theirs: it has no blocks, and writes nothing.

Shape letters: B rows, T tokens, D hidden width, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.runner.graphs import StepGraphs, recorded
from deltaserve.runner.inputs import kv_places
from deltaserve.runner.sampling import Sampled
from deltaserve.runner.staging import Ints, to_device


def entry_layout(
    table_BN: Tensor, position_T: Tensor, context_len_B: Tensor | None, first_key_B: Tensor, bounds: Tensor
) -> Layout:
    """Of rows of equally many entries, at `position`. A place without a block is written nowhere.

    context_len: None for rows of one entry, where it follows from the position, and is 0 without a block.
    """
    rows = len(table_BN)
    place_BL = (position_T // BLOCK).view(rows, -1)
    block_T = table_BN.gather(1, place_BL).view(-1)
    kv_index_T = kv_places(block_T, position_T)
    if context_len_B is None:
        context_len_B = torch.where(block_T >= 0, position_T + 1, 0).int()
    none = torch.full_like(position_T, -1)
    return Layout(
        segments=(Segment(True, 0, rows, 0, len(position_T), place_BL.shape[1], bounds),),
        read_slot=none[:rows],
        write_slot=none,
        position=position_T,
        block_table=table_BN,
        kv_index=kv_index_T,
        context_len=context_len_B,
        first_key=first_key_B,
    )


class DraftGraphs:
    """Owns the tensors that pass from one graph to the next."""

    def __init__(self, steps: StepGraphs) -> None:
        self._steps, self._max_len = steps, steps.seats.max_len
        rows, device = max(*steps.rows, 2), steps.device
        self._token = torch.zeros(rows * max(steps.lengths), dtype=torch.int64, device=device)
        self._num_tokens = torch.ones(rows, dtype=torch.int64, device=device)
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
                steps.show_nothing(rows, rows * length)
                self._enter[rows, length] = recorded(partial(self._run_enter, rows, length), steps)
            self._chain[rows] = recorded(partial(self._run_chain, rows), steps)

    @property
    def seat(self) -> Tensor:
        """[B] int64: of each row of the last step."""
        return self._steps.columns.seat

    def enter(self, rows: int, first_key: Ints, sampled: Sampled) -> None:
        """Behind the graph of so many rows: the entries of the tokens that were drawn."""
        count, length = sampled.token_ids.shape
        [first_key_B] = to_device(self._first_key.device, first_key)
        self._token[: count * length].copy_(sampled.token_ids.reshape(-1))
        self._num_tokens[:count].copy_(sampled.num_tokens)
        self._first_key[:count].copy_(first_key_B)
        self._enter[rows, length]()

    def chain(self, rows: int) -> None:
        """The entries of the drafts."""
        self._chain[rows]()

    def _run_enter(self, rows: int, length: int) -> object:
        steps, tokens = self._steps, rows * length
        columns = steps.columns
        table_BN = steps.block_table.index_select(0, columns.seat[:rows])
        behind_T = columns.position[:tokens] + 1
        context_len_B = columns.context_len[:rows]
        context_len_B = torch.where(context_len_B > 0, context_len_B + 1, 0).clamp(max=self._max_len)
        bounds, position_T = columns.bounds[: rows + 1], behind_T.clamp(max=self._max_len - 1)
        layout = entry_layout(table_BN, position_T, context_len_B, self._first_key[:rows], bounds)
        # What lies beyond the context is kept nowhere.
        layout = replace(layout, kv_index=torch.where(behind_T < self._max_len, layout.kv_index, -1))
        context = self._context(layout)
        ahead_TD = steps.model.look_ahead(self._token[:tokens], steps.hidden[:tokens], context)
        # A padding row's number is of an older step, which may have had longer rows.
        num_tokens_B = self._num_tokens[:rows].clamp(max=length)
        last_B = self._bounds[:rows] * length + num_tokens_B - 1
        self.hidden[:rows].copy_(ahead_TD.index_select(0, last_B))
        self.place[:rows].copy_(columns.position[:tokens:length] + num_tokens_B)
        return context

    def _run_chain(self, rows: int) -> object:
        steps, place_B = self._steps, self.place[:rows]
        place_B.copy_((place_B + 1).clamp(max=self._max_len - 1))
        table_BN = steps.block_table.index_select(0, steps.columns.seat[:rows])
        layout = entry_layout(table_BN, place_B, None, self._first_key[:rows], self._bounds[: rows + 1])
        context = self._context(layout)
        self.hidden[:rows].copy_(steps.model.look_ahead(self.draft[:rows], self.hidden[:rows], context))
        return context

    def _context(self, layout: Layout) -> ForwardContext:
        pools = self._steps.pools
        return ForwardContext(layout=layout, kv=pools.kv, conv=pools.conv, state=pools.state)
