"""Many streaming clients of one server, in one process and as light as they can be: they share its cores.

Reads server-sent events from raw sockets and notes when they come; it parses no answer but the last
event, where the usage stands.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """One answer as its client saw it. Times are seconds from the start of all."""

    num_tokens: int
    first: float
    last: float


async def stream_completion(port: int, body: dict[str, Any], start: float) -> Stream:
    """Send one completion and read it to its end. Raises RuntimeError for a status other than 200."""
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()}")
    first = last = 0.0
    usage = b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            last = time.perf_counter() - start
            first = first or last
            usage = line
    writer.close()
    await writer.wait_closed()
    return Stream(json.loads(usage[len(b"data: ") :])["usage"]["completion_tokens"], first, last)


def stream_all(port: int, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Send all at the same moment; the answers in the order of `bodies`."""

    async def together() -> list[Stream]:
        start = time.perf_counter()
        return await asyncio.gather(*(stream_completion(port, body, start) for body in bodies))

    return asyncio.run(together())
