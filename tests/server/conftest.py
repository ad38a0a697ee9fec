"""Two servers for a whole file's tests: an engine that answers at once, and one that takes its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Running, running


@pytest.fixture(scope="package")
def fast_server() -> Iterator[Running]:
    with running("fast") as server:
        yield server


@pytest.fixture(scope="package")
def slow_server() -> Iterator[Running]:
    """Eight requests at once, ten milliseconds a step."""
    with running("slow", max_num_seqs=8) as server:
        yield server


@pytest.fixture
def server(fast_server: Running) -> Iterator[Running]:
    """The engine answers at once, and each test leaves it idle."""
    yield fast_server
    fast_server.wait_until_idle()


@pytest.fixture
def slow(slow_server: Running) -> Iterator[Running]:
    """The engine takes its time, and each test leaves it idle."""
    yield slow_server
    slow_server.wait_until_idle()
