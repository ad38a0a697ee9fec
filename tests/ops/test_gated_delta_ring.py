"""Steps through a ring of states, on a CPU (see gluon_machine.py), against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import deltaserve.ops.gated_delta
from deltaserve.ops.gated_delta import triton_ring, triton_step
from deltaserve.ops.gpu import properties
from deltaserve.ops.layout import Segment
from deltaserve.ops.linear import reference
from deltaserve.ops.linear.triton_fp8 import new_quantized
from tests.ops.gated_delta_nets import Net, Shape, check, step_rows
from tests.ops.gluon_machine import load_kernels

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    (folder,) = deltaserve.ops.gated_delta.__path__
    return load_kernels(str(Path(folder) / "triton_ring.py"), "ring_kernel")


def run(kernels: ModuleType, net: Net, quantizes: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    shape, arguments, tokens = net.shape, net.arguments(), sum(net.rows.lengths)
    out = torch.full((tokens, shape.v_heads, shape.v_dim), torch.nan, dtype=net.projected.dtype)
    ready = new_quantized(tokens, shape.v_heads * shape.v_dim, out.device) if quantizes else None
    arguments["z_TVD"] = arguments.pop("z_TX").unflatten(1, (shape.v_heads, shape.v_dim))
    kernels.step(**arguments, segment=arguments["layout"].segments[0], out_TVD=out, ready=ready)
    return out, ready


@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, BF16)])
@pytest.mark.parametrize(("rows", "k_heads", "ratio"), [(1, 1, 1), (5, 3, 2), (2, 2, 4)])
def test_steps(
    kernels: ModuleType, rows: int, k_heads: int, ratio: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Padding, rows without a state, and programs with unequal shares, on a device of four multiprocessors."""
    net = Net.random(Shape(k_heads, ratio, 128, 128), step_rows(rows, 1, padding=[1, 3], fresh=[2]), dtype, state_dtype)
    before = net.copy("cpu")
    tolerance = 1e-5 if dtype == F32 else 2e-2
    check(net, run(kernels, net)[0], before, tolerance, tolerance)


def test_rows_that_are_kept_elsewhere_or_not(kernels: ModuleType) -> None:
    rows = step_rows(4, 1)
    rows.write[0] = [-1]
    rows.write[1] = [rows.num_slots]
    net = Net.random(Shape(1, 2, 128, 128), rows, F32, F32)
    before = net.copy("cpu")
    check(net, run(kernels, net)[0], before, 1e-5, 1e-5)


def test_outputs_that_are_quantised(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what quantising them gives."""
    monkeypatch.setattr(kernels, "fp8_way", lambda weight, scale: (weight, 1))
    net = Net.random(Shape(1, 2, 128, 128), step_rows(3, 1, fresh=[1]), F32, F32)
    out, ready = run(kernels, net, quantizes=True)
    assert ready is not None
    for found, expected in zip(ready, reference.quantize_rows(out.flatten(1)), strict=True):
        assert torch.equal(found[: len(out)].float(), expected[: len(out)].float())


def test_many_rows_of_one_token_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, and nothing else does."""
    many = triton_step.RING
    pool = torch.empty(2, 2, 128, 128)

    def chosen(pool: Tensor, rows: int, length: int = 1, is_step: bool = True, first: int = 0) -> object:
        bounds = torch.arange(rows + 1, dtype=torch.int32) * length
        segment = Segment(is_step, first, first + rows, first * length, (first + rows) * length, length, bounds)
        return triton_step.step_of(pool, segment)

    assert chosen(pool, many) is triton_step.step
    hopper = replace(properties(torch.device("cpu")), is_hopper=True)
    monkeypatch.setattr(triton_step, "properties", lambda device: hopper)
    for found in (pool, pool.bfloat16(), pool.half()):
        assert chosen(found, many) is chosen(found, many + 1, first=3) is triton_ring.step
    assert chosen(pool, many - 1, first=3) is triton_step.step
    assert chosen(pool, many, length=2) is triton_step.step
    assert chosen(pool, many, is_step=False) is triton_step.step
    assert chosen(pool.double(), many) is triton_step.step
    assert chosen(torch.empty(2, 2, 128, 64), many) is triton_step.step
    assert chosen(torch.empty(2, 2, 2, 128, 128)[:, 0], many) is triton_step.step
