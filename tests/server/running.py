"""The server's app around a scripted engine, in a thread of its own, on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from deltaserve.config import EngineConfig
from deltaserve.core.stats import Stats
from deltaserve.engine.client import EngineClient, EngineLaunch
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.app import Service, make_app, make_service
from deltaserve.server.config import ServerConfig
from deltaserve.server.connection import http_config
from deltaserve.server.lifecycle import HttpServer
from tests.engine.scripted import BUILTIN

TOKENIZER = Tokenizer(BUILTIN)
EOS: int = TOKENIZER.eos_token_id or 0


class Running:
    """A server that answers."""

    def __init__(self, http: httpx.Client, port: int, service: Service) -> None:
        self.http, self.port, self.service = http, port, service

    @property
    def stats(self) -> Stats:
        return self.service.backend.client.stats

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        return ok(self.post("/v1/completions", **fields))

    def chat(self, **fields: Any) -> dict[str, Any]:
        return ok(self.post("/v1/chat/completions", **fields))

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that must succeed and end as streams do."""
        response = self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def wait_until_idle(self, seconds: float = 1.0) -> None:
        """Nothing is open, running or waiting, and nothing is in use."""
        end = time.monotonic() + seconds
        while (client := self.service.backend.client).num_open or self.stats.running or self.stats.waiting:
            assert time.monotonic() < end, f"{client.num_open} requests are open, {self.stats}"
            time.sleep(0.005)
        assert (self.stats.cache.blocks_used, self.stats.cache.slots_used) == (0, 0)

    def wait_until_running(self, count: int, waiting: int = 0) -> None:
        end = time.monotonic() + 5.0
        while (self.stats.running, self.stats.waiting) != (count, waiting):
            assert time.monotonic() < end, f"it has not come to {count} running, {waiting} waiting: {self.stats}"
            time.sleep(0.002)


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """What an answer says is wrong; it has the API's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@contextmanager
def running(factory: str = "fast", server: ServerConfig | None = None, **config: Any) -> Iterator[Running]:
    config = {"max_num_seqs": 64, **config}
    launch = EngineLaunch(EngineConfig(**config), f"tests.engine.scripted:{factory}")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made: list[tuple[HttpServer, Service]] = []
    ready = threading.Event()

    async def serve() -> None:
        client = EngineClient(launch)
        try:
            await client.start()
            service = make_service(client, server or ServerConfig(), "scripted", BUILTIN)
            http = HttpServer(http_config(make_app(service), service.config))
            made.append((http, service))
            ready.set()
            await http.serve(sockets=[listener])
        finally:
            ready.set()
            await client.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        assert made, "the server did not start"
        _, service = made[0]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Running(client, port, service)
    finally:
        if made:
            made[0][0].should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not end"
