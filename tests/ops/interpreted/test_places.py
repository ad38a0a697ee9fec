"""The kernels of places, interpreted, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltaserve.ops.places import reference, triton_places
from tests.ops.place_rows import Table, same


@pytest.mark.parametrize("length", [1, 2, 4, 17])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_begin(rows: int, length: int) -> None:
    """Later than was said by 0 to `length` - 1, as far as they may; the last row is padding."""
    table = Table.random(rows, length)
    later = same(table, lambda ways, own: own.begin(ways), reference, triton_places)
    assert later.tolist()[-1] == 0
    assert rows < 7 or length == 1 or int(later.max()) > 0


@pytest.mark.parametrize("end", ["inside", "longest"])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_entries_behind_a_step(length: int, end: str) -> None:
    table = Table.random(5, length)
    if end == "longest":  # the last entry has no place
        table.position.view(5, length)[0] = torch.arange(length) + table.max_len - length
    same(table, lambda ways, own: own.entries(ways), reference, triton_places)


@pytest.mark.parametrize("rows", [1, 5])
def test_entries_one_further(rows: int) -> None:
    table = Table.random(rows, 1)
    table.place[0] = table.max_len - 1
    same(table, lambda ways, own: own.next(ways), reference, triton_places)


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_rows_gave_is_remembered(rows: int, length: int) -> None:
    same(Table.random(rows, length), lambda ways, own: own.remember(ways), reference, triton_places)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("rows", [1, 40])
def test_guesses_are_noted(rows: int, place: int) -> None:
    same(Table.random(rows, 3), lambda ways, own: own.note(ways, place), reference, triton_places)


@pytest.mark.parametrize("width", [8, 1024, 1500])
@pytest.mark.parametrize("length", [1, 3])
def test_hidden_states_are_carried(length: int, width: int) -> None:
    """Rows that keep them where they read, that keep some or none, and that read none."""
    pool = torch.randn(10, width)
    read = torch.tensor([3, -1, 5, -1])
    write = torch.tensor([[3, 0, 1], [4, -1, 6], [-1, 5, 2], [-1, -1, -1]])[:, -length:].flatten().contiguous()
    hidden, befores, pools = torch.randn(4 * length, width), [], []
    carries: list[Callable[..., None]] = [reference.carry_hidden, triton_places.carry_hidden]
    for carry in carries:
        own, before = pool.clone(), torch.full((4, width), torch.nan)
        carry(own, read, write, hidden, before)
        befores.append(before[read >= 0])
        pools.append(own[:-1])
    assert torch.equal(*befores)
    assert torch.equal(*pools)
    assert torch.equal(befores[0], pool[[3, 5]])


def test_a_row_without_a_block_has_no_place() -> None:
    block, position = torch.tensor([-1, 2]), torch.tensor([70, 70])
    found: Tensor = reference.kv_places(block, position)
    assert found.tolist() == [-1, 2 * 64 + 6]
