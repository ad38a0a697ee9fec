"""What every test starts from: one thread, a printed seed, poisoned fresh memory, GPU tests skipped by name."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported, and inherited by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("deltaserve", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("deltaserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deltaserve")
    group.addoption("--seed", type=int, default=0, help="base of every test's random numbers")
    group.addoption(
        "--traffic-seconds", type=float, default=5.0, help="how long each random-traffic test runs; hours are welcome"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    seed, seconds = config.getoption("--seed"), config.getoption("--traffic-seconds")
    return f"seed: {seed} (--seed), random traffic: {seconds:g} s a test (--traffic-seconds), torch {torch.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def traffic_seconds(request: pytest.FixtureRequest) -> float:
    """How long a random-traffic test goes on, in seconds."""
    return float(request.config.getoption("--traffic-seconds"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own seed, already given to `random`, numpy and torch: it depends on `--seed` and the test's name."""
    value = zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode())
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True, scope="session")
def poison() -> Iterator[None]:
    """Fresh memory is NaN: a result that reads what nobody wrote shows itself."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.detach().fill_(float("nan"))
            return tensor

        return fresh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        yield
