"""Attention by kernels on a CPU, against the reference in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltaserve.ops.attention import api, cpu, numba_attention
from tests.ops.attention_rows import EPS, GUARD, Rows, bits
from tests.ops.guarded import guarded

WIDTH = 32
HEADS = [(8, 1), (4, 2), (1, 1), (6, 2)]
TOLERANCE = 2e-6


def rows_of(
    starts: Sequence[int],
    lengths: Sequence[int],
    num_step: int,
    heads: tuple[int, int] = (4, 2),
    padding: Sequence[int] = (),
    first_key: int = 0,
    width: int = WIDTH,
) -> Rows:
    return Rows(starts, lengths, num_step, heads, width, torch.float32, padding, first_key)


def run(rows: Rows) -> Tensor:
    weights = (rows.q_weight, rows.k_weight, EPS, rows.cos_sin)
    assert cpu.takes(rows.q, rows.gate, rows.k, rows.v, weights, rows.pool)
    with guarded():
        out = cpu.attend(rows.q, rows.gate, rows.k, rows.v, weights, rows.pool, rows.layout, rows.scale)
    for margin in (rows.memory[:GUARD], rows.memory[-GUARD:]):
        assert bool(margin.isnan().all()), "written beside the pool"
    return out


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def check(rows: Rows) -> None:
    before = rows.pool.clone()
    expected, pool = rows.expected()
    close(run(rows), expected)
    close(rows.pool, pool)
    assert rows.untouched(before)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_steps_over_contexts_of_every_length(heads: tuple[int, int], length: int) -> None:
    contexts = [max(length, context) for context in (1, 2, 63, 64, 65, 66, 67, 200)]
    check(rows_of([context - length for context in contexts], [length] * 8, 8, heads))


@pytest.mark.parametrize("width", [8, 16, 64, 72])
def test_any_width_of_whole_vectors(width: int) -> None:
    check(rows_of([70, 3], [2, 2], 2, width=width))


def test_one_long_row_among_short_ones() -> None:
    check(rows_of([0, 1500, 5], [1, 1, 1], 3, (8, 1)))


@pytest.mark.parametrize("rows", [1, 130])
def test_many_rows(rows: int) -> None:
    check(rows_of([random.choice([0, 3, 63, 64, 130]) for _ in range(rows)], [1] * rows, rows, (1, 1)))


@pytest.mark.parametrize("heads", HEADS)
def test_prompts_behind_contexts(heads: tuple[int, int]) -> None:
    check(rows_of([0, 5, 64], [1, 17, 65], 0, heads))


def test_steps_and_prompts_in_one_step() -> None:
    check(rows_of([70, 3, 0, 64], [2, 2, 33, 64], 2))


@pytest.mark.parametrize("num_step", [0, 5])
def test_first_keys_anywhere(num_step: int) -> None:
    """What lies before them is NaN. A row that sees no key gives zeros."""
    step = rows_of([0, 70, 64, 200, 130], [2] * 5, num_step)
    first = torch.tensor([1, 70, 3, 199, 65], dtype=torch.int32)
    step.layout = dataclasses.replace(step.layout, first_key=first)
    for row, key in enumerate(first.tolist()[1:], 1):
        for place in range(key):
            step.pool[:, int(step.layout.block_table[row, place // 64]), place % 64] = torch.nan
    expected, _ = step.expected()
    out = run(step)
    close(out[1:], expected[1:])
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows(num_step: int) -> None:
    step = rows_of([0, 40, 0, 80], [1] * 4, num_step, padding=(0, 2))
    for x in (step.q, step.k, step.v):
        x[0] = torch.nan
    before = step.pool.clone()
    expected, pool = step.expected()
    out = run(step)
    close(out[[1, 3]], expected[[1, 3]])
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    close(step.pool, pool)
    changed = (bits(step.pool) != bits(before)).view(2, -1, 2 * WIDTH * 4).any(2).any(0).nonzero().squeeze(1)
    assert sorted(changed.tolist()) == sorted(step.layout.kv_index[[1, 3]].tolist())


def test_a_row_of_nan_stays_alone() -> None:
    step = rows_of([70, 70, 3], [1, 1, 20], 2)
    expected, _ = step.expected()
    step.q[0] = torch.nan
    out = run(step)
    assert bool(out[0].isnan().all())
    close(out[1:], expected[1:])


def test_scores_far_apart() -> None:
    """The softmax neither overflows nor forgets the largest."""
    step = rows_of([100], [1], 1)
    step.scale = 1e4
    expected, _ = step.expected()
    torch.testing.assert_close(run(step).double(), expected, rtol=1e-3, atol=1e-3)


def test_bits_do_not_depend_on_mates() -> None:
    both = rows_of([70, 3, 130], [1, 1, 1], 3)
    out = run(both)
    alone = rows_of([130], [1], 1)
    alone.q, alone.k, alone.v, alone.gate = both.q[2:], both.k[2:], both.v[2:], both.gate[2:]
    alone.q_weight, alone.k_weight, alone.cos_sin, alone.memory, alone.pool = (
        *(both.q_weight, both.k_weight, both.cos_sin),
        *(both.memory, both.pool),
    )
    table = both.layout.block_table[2:].contiguous()
    alone.layout = dataclasses.replace(
        alone.layout, block_table=table, kv_index=both.layout.kv_index[2:].contiguous(), memo={}
    )
    assert torch.equal(run(alone), out[2:])


def test_what_is_taken() -> None:
    rows = rows_of([3, 5], [1, 1], 2)
    weights = (rows.q_weight, rows.k_weight, EPS, rows.cos_sin)
    assert cpu.takes(rows.q, rows.gate, rows.k, rows.v, weights, rows.pool)
    gaps = torch.randn(2, 4, 2 * WIDTH)[..., ::2]
    assert not cpu.takes(gaps, rows.gate, rows.k, rows.v, weights, rows.pool)
    assert not cpu.takes(rows.q, rows.gate, rows.k, rows.v, weights, rows.pool.bfloat16())
    assert not cpu.takes(rows.q, rows.gate, rows.k, rows.v, weights, rows.pool.transpose(1, 2))
    narrow = rows_of([3], [1], 1, width=42)
    assert not cpu.takes(narrow.q, narrow.gate, narrow.k, narrow.v, weights, narrow.pool)


def test_many_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = rows_of([70, 3, 9], [1, 1, 30], 2)
    expected, _ = step.expected()
    calls: list[tuple[int, int]] = []
    keys = step.layout.block_table.shape[1] * 64

    def is_worth_threads(work: int, needed: int) -> bool:
        calls.append((work, needed))
        return True

    monkeypatch.setattr(cpu, "is_worth_threads", is_worth_threads)
    monkeypatch.setattr(numba_attention, "step", lambda *_: pytest.fail("one thread computes"))
    torch.testing.assert_close(run(step).double(), expected, rtol=1e-5, atol=1e-5)
    assert calls == [(2 * 2 * keys * 4 * WIDTH, cpu.MANY_THREADS)]


@pytest.mark.parametrize("width", [32, 42])
def test_the_facade(width: int) -> None:
    rows = rows_of([70, 3, 0], [1, 1, 33], 2, width=width)
    expected, pool = rows.expected()
    weights = (rows.q_weight, rows.k_weight, EPS, rows.cos_sin)
    out = api.gated_attention(rows.q, rows.gate, rows.k, rows.v, *weights, rows.pool, rows.layout, rows.scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.pool.double(), pool, rtol=1e-5, atol=1e-5, equal_nan=True)
