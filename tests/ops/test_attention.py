"""Paged attention against a float64 loop over tokens and heads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltaserve.ops.attention import reference
from deltaserve.ops.attention.api import paged_attention
from deltaserve.ops.layout import BLOCK, Layout
from tests.ops.pools import POISONS

WIDTH = 8
SCALE = 0.3


class Sequences:
    """Sequences with random keys and values whose first tokens are in a poisoned pool already."""

    def __init__(
        self, starts: Sequence[int], lengths: Sequence[int], k_heads: int, ratio: int, poison: float, dtype: torch.dtype
    ) -> None:
        self.starts, self.lengths = starts, lengths
        needs = [-(-(start + length) // BLOCK) for start, length in zip(starts, lengths, strict=True)]
        num_blocks = sum(needs) + 3
        ids = random.sample(range(num_blocks), sum(needs))
        self.blocks = [[ids.pop() for _ in range(need)] for need in needs]
        self.pool = torch.full((2, num_blocks, BLOCK, k_heads, WIDTH), poison, dtype=dtype)
        self.kv = [
            torch.randn(2, start + length, k_heads, WIDTH).to(dtype)
            for start, length in zip(starts, lengths, strict=True)
        ]
        self.q = torch.randn(sum(lengths), k_heads * ratio, WIDTH).to(dtype)
        for row, start in enumerate(starts):
            for position in range(start):
                block, offset = self.blocks[row][position // BLOCK], position % BLOCK
                self.pool[:, block, offset] = self.kv[row][:, position]
        self.before = self.pool.clone()

    def run(self, num_step: int) -> Tensor:
        k, v = torch.cat([kv[:, start:] for kv, start in zip(self.kv, self.starts, strict=True)], dim=1)
        layout = Layout.from_rows(self.lengths, num_step=num_step, starts=self.starts, blocks=self.blocks)
        return paged_attention(self.q, k, v, self.pool, layout, SCALE)

    def expected(self) -> Tensor:
        outputs, token = [], 0
        for kv, start, length in zip(self.kv, self.starts, self.lengths, strict=True):
            k, v = kv.double()
            for t in range(start, start + length):
                for head in range(self.q.shape[1]):
                    group = head // (self.q.shape[1] // k.shape[1])
                    scores = k[: t + 1, group] @ self.q[token, head].double() * SCALE
                    weights = torch.exp(scores - scores.max())
                    outputs.append(weights @ v[: t + 1, group] / weights.sum())
                token += 1
        return torch.stack(outputs).view(self.q.shape)

    def assert_stored_and_nothing_else(self) -> None:
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for position in range(start, start + length):
                block, offset = self.blocks[row][position // BLOCK], position % BLOCK
                self.before[:, block, offset] = self.kv[row][:, position]
        torch.testing.assert_close(self.pool, self.before, rtol=0, atol=0, equal_nan=True)


def close(actual: Tensor, expected: Tensor, eps: float = 1e-12) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("ratio", range(1, 9))
def test_a_mixed_ragged_step_equals_each_row_alone(ratio: int, poison: float) -> None:
    for num_step, step_len in ((0, 1), (3, 1), (2, 4)):
        lengths = [step_len] * num_step + [1, 3, 64, 70]
        starts = [random.choice([0, 1, 63, 64, 65, 130, 300]) for _ in lengths]
        rows = Sequences(starts, lengths, random.choice([1, 2, 3]), ratio, poison, torch.float64)
        close(rows.run(num_step), rows.expected())
        rows.assert_stored_and_nothing_else()


@pytest.mark.parametrize("num_rows", [1, 2, 16, 64])
def test_a_decode_of_many_rows_of_mixed_length(num_rows: int) -> None:
    starts = [random.choice([0, 5, 62, 63, 64, 127, 128, 129, 200, 500]) for _ in range(num_rows)]
    rows = Sequences(starts, [1] * num_rows, 2, 2, torch.nan, torch.float64)
    close(rows.run(num_step=num_rows), rows.expected())
    rows.assert_stored_and_nothing_else()


@pytest.mark.parametrize("cuts", [(200,), (64, 136), (1, 62, 1, 1, 135), (100, 100)])
def test_a_prompt_in_chunks_equals_the_whole(cuts: Sequence[int]) -> None:
    whole = Sequences([0], [sum(cuts)], 2, 2, torch.nan, torch.float64)
    expected, q, start = whole.expected(), whole.q, 0
    for cut in cuts:
        part = Sequences([start], [cut], 2, 2, torch.nan, torch.float64)
        part.pool, part.blocks = whole.pool, whole.blocks
        part.q, part.kv = q[start : start + cut], [whole.kv[0][:, : start + cut]]
        close(part.run(num_step=0), expected[start : start + cut])
        start += cut


def test_small_tiles_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Sequences([70] * 6 + [5, 0], [1] * 6 + [50, 33], 2, 2, torch.nan, torch.float64)
    expected = rows.expected()
    close(rows.run(num_step=6), expected)
    monkeypatch.setattr(reference, "TILE", 7)
    monkeypatch.setattr(reference, "GROUP_BYTES", 300 * 2 * 2 * WIDTH * 8)
    close(rows.run(num_step=6), expected)
    monkeypatch.setattr(reference, "TILE_SCORES", 1)
    close(rows.run(num_step=6), expected)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows_touch_nothing_and_return_zeros(num_step: int, poison: float) -> None:
    rows = Sequences([0, 40, 0, 80], [1] * 4, 2, 2, poison, torch.float64)
    expected = rows.expected()
    rows.blocks[0] = rows.blocks[2] = []
    rows.kv[0][:], rows.q[2] = torch.nan, torch.nan
    output = rows.run(num_step)
    close(output[[1, 3]], expected[[1, 3]])
    assert torch.equal(output[[0, 2]], torch.zeros_like(output[[0, 2]]))
    stored = [(rows.blocks[row][start // BLOCK], start % BLOCK, row, start) for row, start in ((1, 40), (3, 80))]
    for block, offset, row, start in stored:
        rows.before[:, block, offset] = rows.kv[row][:, start]
    torch.testing.assert_close(rows.pool, rows.before, rtol=0, atol=0, equal_nan=True)


def test_a_row_of_nan_stays_alone() -> None:
    rows = Sequences([70, 70, 3], [1, 1, 20], 2, 2, torch.nan, torch.float64)
    expected = rows.expected()
    rows.q[0] = torch.nan
    close(rows.run(num_step=2)[1:], expected[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_computed_in_single_at_least(dtype: torch.dtype) -> None:
    rows = Sequences([100, 10, 0, 70], [1, 1, 80, 9], 2, 4, torch.nan, dtype)
    output = rows.run(num_step=2)
    assert output.dtype == dtype
    close(output, rows.expected(), eps=max(1e-5, float(torch.finfo(dtype).eps)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, kv, layout = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), Layout.from_rows([1], blocks=[[0]])
    with pytest.raises(AssertionError, match="does not hold blocks"):
        paged_attention(q, kv, kv, torch.zeros(2, 1, 16, 2, 8), layout, SCALE)
    with pytest.raises(AssertionError, match="3 query heads on 2"):
        paged_attention(q[:, :3], kv, kv, torch.zeros(2, 1, 64, 2, 8), layout, SCALE)
