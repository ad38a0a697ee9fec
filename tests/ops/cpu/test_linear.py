"""Products by kernels on a CPU against float64, and each row's bits, whoever is computed beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear import api, cpu, numba_linear
from deltaserve.ops.norm.reference import add_gemma_rms_norm
from tests.ops.guarded import guarded, relative

EPS = 1e-6
SIZES = [(192, 784), (192, 17), (64, 192), (7, 8), (1, 1), (300, 100), (24, 24), (129, 71)]
"""Inputs and outputs."""


def weight(num_in: int, num_out: int) -> Tensor:
    return api.allocate(num_out, num_in, torch.float32, torch.device("cpu")).copy_(torch.randn(num_out, num_in))


def between_columns(rows: int, width: int) -> Tensor:
    """Rows with a stride of their own, beside which NaN lies."""
    wide = torch.full((rows, width + 5), torch.nan)
    wide[:, :width] = torch.randn(rows, width)
    return wide[:, :width]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 33])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes: tuple[int, int], rows: int) -> None:
    x, w = between_columns(rows, sizes[0]), weight(*sizes)
    with guarded():
        y = numba_linear.linear(x, w)
    assert relative(y, x.double() @ w.double().t()) < 1e-6


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rows_bits_do_not_depend_on_its_mates(sizes: tuple[int, int]) -> None:
    x, w = torch.randn(16, sizes[0]), weight(*sizes)
    alone = torch.cat([numba_linear.linear(x[row : row + 1], w) for row in range(16)])
    for rows in (2, 3, 5, 16):
        for first in range(0, 16, rows):
            assert torch.equal(numba_linear.linear(x[first : first + rows], w), alone[first : first + rows])


@pytest.mark.parametrize("rows", [1, 2, 6, 16])
@pytest.mark.parametrize("beside", [0, 1, 16, 17])
def test_a_norm_and_its_products(rows: int, beside: int) -> None:
    x, residual = between_columns(rows, 40), torch.randn(rows, 40)
    norm_weight, w, other = torch.rand(40) + 0.5, weight(40, 72), weight(40, beside) if beside else None
    with guarded():
        y, z, norm, total = numba_linear.norm_linear(x, residual, norm_weight, EPS, w, other)
    exact_norm, exact_total = add_gemma_rms_norm(x.double(), residual.double(), norm_weight.double(), EPS)
    assert torch.equal(total, x + residual)
    assert relative(total, exact_total) < 1e-6
    assert relative(norm, exact_norm) < 1e-6
    assert torch.equal(y, numba_linear.linear(norm, w))
    if other is None:
        assert z is None
    else:
        assert z is not None
        assert torch.equal(z, numba_linear.linear(norm, other))


def test_a_row_of_nan_stays_alone() -> None:
    x, w = torch.randn(6, 16), weight(16, 24)
    expected = numba_linear.linear(x, w)
    x[2] = torch.nan
    y = numba_linear.linear(x, w)
    assert y[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(y[keep], expected[keep])


def test_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 16), weight(16, 24)
    norm = torch.ones(16)
    assert cpu.takes(x, w)
    assert cpu.takes_norm(x, x, norm, w, w)
    assert not cpu.takes(torch.randn(cpu.MAX_ROWS + 1, 16), w), "many rows"
    assert not cpu.takes(x, w.contiguous()), "a weight that lies otherwise"
    assert not cpu.takes(x[:, ::2], weight(8, 24)), "rows with gaps"
    assert not cpu.takes(x[None], w), "three dimensions"
    assert not cpu.takes(x.double(), w.double())
    assert not cpu.takes_norm(x.bfloat16(), x.bfloat16(), norm, w.bfloat16(), None)
    assert not cpu.takes_norm(x[:, :12], x[:, :12], norm[:12], weight(12, 24), None), "no whole vectors"
    assert not cpu.takes_norm(x, x, norm.double(), w, None)
    assert not cpu.takes_norm(x, x, norm, w, w.contiguous())
    assert cpu.takes_norm(x, between_columns(3, 16), norm, w, None)
    assert not cpu.takes_norm(x, torch.randn(3, 32)[:, ::2], norm, w, None), "a residual with gaps"
    assert not cpu.takes_norm(torch.randn(3, 2, 16), x, norm, w, None), "rows yet to be added up"
    assert not cpu.takes(x, w.clone().requires_grad_())
    monkeypatch.setattr(cpu, "is_worth_threads", lambda work: work == 3 * 16 * 24)
    assert not cpu.takes(x, w), "threads are faster"


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_the_facade_answers_alike_beside_the_limit(rows: int) -> None:
    x, residual, norm, w = torch.randn(rows, 32), torch.randn(rows, 32), torch.rand(32) + 0.5, weight(32, 40)
    exact_norm, exact_total = add_gemma_rms_norm(x.double(), residual.double(), norm.double(), EPS)
    y, z, normed, total, ready = api.norm_linear(x, residual, norm, EPS, w)
    assert (z, ready) == (None, None)
    assert relative(y, exact_norm @ w.double().t()) < 1e-6
    assert relative(normed, exact_norm) < 1e-6
    assert relative(total, exact_total) < 1e-6
    assert relative(api.linear(x, w), x.double() @ w.double().t()) < 1e-6
