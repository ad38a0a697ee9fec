"""The kernels of sampling, interpreted, against the reference: the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.sampling import api, reference, triton_draw, triton_greedy, triton_right

VOCAB = 5000
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: infinity - infinity


def rough_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    """With many equal ones."""
    return (torch.randn(rows, vocab) * 3).mul(16).round().div(16)


@pytest.mark.parametrize("vocab", [1, 40, 4096, 4097, VOCAB])
def test_the_most_likely_token_is_the_lowest_of_equals(vocab: int) -> None:
    logits = rough_logits(5, vocab)
    logits[1] = 3.0
    logits[2] = -torch.inf
    if vocab > 30:
        logits[3, [7, 30, vocab - 1]] = 50.0
    token, finite, largest = triton_greedy.extremes(logits)
    assert torch.equal(token, reference.greedy(logits))
    assert torch.equal(finite, reference.is_finite(logits))
    assert torch.equal(largest, logits.amax(1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_found(bad: float) -> None:
    logits = rough_logits(4)
    logits[1, 5], logits[3, -1] = bad, bad
    token, finite, _ = triton_greedy.extremes(logits[:, :])
    assert finite.tolist() == [True, False, True, False]
    assert torch.equal(token[[0, 2]], reference.greedy(logits[[0, 2]]))
    assert bool(((token >= 0) & (token < VOCAB)).all())


def test_a_row_whose_spread_overflows_is_not_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e38, -1e38, 0.0]])
    assert triton_greedy.extremes(logits)[1].tolist() == [False, True]


def drawn(
    logits: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """By the kernels, and by the reference."""
    rows, vocab = logits.shape
    ours = triton_draw.sample(logits, temperature, uniform, top_k, top_p, min_p)
    weight = reference.weigh(logits, temperature)
    if top_k is not None or top_p is not None:
        k = torch.full((rows,), vocab) if top_k is None else top_k
        p = torch.ones(rows, dtype=torch.float64) if top_p is None else top_p
        weight = reference.cut_top(weight, logits, k, p, vocab)
    if min_p is not None:
        weight = reference.cut_min(weight, min_p)
    return ours, reference.draw(weight, uniform)


@pytest.mark.parametrize("with_k", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("with_min", [False, True])
def test_draws_are_those_of_the_reference(with_k: bool, with_p: bool, with_min: bool) -> None:
    rows = 6
    logits, temperature = rough_logits(rows), torch.tensor([1.0, 0.3, 2.0, 1e-30, 1.0, 0.7])
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-53
    top_k = torch.tensor([1, 5, 40, VOCAB, 1000, 20]) if with_k else None
    top_p = torch.tensor([0.5, 1.0, 0.9, 0.3, 1e-9, 0.95], dtype=torch.float64) if with_p else None
    min_p = torch.tensor([0.0, 0.1, 1.0, 0.0, 0.02, 0.3], dtype=torch.float64) if with_min else None
    ours, theirs = drawn(logits, temperature, uniform, top_k, top_p, min_p)
    assert ours.tolist() == theirs.tolist()


def test_zeros_of_both_signs_and_negative_logits_are_equal_where_they_should() -> None:
    logits = -rough_logits(3, 50).abs()
    logits[:, ::7], logits[:, 3::7] = -0.0, 0.0
    for k in (1, 3, 30):
        ours, theirs = drawn(
            logits, torch.ones(3), torch.tensor([0.01, 0.5, 0.99]).double(), torch.full((3,), k), None, None
        )
        assert ours.tolist() == theirs.tolist()


def test_a_weight_is_exact_to_its_last_bits() -> None:
    """Through the draw: a token's share of the noise is its weight."""
    for low in (-1.0, -5.5, -12.0):
        logits = torch.tensor([[low, 0.0]])
        end = 1 / (1 + torch.exp(torch.tensor(-low, dtype=torch.float64)))
        for nearly, token in ((1 - 3e-7, 0), (1 + 3e-7, 1)):
            uniform = (end * nearly).reshape(1)
            assert triton_draw.sample(logits, torch.ones(1), uniform, None, None, None).tolist() == [token]


@pytest.mark.parametrize("length", [1, 2, 4, 9])
@pytest.mark.parametrize("rows", [1, 31, 33])
def test_right_guesses_are_counted(rows: int, length: int) -> None:
    token = torch.randint(0, 2, (rows, length))
    guess, ok = torch.randint(0, 2, (rows, length - 1)), torch.rand(rows, length) < 0.8
    expected = reference.count_right(token, ok, guess)
    assert torch.equal(triton_right.count_right(token, ok, guess), expected)
    for row in range(rows):
        num = next((j for j in range(length - 1) if token[row, j] != guess[row, j]), length - 1) + 1
        assert expected[row].tolist() == [num, int(ok[row, :num].all()), *token[row].tolist()]


def test_noise_is_that_of_the_reference() -> None:
    key = torch.randint(-(2**63), 2**63 - 1, (100, 3))[:, 1]
    position = torch.randint(0, 2**40, (100,))
    assert torch.equal(triton_right.uniform(key, position), reference.uniform(key, position))
    assert torch.equal(triton_right.uniform(key[:0], position[:0]), reference.uniform(key[:0], position[:0]))


@pytest.mark.parametrize("stride", [1, 2])
def test_pretended_guesses_are_those_of_torch(stride: int) -> None:
    """Guesses of rows with one each lie behind every other token."""
    rows, vocab = 70, 5
    token, key, position = torch.randint(0, vocab, (rows,)), torch.randint(0, 2**60, (rows,)), torch.arange(rows)
    row, guess = torch.randperm(rows)[:40], torch.randint(0, vocab, (40, stride))[:, 0]
    share, ours = torch.rand(40, dtype=torch.float64), token.clone()
    triton_right.pretend(ours, row, guess, share, key, position, vocab)
    api.pretend(token, row, guess, share, key, position, vocab)
    assert torch.equal(ours, token)
    is_right = token[row] == guess
    assert 0 < int(is_right.sum()) < 40
