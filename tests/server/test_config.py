"""What a server refuses to start with."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.server.config import ServerConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": ""}, "host is empty"),
        ({"port": -1}, "port is -1; it must lie in"),
        ({"port": 65536}, "port is 65536"),
        ({"api_key": ("",)}, "api_key"),
        ({"api_key": (" sk",)}, "api_key"),
        ({"api_key": ("ß",)}, "api_key"),
        ({"max_request_bytes": 0}, "max_request_bytes is 0"),
        ({"health_timeout": 0.0}, "health_timeout is 0"),
        ({"header_timeout": 0.0}, "header_timeout is 0"),
        ({"body_timeout": float("nan")}, "body_timeout is nan"),
        ({"keep_alive_timeout": 0}, "keep_alive_timeout is 0"),
        ({"health_timeout": float("inf")}, "health_timeout is inf"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout is -1"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout is nan"),
    ],
)
def test_values_that_could_never_be_honoured(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig(**fields)


def test_an_end_at_once_is_a_choice() -> None:
    assert ServerConfig(shutdown_timeout=0.0).shutdown_timeout == 0
