"""The kernels of attention, interpreted, against the reference in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from deltaserve.ops.attention import reference, triton_entry
from tests.ops.attention_rows import Rows, bits

WIDTH = 32
HEADS = [(8, 1), (4, 2), (1, 1), (6, 2)]


def rows_of(
    starts: Sequence[int],
    lengths: Sequence[int],
    num_step: int,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    padding: Sequence[int] = (),
    first_key: int = 0,
) -> Rows:
    return Rows(starts, lengths, num_step, heads, WIDTH, dtype, padding, first_key)


def check(rows: Rows) -> None:
    before = rows.pool.clone()
    expected, pool = rows.expected()
    out = rows.run()
    eps = 1e-5 if out.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=eps)
    torch.testing.assert_close(rows.pool.double(), pool, rtol=eps, atol=eps, equal_nan=True)
    assert rows.untouched(before)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_steps_over_contexts_of_every_length(heads: tuple[int, int], length: int) -> None:
    contexts = [max(length, context) for context in (1, 63, 64, 65, 200)]
    check(rows_of([context - length for context in contexts], [length] * 5, 5, heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_long_row_among_short_ones(dtype: torch.dtype) -> None:
    check(rows_of([0, 1500, 5], [1, 1, 1], 3, (8, 1), dtype))


@pytest.mark.parametrize("rows", [3, 9])
def test_units_joined_in_slices(rows: int) -> None:
    """Heads are wider than what one program joins of few rows."""
    starts = [700, 0, *[3] * (rows - 3), 130]
    check(Rows(starts, [2] * rows, rows, (4, 2), 72, torch.float32))


@pytest.mark.parametrize("rows", [1, 2, 130])
def test_many_rows(rows: int) -> None:
    check(rows_of([random.choice([0, 3, 63, 64, 130]) for _ in range(rows)], [1] * rows, rows, (1, 1)))


def test_nine_tokens_of_eight_heads() -> None:
    check(rows_of([100, 0], [9, 9], 2, (8, 1)))


@pytest.mark.parametrize("heads", HEADS)
def test_chunks_behind_contexts(heads: tuple[int, int]) -> None:
    lengths = [1, 63, 64, 65, 200] if heads == (4, 2) else [1, 17, 65]
    check(rows_of([0, 5, 64, 130, 0][: len(lengths)], lengths, 0, heads))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128])
def test_a_prompt_of_every_length(tokens: int) -> None:
    check(rows_of([0], [tokens], 0, (8, 2), torch.float16))


def test_steps_and_chunks_in_one_step() -> None:
    check(rows_of([70, 3, 0, 64], [2, 2, 33, 64], 2))


@pytest.mark.parametrize("num_step", [0, 4])
def test_a_first_key_that_is_not_there(num_step: int) -> None:
    """A row of one token sees no key, and gives zeros."""
    step = rows_of([0, 1, 64, 200], [1] * 4, num_step, first_key=1)
    expected, _ = step.expected()
    out = step.run()
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("num_step", [0, 5])
def test_first_keys_anywhere(num_step: int) -> None:
    """What lies before them is NaN."""
    step = rows_of([0, 70, 64, 200, 130], [2] * 5, num_step)
    first = torch.tensor([1, 70, 3, 199, 65], dtype=torch.int32)
    step.layout = dataclasses.replace(step.layout, first_key=first)
    for row, key in enumerate(first.tolist()[1:], 1):
        for place in range(key):
            step.pool[:, int(step.layout.block_table[row, place // 64]), place % 64] = torch.nan
    expected, _ = step.expected()
    out = step.run()
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows(num_step: int) -> None:
    step = rows_of([0, 40, 0, 80], [1] * 4, num_step, padding=(0, 2))
    for x in (step.q, step.k, step.v, step.gate):
        x[2] = torch.nan
    before = step.pool.clone()
    expected, pool = step.expected()
    out = step.run()
    torch.testing.assert_close(out[[1, 3]].double(), expected[[1, 3]], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    torch.testing.assert_close(step.pool.double(), pool, rtol=1e-5, atol=1e-5, equal_nan=True)
    changed = (bits(step.pool) != bits(before)).view(2, -1, 2 * WIDTH * 4).any(2).any(0).nonzero().squeeze(1)
    assert sorted(changed.tolist()) == sorted(step.layout.kv_index[[1, 3]].tolist())


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's, in the interpreter
def test_a_row_of_nan_stays_alone() -> None:
    step = rows_of([70, 70, 3], [1, 1, 20], 2)
    expected, _ = step.expected()
    step.q[0] = torch.nan
    out = step.run()
    assert bool(out[0].isnan().all())
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)


def test_without_a_gate_and_a_plain_store() -> None:
    step = rows_of([70, 3], [1, 20], 1)
    gated = step.run()
    plain = step.run(gate=False)
    torch.testing.assert_close(plain * step.gate.sigmoid(), gated, rtol=1e-5, atol=1e-6)
    k, pool = torch.randn(21, 2, WIDTH), step.pool.clone()
    triton_entry.store(k, step.v, step.pool, step.layout.kv_index)
    reference.store(k, step.v, pool, step.layout)
    assert torch.equal(bits(step.pool), bits(pool))
