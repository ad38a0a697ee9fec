"""A server in a thread that answers as it is told: known delays, known counts, known faults. Knows HTTP, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Keeps = Literal["open", "closed", "until asked"]


@dataclass(frozen=True)
class Script:
    """One answer."""

    first: float = 0.0
    """Seconds before the first chunk, and between two chunks."""
    gap: float = 0.0
    chunks: tuple[int, ...] = (1, 1, 1)
    """Tokens of each."""
    tells_ids: bool = True
    prompt_tokens: int = 10
    cached_tokens: int | None = 0
    status: int = 200
    error: str = ""
    """A message: the body of a status that is not 200, else an event after the chunks."""
    has_usage: bool = True
    has_end: bool = True
    """[DONE]"""
    closes_early: bool = False
    refuses: tuple[str, ...] = ()
    """Fields that are answered 400."""


@dataclass
class Scripted:
    """A running server. `script` makes the answer to the n-th request from its body."""

    script: Callable[[int, dict[str, Any]], Script]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    connections: int = 0
    keeps: Keeps = "open"
    """A connection after an answer: open, closed at once, or closed when the next request comes."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            is_first = True
            while is_first or self.keeps != "closed":
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if not is_first and self.keeps == "until asked":
                    return
                is_first = False
                self.headers.append(head)
                if head.startswith("GET /v1/models"):
                    self.whole(writer, 200, {"data": [{"id": "scripted", "max_model_len": 4096}]})
                elif head.startswith("GET"):
                    self.whole(writer, 404, {})
                else:
                    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                    body = json.loads(await reader.readexactly(length))
                    self.bodies.append(body)
                    await self.stream(writer, self.script(len(self.bodies) - 1, body), "messages" in body)
                await writer.drain()

    def whole(self, writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} Said\r\nServer: scripted\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )

    async def stream(self, writer: asyncio.StreamWriter, script: Script, is_chat: bool) -> None:
        unwanted = set(script.refuses) & set(self.bodies[-1])
        if script.status != 200 or unwanted:
            message = script.error or f"unknown field {min(unwanted)}"
            self.whole(writer, script.status if script.status != 200 else 400, {"error": {"message": message}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, tokens in enumerate(script.chunks):
            await asyncio.sleep(script.gap if number else script.first)
            ids = {"token_ids": list(range(tokens))} if script.tells_ids else {}
            text = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
            self.event(writer, {"choices": [{"index": 0, **text, **ids}]})
        if script.closes_early:
            writer.close()
            return
        if script.error:
            self.event(writer, {"error": {"message": script.error}})
        elif script.has_usage:
            usage: dict[str, Any] = {"prompt_tokens": script.prompt_tokens, "completion_tokens": sum(script.chunks)}
            if script.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
            self.event(writer, {"choices": [], "usage": usage})
        if script.has_end:
            self.send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        self.send(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextlib.contextmanager
def scripted(script: Script | Callable[[int, dict[str, Any]], Script], keeps: Keeps = "open") -> Iterator[Scripted]:
    server = Scripted(script if callable(script) else lambda number, body: script, keeps=keeps)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncio.Server:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        return listener

    async def stop(listener: asyncio.Server) -> None:
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # in which the connections close

    listener = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(listener), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
