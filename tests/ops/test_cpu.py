"""Which tensors kernels on a CPU take, and that torch computes where there is no numba."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from deltaserve.ops import cpu


def test_float32_on_a_cpu_without_gradients() -> None:
    x = torch.ones(2)
    assert cpu.takes_tensors(x, x)
    for other in (x.double(), x.bfloat16(), x.long()):
        assert not cpu.takes_tensors(other)
        assert not cpu.takes_tensors(x, other)
    assert not cpu.takes_tensors(x.to("meta"))
    learned = torch.ones(2, requires_grad=True)
    assert not cpu.takes_tensors(x, learned)
    with torch.no_grad():
        assert cpu.takes_tensors(x, learned)


def test_much_work_is_for_all_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert not cpu.is_worth_threads(10 * cpu.THREAD_WORK)
        torch.set_num_threads(2)
        assert cpu.is_worth_threads(10 * cpu.THREAD_WORK)
        assert not cpu.is_worth_threads(cpu.THREAD_WORK)
        assert not cpu.is_worth_threads(10 * cpu.THREAD_WORK, 3)
    finally:
        torch.set_num_threads(before)


def test_memory_is_float32_whatever_torchs_default_is() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            made = cpu.floats(2, 3)
    finally:
        torch.set_default_dtype(before)
    assert (made.dtype, made.device.type, made.shape) == (torch.float32, "cpu", (2, 3))


def test_preparing_loads_all_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        cpu.prepare()
    assert "kernels for the CPU are ready" in caplog.text
    for module in cpu.MODULES:
        assert cpu.kernels(module) is sys.modules[f"deltaserve.ops.{module}"]


@pytest.mark.parametrize("missing", ["numba", "llvmlite", "numba.core.caching", "the compiler"])
def test_without_numba_torch_computes(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or with one that lacks what kernels are compiled and kept by, or may not compile."""
    for module in [name for name in sys.modules if name.startswith(("deltaserve.ops.numba_", missing))]:
        monkeypatch.delitem(sys.modules, module)
    if missing == "the compiler":
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    cpu.is_available.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not cpu.takes_tensors(torch.ones(2))
            cpu.prepare()
        assert caplog.text.count("torch computes") == 1
    finally:
        cpu.is_available.cache_clear()
