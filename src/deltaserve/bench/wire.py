"""HTTP/1.1 for a load client: kept connections, and server-sent events with the moment at which each came.

Our own, because a general client takes many times as long for an event and 256 streams would measure it instead of the
server (docs/bench.md has the figures). Knows no API and follows no redirect.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

OnEvent = Callable[[bytes, float], None]
"""Takes the data of one event and `time.perf_counter()` when its bytes arrived."""


class Exchange:
    """One answer, read as it comes. `whole` is done when it is all there, and fails when the connection does."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._raw = b""
        """Bytes that no complete part has been made of yet."""
        self._event = b""
        """The beginning of an event."""
        self._is_chunked = False
        self._received = 0
        """Bytes of a body that is not chunked, events among them."""

    @property
    def has_begun(self) -> bool:
        return bool(self.status or self._raw)

    @property
    def keeps_connection(self) -> bool:
        return self.headers.get(b"connection", b"").lower() != b"close"

    def feed(self, data: bytes, now: float) -> None:
        try:
            self._read(self._raw + data if self._raw else data, now)
        except ValueError as fault:
            self.fail(f"the answer is no HTTP: {fault}")

    def lose(self) -> None:
        """The connection has closed, which is the end of an answer without a length."""
        if self.status and b"chunked" not in self._framing and b"content-length" not in self.headers:
            self._finish()
        else:
            self.fail("the connection closed before the answer was whole")

    def fail(self, reason: str) -> None:
        if not self.whole.done():
            self.whole.set_exception(ConnectionError(reason))

    @property
    def _framing(self) -> bytes:
        return self.headers.get(b"transfer-encoding", b"").lower()

    def _read(self, raw: bytes, now: float) -> None:
        if not self.status:
            head, end, rest = raw.partition(b"\r\n\r\n")
            if not end:
                self._raw = raw
                return
            first, *lines = head.split(b"\r\n")
            self.status = int(first.split(b" ", 2)[1])
            pairs = (line.partition(b":") for line in lines)
            self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            self._is_chunked = b"chunked" in self._framing
            raw = rest
        if self._is_chunked:
            self._raw = self._read_chunks(raw, now)
            return
        self._raw = b""
        self._received += len(raw)
        self._take(raw, now)
        length = self.headers.get(b"content-length")
        if length is not None and self._received >= int(length):
            self._finish()

    def _read_chunks(self, raw: bytes, now: float) -> bytes:
        """What is left of `raw` when all whole chunks are taken."""
        at = 0
        while (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            stop = end + 2 + size
            if len(raw) < stop + 2:
                break
            self._take(raw[end + 2 : stop], now)
            at = stop + 2
            if size == 0:
                self._finish()
                return b""
        return raw[at:]

    def _take(self, data: bytes, now: float) -> None:
        if self._on_event is None or self.status != 200:
            self.body += data
            return
        text = self._event + data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._event = text.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].strip(), now)
                continue
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._on_event(b"\n".join(lines), now)

    def _finish(self) -> None:
        if not self.whole.done():
            self.whole.set_result(None)


class Connection(asyncio.Protocol):
    """Carries one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._exchange is not None:
            self._exchange.feed(data, now)

    def connection_lost(self, fault: Exception | None) -> None:
        self.is_open = False
        if self._exchange is not None:
            self._exchange.lose()

    async def run(self, request: bytes, exchange: Exchange) -> None:
        """Returns when the answer is whole. Raises ConnectionError when it never will be."""
        self._exchange = exchange
        self._transport.write(request)
        try:
            await exchange.whole
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = None
        if not exchange.keeps_connection:
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    """Empty where events were taken out of it."""


class Client:
    """Requests to one server, over as many connections as run at once."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        wrong = ValueError(f"url is {url!r}; it must be like http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as fault:
            raise wrong from fault
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.origin = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._prefix = urlsplit(self.origin).path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port or (443 if self._tls else 80)
        self._idle: list[Connection] = []
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nUser-Agent: deltaserve-bench\r\n{key}"

    async def get(self, path: str) -> Answer:
        return await self._send("GET", path, b"", None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> Answer:
        """`body` is JSON. With `on_event` an answer of status 200 is read as server-sent events."""
        return await self._send("POST", path, body, on_event)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _send(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> Answer:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        request = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + body
        while True:
            connection = self._take_idle()
            is_kept = connection is not None
            if connection is None:
                connection = await self._connect()
            exchange = Exchange(on_event)
            try:
                await connection.run(request, exchange)
            except ConnectionError:
                if is_kept and not exchange.has_begun:  # the server closed it while nobody used it
                    continue
                raise
            if connection.is_open:
                self._idle.append(connection)
            return Answer(exchange.status, exchange.headers, exchange.body)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection
