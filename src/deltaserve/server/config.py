"""What the user chose about serving. Frozen; every field is a flag of `deltaserve serve`. Knows no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, text: str, unit: str = "") -> Any:
    """A field that becomes a command line flag: `text` is its help and its line in the docs."""
    return field(default=default, metadata={"help": text, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Raises ValueError from the constructor for values that could never be honoured."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every network of the machine")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = _option((), "a key that clients must bring; may be given several times, each is valid")
    chat_template: str | None = _option(None, "file with a chat template to use instead of the checkpoint's")
    max_request_bytes: int = _option(8 << 20, "longest body of a request; a longer one is answered 413", "bytes")
    header_timeout: float = _option(10.0, "a connection is closed when a request's head takes longer", "seconds")
    body_timeout: float = _option(60.0, "a request whose body takes longer is answered 408", "seconds")
    keep_alive_timeout: int = _option(30, "a connection without a request is closed after so long", "seconds")
    health_timeout: float = _option(30.0, "/health is 503 when the engine has not answered for so long", "seconds")
    shutdown_timeout: float = _option(30.0, "how long running requests may go on after SIGTERM", "seconds")
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "least serious messages to log; debug adds a line per HTTP request"
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty; give an address such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must lie in [0, 65535]")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_key):
            raise ValueError("api_key must be ASCII text without blanks around it, and not empty")
        if self.max_request_bytes < 1:
            raise ValueError(f"max_request_bytes is {self.max_request_bytes}; it must be at least 1")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "health_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be at least 0 and finite")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "health_timeout"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; it must be above 0, or nothing is ever answered or healthy")
