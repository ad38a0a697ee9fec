"""Two hundred clients of a real server hang up in the middle of their streams: it gives everything back and answers on.

A client here is a raw socket, closed without a word after a random number of events, the first included.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from tests.serving import Server, serving

NUM_STREAMS = 200
AT_ONCE = 20
MAX_EVENTS = 25
SECONDS = 240
"""Far more than it takes: streams that nobody reads would hold the few seats for longer."""


def body(number: int) -> tuple[str, dict[str, Any]]:
    """A request that would go on for long: path and fields."""
    endless = {"max_tokens": 2000, "ignore_eos": True, "stream": True, "seed": number}
    if number % 2:
        return "/v1/completions", {
            "prompt": f"Question: What is {number} + 1?\nAnswer:",
            "n": 1 + number % 3,
            **endless,
        }
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": f"Count to {number}."}], **endless}


async def drop(server: Server, number: int, num_events: int) -> int:
    """Read `num_events` events and hang up; how many came before the end of the answer."""
    path, fields = body(number)
    payload = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    seen = 0
    while seen < num_events and (line := await reader.readline()):
        seen += line.startswith(b"data: {")
    writer.transport.abort()
    return seen


async def drop_all(server: Server, counts: list[int]) -> list[int]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, count: int) -> int:
        async with gate:
            return await drop(server, number, count)

    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*(one(number, count) for number, count in enumerate(counts)))


def ask(server: Server) -> str:
    fields = {"prompt": "Question: What is 2 + 3?\nAnswer:", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{server.base_url}/completions", json=fields, timeout=60).raise_for_status().json()
    text: str = answer["choices"][0]["text"]
    return text


def test_two_hundred_dropped_streams(seed: int) -> None:
    counts = [random.Random(seed + number).randrange(MAX_EVENTS) for number in range(NUM_STREAMS)]
    with serving("--num-threads", "1", "--max-num-seqs", "8") as server:
        before = ask(server)
        assert asyncio.run(drop_all(server, counts)) == counts, "a stream ended before its client left"
        server.wait_until_idle()
        assert ask(server) == before
        server.wait_until_idle()
        aborted = {name: value for name, value in server.metrics().items() if "requests_aborted" in name}
    assert sum(aborted.values()) >= NUM_STREAMS - counts.count(0), aborted
