"""How fast the load client is by itself, with many streams of a server that only sends.

`python -m benchmarks.load_client` prints the client's own processor time for an event, beside that of httpx doing the
same. The server is another process and sends the same bytes to each stream, event by event, as fast as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

from deltaserve.bench.serve import run_client
from deltaserve.bench.target import Record, Target

EVENT = {
    "id": "cmpl-0065e39f4a654cd098022061721210d6",
    "object": "text_completion",
    "created": 1796077999,
    "model": "trivial",
    "system_fingerprint": "none",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "token_ids": [17], "finish_reason": None}],
}


def chunk(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers whatever is asked with as many events as `max_tokens`."""
    event = chunk(json.dumps(EVENT))
    while head := await reader.readline():
        length = 0
        while (line := await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if head.startswith(b"GET"):
            body = b'{"data":[{"id":"trivial"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            continue
        count = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(count):
            writer.write(event)
            await writer.drain()
            await asyncio.sleep(0)
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
        writer.write(chunk(json.dumps(usage)) + chunk("[DONE]") + b"0\r\n\r\n")
    writer.close()


def serve(pipe: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    run_client(run())


async def ours(url: str, streams: int, events: int) -> int:
    target = Target(url, None, None, "completions", 600.0)
    await target.open()
    body = target.encode({"prompt": [1], "max_tokens": events})
    records: list[Record] = await asyncio.gather(*(target.ask(body, time.perf_counter()) for _ in range(streams)))
    target.close()
    assert all(record.failure is None for record in records), {record.failure for record in records}
    return sum(record.output_tokens for record in records)


async def httpx_does(url: str, streams: int, events: int) -> int:
    import httpx

    async def ask(client: httpx.AsyncClient) -> int:
        tokens, times = 0, []
        async with client.stream("POST", "/v1/completions", json={"prompt": [1], "max_tokens": events}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
                    tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0)
        return tokens

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600.0) as client:
        return sum(await asyncio.gather(*(ask(client) for _ in range(streams))))


def measure(work: Coroutine[Any, Any, int], name: str) -> float:
    """Microseconds of this process for an event; printed with the rest."""
    tokens: list[int] = []

    async def run() -> None:
        tokens.append(await work)

    start, computed = time.perf_counter(), time.process_time()
    run_client(run())
    wall, computed = time.perf_counter() - start, time.process_time() - computed
    each = 1e6 * computed / tokens[0]
    print(f"{name:>12}: {tokens[0]} events in {wall:.2f} s, {each:.1f} us of the client's processor for each")
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--events", type=int, default=200, help="of each stream")
    options = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    sizes = options.streams, options.events
    us, them = measure(ours(url, *sizes), "deltaserve"), measure(httpx_does(url, *sizes), "httpx")
    print(f"{1e6 / us:,.0f} events a second fill one core; httpx takes {them / us:.1f} times as long")
    server.terminate()


if __name__ == "__main__":
    main()
