"""A plan's integers against the tensors they become, counted out token by token."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deltaserve.core.plan import Plan, Row, Seating
from deltaserve.core.request import SamplingParams
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.runner.inputs import Batch, Inputs, Numbers, Seats, start_later
from deltaserve.runner.memory import Pools
from deltaserve.runner.staging import Ints, _pack, _unpack

CPU = torch.device("cpu")
POOLS = Pools(kv=(), conv=(), state=())
MAX_LEN = 300


def seating(seat: int, token_ids: list[int], blocks: tuple[int, ...] = ()) -> Seating:
    return Seating(seat=seat, token_ids=token_ids, num_prompt=len(token_ids), params=SamplingParams(), blocks=blocks)


def row(seat: int, start: int, num_tokens: int, *, samples: bool = True, **where: object) -> Row:
    slots = (-1,) * (num_tokens - 1) + (seat + 40,)
    defaults: dict[str, object] = {"read_slot": seat + 40 if start else -1, "write_slots": slots}
    return Row(seat=seat, start=start, num_tokens=num_tokens, samples=samples, **{**defaults, **where})  # type: ignore[arg-type]


def build(seats: Seats, rows: list[Row], num_decode: int) -> Batch:
    for each in rows:
        seats.append_blocks(each.seat, each.new_blocks)
    return Inputs(seats, POOLS, CPU).build(Numbers.of(Plan(step=0, rows=rows, num_decode=num_decode)))


def test_mixed_step_by_hand() -> None:
    seats = Seats(4, MAX_LEN)
    seats.seat(seating(3, list(range(100, 166))))
    seats.seat(seating(1, [7, 8, 9]))
    seats.append_blocks(3, (20, 21))
    batch = build(seats, [row(3, 65, 1), row(1, 0, 3, new_blocks=(5,), samples=False)], num_decode=1)
    layout = batch.context.layout
    assert batch.token_ids.tolist() == [165, 7, 8, 9]
    assert layout.position.tolist() == [65, 0, 1, 2]
    assert layout.read_slot.tolist() == [43, -1]
    assert layout.write_slot.tolist() == [43, -1, -1, 41]
    assert layout.block_table.tolist() == [[20, 21], [5, -1]]
    assert layout.kv_index.tolist() == [21 * 64 + 1, 5 * 64, 5 * 64 + 1, 5 * 64 + 2]
    assert layout.context_len.tolist() == [66, 3]
    assert batch.last is not None
    assert batch.last.tolist() == [0]
    numbers = batch.numbers
    assert (numbers.sampling.tolist(), numbers.seats.tolist(), numbers.starts.tolist()) == ([0], [3, 1], [65, 0])
    step, chunk = layout.segments
    assert (step.is_step, step.row_start, step.row_end, step.token_start, step.token_end) == (True, 0, 1, 0, 1)
    assert (chunk.is_step, chunk.row_start, chunk.row_end, chunk.token_start, chunk.token_end) == (False, 1, 2, 1, 4)
    assert (step.max_len, step.cu_seqlens.tolist()) == (1, [0, 1])
    assert (chunk.max_len, chunk.cu_seqlens.tolist()) == (3, [0, 3])
    dtypes = {name: getattr(layout, name).dtype for name in ("read_slot", "write_slot", "position", "kv_index")}
    assert set(dtypes.values()) == {torch.int64}
    assert layout.block_table.dtype == layout.context_len.dtype == step.cu_seqlens.dtype == torch.int32
    assert batch.token_ids.dtype == batch.last.dtype == torch.int64


def test_extending_rows_of_one_length_share_a_segment() -> None:
    seats = Seats(6, MAX_LEN)
    lengths = [1, 1, 3, 1, 2]
    for seat in range(5):
        seats.seat(seating(seat, list(range(10)), blocks=(seat,)))
    rows = [row(seat, 4, num_tokens) for seat, num_tokens in enumerate(lengths)]
    segments = build(seats, rows, num_decode=4).context.layout.segments
    assert [(s.is_step, s.row_start, s.row_end, s.max_len) for s in segments] == [
        (True, 0, 2, 1),
        (True, 2, 3, 3),
        (True, 3, 4, 1),
        (False, 4, 5, 2),
    ]
    assert [(s.token_start, s.token_end) for s in segments] == [(0, 2), (2, 5), (5, 6), (6, 8)]
    only_steps = build(seats, rows[:2], num_decode=2).context.layout.segments
    assert [(s.is_step, s.row_end) for s in only_steps] == [(True, 2)]


def test_random_steps_against_loops() -> None:
    draw = random.Random(5)
    for _ in range(50):
        seats = Seats(8, MAX_LEN)
        chosen = draw.sample(range(8), draw.randint(1, 8))
        blocks = draw.sample(range(1000), 8 * 5)
        tokens = {seat: [draw.randrange(1 << 20) for _ in range(draw.randint(1, MAX_LEN))] for seat in chosen}
        rows, held = [], {}
        for seat in chosen:
            end = len(tokens[seat])
            num_tokens = draw.randint(1, end)
            held[seat] = [blocks.pop() for _ in range(-(-end // BLOCK))]
            cut = draw.randint(0, len(held[seat]))
            seats.seat(seating(seat, tokens[seat], blocks=tuple(held[seat][:cut])))
            slots = tuple(draw.randint(-1, 9) for _ in range(num_tokens))
            new = tuple(held[seat][cut:])
            start, samples = end - num_tokens, draw.random() < 0.5
            rows.append(row(seat, start, num_tokens, samples=samples, new_blocks=new, write_slots=slots))
        batch = build(seats, rows, num_decode=0)
        layout = batch.context.layout
        positions = [(r, r.start + i) for r in rows for i in range(r.num_tokens)]
        assert batch.token_ids.tolist() == [tokens[r.seat][p] for r, p in positions]
        assert layout.position.tolist() == [p for _, p in positions]
        assert layout.kv_index.tolist() == [held[r.seat][p // BLOCK] * BLOCK + p % BLOCK for r, p in positions]
        assert layout.write_slot.tolist() == [slot for r in rows for slot in r.write_slots]
        assert layout.context_len.tolist() == [len(tokens[r.seat]) for r in rows]
        width = max(len(held[r.seat]) for r in rows)
        assert layout.block_table.tolist() == [held[r.seat] + [-1] * (width - len(held[r.seat])) for r in rows]
        ends = np.cumsum([r.num_tokens for r in rows])
        wanted = [int(end) - 1 for r, end in zip(rows, ends, strict=True) if r.samples]
        assert wanted == (list(range(int(ends[-1]))) if batch.last is None else batch.last.tolist())


def test_what_starts_later_than_the_context_ends_is_kept_nowhere() -> None:
    """The last entry for drafts of a row whose start was open: 126 and 127 become 127 and 128, of 128."""
    layout = Layout.from_rows([2, 1], num_step=0, starts=[126, 3], blocks=[[4, 5], [6]])
    late = start_later(layout, np.array([2, 1]), torch.tensor([1, 0]), 128)
    assert late.position.tolist() == [127, 127, 3]
    assert late.kv_index.tolist() == [5 * BLOCK + 63, -1, 6 * BLOCK + 3]
    assert late.context_len.tolist() == [128, 4]


def test_new_tenant_inherits_nothing() -> None:
    seats = Seats(1, MAX_LEN)
    seats.seat(seating(0, list(range(200)), blocks=(1, 2, 3, 4)))
    seats.seat(seating(0, [5, 6], blocks=()))
    batch = build(seats, [row(0, 0, 2, new_blocks=(9,))], num_decode=0)
    assert batch.context.layout.block_table.tolist() == [[9]]
    assert seats.block_table[0].tolist() == [9, -1, -1, -1, -1]
    assert seats.num_prompt[0] == 2


def test_token_without_a_block_is_our_fault() -> None:
    seats = Seats(1, MAX_LEN)
    seats.seat(seating(0, list(range(65)), blocks=(1,)))
    with pytest.raises(AssertionError, match="a token has no KV block"):
        build(seats, [row(0, 0, 65)], num_decode=0)


def test_write_slots_must_be_one_a_token() -> None:
    seats = Seats(1, MAX_LEN)
    seats.seat(seating(0, [1, 2, 3], blocks=(1,)))
    with pytest.raises(ValueError, match="too short"):
        build(seats, [row(0, 0, 3, write_slots=(1, 2))], num_decode=0)


def test_one_buffer_carries_all_arrays() -> None:
    arrays: list[npt.NDArray[np.int32] | Ints] = [
        np.array([1, -2, 3], dtype=np.int32),
        np.array([[1 << 40, 5], [6, -7]], dtype=np.int64),
        np.array([], dtype=np.int64),
        np.array([[9]], dtype=np.int32),
    ]
    buffer = np.zeros(64, dtype=np.uint8)
    _pack(buffer, arrays)
    tensors = _unpack(torch.from_numpy(buffer), arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.tolist() == array.tolist()
        assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
