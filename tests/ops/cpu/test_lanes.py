"""What kernels on a CPU are made of, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.ops.cpu import LANES
from deltaserve.ops.numba_kernel import kernel
from deltaserve.ops.numba_lanes import (
    BYTES,
    add_product,
    add_product_of_numbers,
    exp,
    larger,
    largest,
    load,
    read_float,
    sigmoid,
    silu,
    smaller,
    smallest,
    splat,
    store,
    total,
    write_float,
)

NAN, INFINITY = float("nan"), float("inf")


@kernel(5)
def functions(x, exps, sigmoids, silus, count):  # type: ignore[no-untyped-def]
    for place in range(0, 4 * count, BYTES):
        value = load(x + place)
        store(exps + place, exp(value))
        store(sigmoids + place, sigmoid(value))
        store(silus + place, silu(value))


@kernel(2)
def folds(x, y):  # type: ignore[no-untyped-def]
    left, right = load(x), load(x + BYTES)
    write_float(y, total(left))
    write_float(y + 4, largest(larger(left, right)))
    write_float(y + 8, smallest(smaller(left, right)))


@kernel(3)
def products(x, y, count):  # type: ignore[no-untyped-def]
    """`y = x * x + y`, by lanes but for the last few."""
    whole = count // LANES * LANES
    for place in range(0, 4 * whole, BYTES):
        store(y + place, add_product(load(x + place), load(x + place), load(y + place)))
    for place in range(4 * whole, 4 * count, 4):
        value = read_float(x + place)
        write_float(y + place, add_product_of_numbers(value, value, read_float(y + place)))
    if count > LANES:
        store(y, splat(np.float32(1)))


def computed(x: Tensor) -> list[Tensor]:
    made = [torch.empty_like(x) for _ in range(3)]
    functions(x.data_ptr(), *(y.data_ptr() for y in made), x.shape[0])
    return made


@pytest.mark.parametrize("span", [1e-6, 1.0, 86.0])
def test_exponentials_are_right_to_the_last_bits(span: float) -> None:
    x = torch.linspace(-span, span, 80_000)
    exact = x.double()
    for found, right in zip(computed(x), (exact.exp(), exact.sigmoid(), exact * exact.sigmoid()), strict=True):
        error = (found.double() - right).abs() / right.abs().clamp(min=1e-30)
        assert float(error.max()) < 3 * 2**-24


def test_exponentials_beyond_what_a_float_holds() -> None:
    x = torch.tensor([-1e30, -INFINITY, -104.0, -88.0, 0.0, 89.0, INFINITY, NAN])
    exps, sigmoids, silus = computed(x)
    assert exps[:4].tolist() == [0, 0, 0, 0]
    assert exps[4:7].tolist() == [1, INFINITY, INFINITY]
    assert sigmoids[4:7].tolist() == [0.5, 1, 1]
    assert float(sigmoids[:4].max()) < 1e-38
    assert silus[[4, 5, 6]].tolist() == [0, 89, INFINITY]
    assert float(silus[[0, 2, 3]].abs().max()) < 1e-36
    for found in (exps, sigmoids, silus):
        assert found[7].isnan()


def test_every_nan_stays_nan() -> None:
    """Whatever its low bits are, of which the exponent is made."""
    x = torch.arange(0x7FC00000, 0x7FC00400, dtype=torch.int32).view(torch.float32)
    for found in computed(torch.cat([x, -x])):
        assert found.isnan().all()


def test_folds() -> None:
    x, y = torch.randn(2 * LANES), torch.empty(3)
    folds(x.data_ptr(), y.data_ptr())
    halves = (x[0] + x[4]) + (x[2] + x[6]), (x[1] + x[5]) + (x[3] + x[7])
    assert y.tolist() == [float(halves[0] + halves[1]), float(x.max()), float(x.min())]


def test_lanes_and_numbers_round_alike() -> None:
    x, y = torch.randn(LANES), torch.randn(LANES)
    by_lanes, one_by_one = y.clone(), y.clone()
    products(x.data_ptr(), by_lanes.data_ptr(), LANES)
    for i in range(LANES):
        products(x[i:].data_ptr(), one_by_one[i:].data_ptr(), 1)
    assert torch.equal(by_lanes, one_by_one)
    torch.testing.assert_close(by_lanes.double(), x.double() ** 2 + y.double(), rtol=1e-6, atol=1e-6)


def test_splat() -> None:
    x, y = torch.zeros(2 * LANES), torch.zeros(2 * LANES)
    products(x.data_ptr(), y.data_ptr(), 2 * LANES)
    assert y.tolist() == [1.0] * LANES + [0.0] * LANES
