"""The HTTP server around the app, and how long a connection may take: for a request's head, and with nothing to do.

uvicorn limits the size of a head and the time between requests, but waits for ever for a head that has begun, and for
the first one. The body's time is the gate's affair. Knows no path and no engine.
"""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltaserve.server.config import ServerConfig
from deltaserve.server.errors import timed_out

CLOSE_SECONDS = 2
"""How long connections may take to close at the end."""


class Connection(H11Protocol):
    """A connection that is closed when a request's head takes too long: with a 408 if some of it has come."""

    header_timeout: float
    """Seconds from the connection's beginning, or from the first byte of a later request, to the end of its head."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            body = timed_out(f"the request's head has not come within {self.header_timeout:g} s").body()
            head = (
                "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: the request is answered as if it asked for no other protocol."""


def http_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    is_debug = config.log_level == "debug"
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"header_timeout": config.header_timeout}),
        log_config=None,
        log_level="info" if is_debug else "warning",
        access_log=is_debug,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=config.keep_alive_timeout,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
