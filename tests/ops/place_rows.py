"""Rows of a step, and seats, for tests of where they stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEATS, BLOCKS, GUESSES = 50, 9, 17


@dataclass
class Table:
    """All numbers differ, so that one in another's place is found. The last row is padding."""

    max_len: int
    seat: Tensor
    recent: Tensor
    gained: Tensor
    block_table: Tensor
    num_open: Tensor
    later_slot: Tensor
    token: Tensor
    position: Tensor
    kv_index: Tensor
    context_len: Tensor
    read_slot: Tensor
    later: Tensor
    num_given: Tensor
    place: Tensor
    outcome: Tensor

    @staticmethod
    def random(rows: int, length: int, device: str = "cpu") -> Table:
        max_len = BLOCKS * 64 - 3
        block_table = torch.randperm(1000)[: (SEATS + 1) * BLOCKS].view(SEATS + 1, BLOCKS).int()
        block_table[:, -2:] = -1
        block_table[SEATS] = -1
        seat = torch.randperm(SEATS)[:rows]
        seat[-1] = SEATS
        start = torch.randint(0, 64 * (BLOCKS - 2) - 3 * length, (rows,))
        num_open = torch.randint(0, length, (rows,))
        context = (start + length).int()
        read_slot = torch.randperm(100)[:rows]
        num_open[-1], context[-1], read_slot[-1] = 0, 0, -1
        num_given = torch.randint(1, length + 1, (rows,))
        outcome = torch.cat(
            [num_given[:, None], torch.ones(rows, 1).long(), 3000 + torch.arange(rows * length).view(rows, length)], 1
        )
        num_given[-1] += 2  # of an older step of longer rows
        table = Table(
            max_len,
            seat,
            torch.randperm(2000)[: (SEATS + 1) * GUESSES].view(SEATS + 1, GUESSES),
            torch.randint(0, length, (SEATS + 1,)),
            block_table,
            num_open,
            100 + torch.arange(rows * (length + 2)).view(rows, length + 2),
            torch.full((rows * length,), -7),
            (start[:, None] + torch.arange(length)).reshape(-1),
            5000 + torch.arange(rows * length),
            context,
            read_slot,
            torch.full((rows,), -7),
            num_given,
            start,
            outcome,
        )
        return Table(max_len, *(part.to(device) for part in vars(table).values() if isinstance(part, Tensor)))

    def begin(self, ways: Any) -> tuple[Tensor, ...]:
        table = ways.begin_rows(
            *(self.seat, self.recent, self.gained, self.block_table, self.num_open, self.later_slot),
            *(self.token, self.position, self.kv_index, self.context_len, self.read_slot, self.later),
        )
        return self.later, table

    def entries(self, ways: Any) -> tuple[Tensor, ...]:
        found = ways.entries_of(
            self.seat, self.block_table, self.position, self.context_len, self.num_given, self.max_len
        )
        return tuple(found)

    def next(self, ways: Any) -> tuple[Tensor, ...]:
        found = ways.next_entries(self.seat, self.block_table, self.place, self.max_len)
        assert found.last is None
        return tuple(found[:-1])

    def remember(self, ways: Any) -> tuple[Tensor, ...]:
        token, given = (
            torch.full((self.recent.numel() * 4,), -7, device=self.seat.device),
            torch.full_like(self.gained, -7),
        )
        ways.remember(self.outcome, self.seat, self.recent, self.gained, token, given)
        return token, given

    def note(self, ways: Any, place: int) -> tuple[Tensor, ...]:
        newest = torch.full_like(self.gained, -7)
        ways.note_guess(self.outcome[:, 2].contiguous(), self.seat, self.recent, place, newest)
        return (newest,)


def same(table: Table, ask: Callable[[Any, Table], tuple[Tensor, ...]], one: Any, other: Any) -> Tensor:
    """Both ways give the same and leave the same; the first of what they give."""
    tables = [copy.deepcopy(table) for _ in range(2)]
    found = [ask(ways, own) for ways, own in zip((one, other), tables, strict=True)]
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    for name, part in vars(tables[0]).items():
        if isinstance(part, Tensor):
            assert torch.equal(part, getattr(tables[1], name)), name
    return found[0][0]
