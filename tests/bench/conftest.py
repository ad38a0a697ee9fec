"""One server of the built-in model for all tests of the clients; it runs four requests and lets none wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Server, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with serving("--num-threads", "1", "--max-waiting", "0", "--max-num-seqs", "4", api_key="key") as running:
        yield running
