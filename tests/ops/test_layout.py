"""Layouts from plain integers, what is derived from them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltaserve.ops.layout import BLOCK, Layout, Segment, kept_by_place, plain, read_slots, slot_index


def test_from_rows_counts_tokens_rows_and_blocks() -> None:
    layout = Layout.from_rows(
        [1, 1, 3],
        num_step=2,
        starts=[70, 0, 62],
        read_slots=[4, -1, 2],
        write_slots=[[4], [0], [-1, 5, 2]],
        blocks=[[3, 1], [0], [7, 2]],
    )
    step, chunk = layout.segments
    assert (step.is_step, step.row_start, step.row_end, step.token_start, step.token_end) == (True, 0, 2, 0, 2)
    assert (chunk.is_step, chunk.row_start, chunk.row_end, chunk.token_start, chunk.token_end) == (False, 2, 3, 2, 5)
    assert (step.max_len, chunk.max_len) == (1, 3)
    assert step.cu_seqlens.tolist() == [0, 1, 2]
    assert chunk.cu_seqlens.tolist() == [0, 3]
    assert layout.read_slot.tolist() == [4, -1, 2]
    assert layout.write_slot.tolist() == [4, 0, -1, 5, 2]
    assert layout.position.tolist() == [70, 0, 62, 63, 64]
    assert layout.block_table.tolist() == [[3, 1], [0, -1], [7, 2]]
    assert layout.kv_index.tolist() == [BLOCK + 6, 0, 7 * BLOCK + 62, 7 * BLOCK + 63, 2 * BLOCK]
    assert layout.context_len.tolist() == [71, 1, 65]
    dtypes = [layout.read_slot, layout.write_slot, layout.position, layout.kv_index]
    assert {tensor.dtype for tensor in dtypes} == {torch.int64}
    assert {tensor.dtype for tensor in (layout.block_table, layout.context_len, step.cu_seqlens)} == {torch.int32}


def test_plain_layouts() -> None:
    layout = Layout.from_rows([1, 2], num_step=1, blocks=[[1], [0]])
    assert plain(layout) is layout
    assert plain(replace(layout, first_key=torch.zeros(2, dtype=torch.int32))).first_key is not None
    odd_ones: dict[str, Any] = {
        "read_slot": layout.read_slot.int(),
        "write_slot": torch.zeros(6, dtype=torch.int64)[::2],
        "context_len": layout.context_len.long(),
        "block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2],
        "first_key": torch.zeros(2, dtype=torch.int64),
    }
    for name, odd in odd_ones.items():
        with pytest.raises(AssertionError, match="layout:"):
            plain(replace(layout, **{name: odd}))


def test_from_rows_without_memory_points_nowhere() -> None:
    layout = Layout.from_rows([2, 3])
    assert [segment.is_step for segment in layout.segments] == [False]
    assert layout.read_slot.tolist() == [-1, -1]
    assert layout.write_slot.tolist() == layout.kv_index.tolist() == [-1] * 5
    assert layout.block_table.shape == (2, 0)
    assert layout.context_len.tolist() == [0, 0]


def test_from_rows_refuses_what_is_no_layout() -> None:
    with pytest.raises(AssertionError, match="rows of a step segment have"):
        Layout.from_rows([1, 2], num_step=2)
    with pytest.raises(AssertionError, match="a row has no token"):
        Layout.from_rows([1, 0])
    with pytest.raises(AssertionError, match="one write slot per token"):
        Layout.from_rows([2], write_slots=[[1]])


def test_once_derives_once_per_layout_and_arguments() -> None:
    calls = []

    def derive(layout: Layout, segment: Segment, factor: int) -> int:
        calls.append(factor)
        return factor * segment.max_len

    layout, other = Layout.from_rows([2, 3], num_step=1), Layout.from_rows([2])
    step, chunk = layout.segments
    assert [layout.once(derive, step, 2), layout.once(derive, step, 2), layout.once(derive, step, 3)] == [4, 4, 6]
    assert layout.once(derive, chunk, 2) == 6
    assert other.once(derive, other.segments[0], 2) == 4
    assert calls == [2, 3, 2, 2]


def test_reading_slots_replaces_what_is_fresh_and_leaves_the_pool() -> None:
    layout = Layout.from_rows([1, 2, 1], read_slots=[1, -1, 0], write_slots=[[-1], [5, -1], [7]])
    index = layout.once(slot_index, layout.segments[0])
    assert index.kept_token.tolist() == [1, 3]
    assert index.kept_slot.tolist() == [5, 7]
    assert index.in_place is None
    pool = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0]])
    pool[0] = torch.nan
    state = read_slots(pool, index)
    assert state[:2].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert state[2].isnan().all()
    state[0] = 9
    assert pool[1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("read", "write", "in_place"),
    [
        ([3], [3], slice(3, 4)),
        ([3, 4, 5], [3, 4, 5], slice(3, 6)),
        ([3, 5, 4], [3, 5, 4], None),
        ([3, 4], [3, 5], None),
        ([3, 5], [3, 4], None),
        ([3, 4], [3, -1], None),
        ([-1, 0], [-1, 0], None),
        ([-1], [0], None),
    ],
)
def test_slots_are_in_place_only_where_nothing_moves(read: list[int], write: list[int], in_place: slice | None) -> None:
    for num_step in (len(read), 0):
        layout = Layout.from_rows(
            [1] * len(read), num_step=num_step, read_slots=read, write_slots=[[slot] for slot in write]
        )
        assert slot_index(layout, layout.segments[0]).in_place == (in_place if num_step else None)


def test_what_to_keep_of_each_place() -> None:
    layout = Layout.from_rows([3, 3], num_step=2, write_slots=[[1, -1, 2], [4, -1, -1]])
    first, second, third = kept_by_place(layout, layout.segments[0])
    assert first.row is None
    assert first.slot.tolist() == [1, 4]
    assert second.row is not None
    assert second.row.tolist() == second.slot.tolist() == []
    assert third.row is not None
    assert (third.row.tolist(), third.slot.tolist()) == ([0], [2])
