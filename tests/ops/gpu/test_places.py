"""The kernels of places on a GPU, against torch."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.places import reference, triton_places
from tests.ops.place_rows import Table, same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_places(rows: int, length: int) -> None:
    table = Table.random(rows, length, "cuda")
    same(table, lambda ways, own: own.begin(ways), reference, triton_places)
    same(table, lambda ways, own: own.entries(ways), reference, triton_places)
    same(table, lambda ways, own: own.next(ways), reference, triton_places)
    same(table, lambda ways, own: own.remember(ways), reference, triton_places)
    same(table, lambda ways, own: own.note(ways, 2), reference, triton_places)


@pytest.mark.parametrize("length", [1, 4])
def test_hidden_states_are_carried_in_place(length: int) -> None:
    """Every row keeps its last state where it read: what it read is what was there."""
    rows, width = 64, 2048
    pool = torch.randn(rows * length + 1, width, device="cuda").bfloat16()
    read = torch.randperm(rows * length, device="cuda")[:rows]
    write = torch.full((rows, length), -1, device="cuda")
    write[:, -1] = read
    hidden = torch.randn(rows * length, width, device="cuda").bfloat16()
    before, expected = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16), pool[read]
    triton_places.carry_hidden(pool, read, write.flatten(), hidden, before)
    assert torch.equal(before, expected)
    assert torch.equal(pool[read], hidden.view(rows, length, width)[:, -1])
