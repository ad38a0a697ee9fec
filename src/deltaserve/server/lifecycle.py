"""From a command line to a running server and back: sockets, signals, start, drain, end.

Knows when things happen; the routes know what. The process's exit code is 0 after an orderly end, 1 after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from deltaserve.engine.client import EngineClient, EngineLaunch
from deltaserve.engine.messages import EngineInfo
from deltaserve.engine.stream import EngineStoppedError
from deltaserve.server.config import ServerConfig
from deltaserve.server.connection import http_config
from deltaserve.server.front import Front

if TYPE_CHECKING:
    from deltaserve.server.app import Service

logger = logging.getLogger(__name__)

Announce = Callable[[EngineInfo, str, str], None]
"""Told when the server is ready: the engine, the model's name in the API, the address."""

POLL_SECONDS = 0.02


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: a signal first drains what runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ServerConfig) -> socket.socket:
    """Takes the address before anything is loaded. Raises ValueError, in words, when it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as fault:
        listener.close()
        raise ValueError(
            f"cannot listen on host {config.host}, port {config.port} ({fault.strerror or fault}); "
            "stop what listens there, or choose another --port or --host"
        ) from None
    return listener


def model_name(launch: EngineLaunch) -> str:
    """The model's name in the API: the chosen one, else the folder's name or the hub id."""
    chosen, model = launch.config.served_model_name, launch.config.model
    if chosen is not None:
        return chosen
    if model is None:
        return launch.config.preset or "builtin"
    return Path(model).resolve().name if Path(model).is_dir() else model


def read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"chat_template is {path}, which cannot be read ({fault}); name a template's file") from None


class Lifecycle:
    """One server, from its start to its exit code."""

    def __init__(self, launch: EngineLaunch, config: ServerConfig, announce: Announce) -> None:
        self._launch, self._config, self._announce = launch, config, announce
        self._template = read_template(config.chat_template)
        self._client = EngineClient(launch)
        self._front = Front()
        self._http = HttpServer(http_config(self._front, config))
        self._service: Service | None = None
        self._draining: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def run(self) -> int:
        """Raises ValueError for a choice that cannot be honoured, EngineStoppedError when the engine does not start."""
        with bind(self._config) as listener, self._signals_handled():
            try:
                http = asyncio.ensure_future(self._http.serve(sockets=[listener]))
                opening = asyncio.ensure_future(self._open(listener))
                await asyncio.wait({http, opening}, return_when=asyncio.FIRST_COMPLETED)
                if http.done():
                    opening.cancel()
                    await asyncio.wait({opening})
                self._http.should_exit |= opening.cancelled() or opening.exception() is not None
                await http
                if not opening.cancelled():
                    opening.result()
            finally:
                await self._client.close()
        return 0 if self._failure is None else 1

    async def _open(self, listener: socket.socket) -> None:
        """Starts the engine, and the routes when it can serve. The imports of both go on side by side."""
        starting = asyncio.ensure_future(self._client.start())
        try:
            app = await asyncio.to_thread(importlib.import_module, "deltaserve.server.app")
            info = await starting
        finally:
            starting.cancel()
        self._client.on_failure = self._on_failure
        if self._client.failure is not None:
            raise EngineStoppedError(self._client.failure)
        self._service = app.make_service(
            self._client, self._config, model_name(self._launch), Path(info.checkpoint), self._template
        )
        self._service.draining = self._draining is not None
        self._front.app = app.make_app(self._service)
        self._announce(info, model_name(self._launch), origin(listener))

    def _on_failure(self, reason: str) -> None:
        self._failure = reason
        self._http.should_exit = True

    # ---- the end ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._draining is not None:
            self._client.kill()
            os._exit(1)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Takes no new work, lets what runs finish for a while, then ends the server."""
        if self._service is not None:
            self._service.draining = True
        seconds, client = self._config.shutdown_timeout, self._client
        logger.info("shutting down: %d requests may go on for %g s", client.num_open, seconds)
        end = time.monotonic() + seconds
        while client.num_open and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        client.fail_open("the server is shutting down")
        self._http.should_exit = True


def origin(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(launch: EngineLaunch, config: ServerConfig, announce: Announce) -> int:
    """Serves until a signal or a failure; the process's exit code. `announce` is told when the server is ready."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(Lifecycle(launch, config, announce).run())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
