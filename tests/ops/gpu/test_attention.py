"""The kernels of attention on a GPU against float64, at the large model's shapes and at odd ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from deltaserve.ops.attention.api import gated_attention, paged_attention
from tests.ops.attention_rows import EPS, Rows

pytestmark = pytest.mark.gpu
LARGE, SMALL = ((16, 2), 256), ((4, 2), 64)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
KINDS = [(LARGE, torch.bfloat16), (LARGE, torch.float32), (SMALL, torch.float32), (((6, 2), 40), torch.bfloat16)]
"""Few, because each is compiled."""


def rows_of(
    shape: tuple[tuple[int, int], int],
    starts: list[int],
    lengths: list[int],
    num_step: int,
    dtype: torch.dtype = torch.bfloat16,
    padding: tuple[int, ...] = (),
    first_key: int = 0,
) -> Rows:
    return Rows(starts, lengths, num_step, *shape, dtype, padding, first_key, "cuda")


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def check(rows: Rows) -> None:
    before = rows.pool.clone()
    expected, pool = rows.expected()
    out = rows.run()
    limit = LIMITS[out.dtype]
    assert error(out, expected) <= limit
    assert error(rows.pool.double().nan_to_num(), pool.nan_to_num()) <= limit
    assert torch.equal(rows.pool.isnan(), pool.isnan())
    assert rows.untouched(before)


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
@pytest.mark.parametrize("length", [1, 2])
def test_steps_over_contexts_of_every_length(
    length: int, shape: tuple[tuple[int, int], int], dtype: torch.dtype
) -> None:
    contexts = [max(length, context) for context in (1, 63, 64, 65, 640, 4096)]
    check(rows_of(shape, [context - length for context in contexts], [length] * 6, 6, dtype))


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_steps_of_many_tokens(length: int) -> None:
    check(rows_of(LARGE, [100, 0, 1000], [length] * 3, 3))


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 128, 256, 300])
def test_many_rows(rows: int) -> None:
    starts = [random.choice([0, 3, 63, 64, 130, 700]) for _ in range(rows)]
    check(rows_of(LARGE, starts, [1] * rows, rows))


def test_one_long_row_among_short_ones() -> None:
    check(rows_of(LARGE, [0, 30000, *[5] * 30], [1] * 32, 32))


@pytest.mark.parametrize("start", [1023, 8191, 30000])
@pytest.mark.parametrize("rows", [1, 8])
def test_few_long_rows(rows: int, start: int) -> None:
    """Whose many units are joined by many programs."""
    check(rows_of(LARGE, [start, *[700] * (rows - 1)], [2] * rows, rows))


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_chunks_behind_contexts(shape: tuple[tuple[int, int], int], dtype: torch.dtype) -> None:
    check(rows_of(shape, [0, 5, 64, 130, 0], [1, 63, 64, 65, 200], 0, dtype))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_of_every_length(tokens: int, dtype: torch.dtype) -> None:
    check(rows_of(LARGE, [0], [tokens], 0, dtype))


def test_a_long_chunk_behind_a_long_context() -> None:
    check(rows_of(LARGE, [3000], [1000], 0))


def test_many_short_chunks() -> None:
    lengths = [random.randrange(1, 40) for _ in range(150)]
    check(rows_of(LARGE, [random.choice([0, 64, 90]) for _ in lengths], lengths, 0))


@pytest.mark.parametrize("num_step", [0, 4])
def test_a_first_key_that_is_not_there(num_step: int) -> None:
    rows = rows_of(LARGE, [0, 1, 64, 700], [1] * 4, num_step, first_key=1)
    expected, _ = rows.expected()
    out = rows.run()
    assert error(out[1:], expected[1:]) <= 1e-2
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows(num_step: int) -> None:
    rows = rows_of(LARGE, [0, 40, 0, 80], [1] * 4, num_step, padding=(0, 2))
    for x in (rows.q, rows.k, rows.v, rows.gate):
        x[2] = torch.nan
    before = rows.pool.clone()
    expected, _ = rows.expected()
    out = rows.run()
    assert error(out[[1, 3]], expected[[1, 3]]) <= 1e-2
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert rows.untouched(before)


def test_a_row_of_nan_stays_alone() -> None:
    rows = rows_of(LARGE, [70, 700, 3], [1, 1, 20], 2)
    expected, _ = rows.expected()
    rows.q[0] = torch.nan
    out = rows.run()
    assert bool(out[0].isnan().all())
    assert error(out[1:], expected[1:]) <= 1e-2


def test_the_facade_and_its_replay() -> None:
    """A captured step computes from the layout's tensors as they are when it is replayed."""
    rows = rows_of(LARGE, [70, 700, 3], [1, 1, 1], 3)
    q_weight, k_weight = rows.q_weight, rows.k_weight
    layout = rows.layout

    def run() -> Tensor:
        return gated_attention(
            rows.q, rows.gate, rows.k, rows.v, q_weight, k_weight, EPS, rows.cos_sin, rows.pool, layout, rows.scale
        )  # fmt: skip

    expected, _ = rows.expected()
    assert error(run(), expected) <= 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    layout.context_len[1] = 0
    layout.kv_index[1] = -1
    before = rows.pool.clone()
    graph.replay()
    assert error(out[[0, 2]], expected[[0, 2]]) <= 1e-2
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert rows.untouched(before)


def test_without_norm_and_gate() -> None:
    rows = rows_of(SMALL, [70, 3], [1, 20], 1, torch.float32)
    out = paged_attention(rows.q, rows.k, rows.v, rows.pool, rows.layout, rows.scale)
    q, k, v = (x.double() for x in (rows.q, rows.k, rows.v))
    expected = paged_attention(q, k, v, rows.pool.double(), rows.layout, rows.scale)
    assert error(out, expected) <= 1e-5
