"""The most likely token by its kernel on a CPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.sampling import api, numba_greedy, reference
from tests.ops.guarded import guarded

NAN, INFINITY, LARGEST = float("nan"), float("inf"), 3.4e38


def run(logits: Tensor) -> tuple[Tensor, Tensor]:
    with guarded():
        tokens, finite = numba_greedy.greedy_checked(logits)
    assert (tokens.dtype, finite.dtype) == (torch.int64, torch.bool)
    return tokens, finite


@pytest.mark.parametrize(("rows", "vocab"), [(1, 8), (3, 2048), (16, 1000), (0, 16)])
def test_tokens(rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab)
    tokens, finite = run(logits)
    assert torch.equal(tokens, reference.greedy(logits)) if rows else tokens.shape == (0,)
    assert finite.tolist() == [True] * rows


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    logits = torch.randint(0, 3, (50, 64)).float()
    logits[0], logits[1, ::2] = -7.0, -0.0
    tokens, _ = run(logits)
    assert tokens.tolist() == [row.tolist().index(row.max()) for row in logits]


@pytest.mark.parametrize("place", [0, 7, 8, 23])
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_a_row_that_is_not_finite_is_told(value: float, place: int) -> None:
    logits = torch.randn(3, 24)
    logits[1, place] = value
    tokens, finite = run(logits)
    assert finite.tolist() == reference.is_finite(logits).tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == reference.greedy(logits)[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 24


def test_logits_as_far_apart_as_floats_can_be() -> None:
    logits = torch.zeros(3, 16)
    logits[0, 3] = LARGEST
    logits[1, 3], logits[1, 9] = LARGEST, -LARGEST
    logits[2, 3], logits[2, 9] = -LARGEST, -1e-40
    _, finite = run(logits)
    assert finite.tolist() == reference.is_finite(logits).tolist() == [True, False, True]


@pytest.mark.parametrize("vocab", [24, 20])
def test_the_facade(vocab: int) -> None:
    logits = torch.randn(4, vocab)
    logits[2, 1] = NAN
    tokens, finite = api.greedy_checked(logits)
    assert finite.tolist() == [True, True, False, True]
    assert tokens[[0, 1, 3]].tolist() == reference.greedy(logits)[[0, 1, 3]].tolist()
    gaps = torch.randn(4, 2 * vocab)[:, ::2]
    assert torch.equal(api.greedy_checked(gaps)[0], reference.greedy(gaps))
