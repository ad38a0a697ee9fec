"""The API process's end of the engine: starts its process, submits requests, hands out what each step gave.

Belongs to one asyncio loop. Knows no text, no HTTP and no tensor. When the engine process ends, whoever waits for it
gets an EngineStoppedError, now and ever after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats
from deltaserve.engine.messages import (
    Cancel,
    Command,
    EngineInfo,
    Failed,
    Launch,
    Ping,
    Pong,
    Progress,
    Ready,
    Rejected,
    Report,
    Stop,
    Submit,
)
from deltaserve.engine.stream import EngineStoppedError, Stream

logger = logging.getLogger(__name__)

ENGINE = "deltaserve.engine.process:load"
MAX_IPC_ADDRESS = 100
"""Characters; the system's limit for a socket's path is a little above."""
MAX_REPORTS_AT_ONCE = 64
LAST_WORD_SECONDS = 0.2
"""How long the last message of an ended process may take to be read."""


class OverloadedError(RuntimeError):
    """More requests wait than may."""


@dataclass(frozen=True)
class EngineLaunch:
    """How an engine process is started. `factory` is `module:name` of what makes one of a config."""

    config: EngineConfig
    factory: str = ENGINE
    log_level: str = "info"


class EngineClient:
    """One engine process. `start` first; `close` always."""

    info: EngineInfo
    """Set by `start`."""
    stats: Stats
    """The engine's figures after its last step. Set by `start`."""

    def __init__(self, launch: EngineLaunch) -> None:
        self.failure: str | None = None
        """Why the engine is gone; None while it is there."""
        self.on_begin: Callable[[float], object] = lambda seconds: None
        """Called for each request that begins to be computed, with the seconds that it has waited."""
        self.on_failure: Callable[[str], object] = lambda reason: None
        """Called once with the reason when the engine goes away by itself after it has come up."""
        self._launch = launch
        self._streams: dict[str, Stream] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._resources = contextlib.ExitStack()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = self._closing = False
        self._pings = 0
        self._pong: asyncio.Future[None] | None = None
        self._moved_at = time.monotonic()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Starts the process and waits until the engine can serve.

        Raises ValueError for a choice of the user's that the engine refuses, EngineStoppedError for any other failure.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        address = self._bind()
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "deltaserve.engine.process"], stdin=subprocess.PIPE, process_group=0
        )
        threading.Thread(target=self._watch, args=(process,), daemon=True, name="watch-engine").start()
        self._receiver = self._loop.create_task(self._receive())
        self._receiver.add_done_callback(self._on_receiver_end)
        self._hand_over(process, address)
        await self._ready
        self._forget_folder()
        return self.info

    async def close(self, timeout: float = 5.0) -> None:
        """Ends the process, kindly for `timeout` seconds if it has come up. Open streams fail."""
        self._closing = True
        self._fail("the server is shutting down")
        process = self._process
        if process is not None:
            self._post(Stop())
            if not self._is_up:
                process.kill()
            await asyncio.to_thread(self._end, process, timeout)
            self._receiver.cancel()
        self._resources.close()

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None:
            self._process.kill()

    @property
    def exit_code(self) -> int | None:
        """Of the process; None while it runs. Negative: the signal that ended it."""
        return None if self._process is None else self._process.returncode

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    @property
    def max_open(self) -> int:
        """Requests that may be open at once at the most."""
        return self._launch.config.max_waiting + self.info.max_num_seqs

    def submit(self, requests: list[Request]) -> Stream:
        """Sends requests that belong together; their ids must be new.

        Raises OverloadedError when too many would wait, which more than `max_open` always would; EngineStoppedError.
        """
        if self.failure is not None:
            raise EngineStoppedError(self.failure)
        self._refuse_overload(len(requests))
        stream = Stream([request.request_id for request in requests], self.cancel)
        if not self._streams:
            self._moved_at = time.monotonic()
        for request in requests:
            assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
            self._streams[request.request_id] = stream
        self._post(Submit(requests))
        return stream

    def cancel(self, request_ids: Iterable[str], reason: str) -> None:
        """Ends requests, in whatever phase they are. Unknown ids are no fault."""
        gone = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        if gone:
            self._post(Cancel(gone, reason))

    def fail_open(self, reason: str) -> None:
        """Ends every open request; those who wait for them hear the reason."""
        for stream in set(self._streams.values()):
            stream.fail(EngineStoppedError(reason))
        self.cancel(list(self._streams), "shutdown")

    def _refuse_overload(self, count: int) -> None:
        """Requests that have not begun may be as many as `max_waiting`, and as many more as can begin at once."""
        waiting = self.num_open - self.stats.running + count
        max_waiting = room = self._launch.config.max_waiting
        if not self.stats.waiting:
            room += max(0, self.info.max_num_seqs - self.stats.running)
        if waiting > room:
            raise OverloadedError(f"{self.num_open} requests are open and no more than {max_waiting} may wait")

    # ---- health ----------------------------------------------------------------------------------------------------

    async def trouble(self, timeout: float) -> str | None:
        """None while the engine answers within `timeout` seconds and moves what it has; else what is wrong."""
        if self.failure is not None:
            return self.failure
        still = time.monotonic() - self._moved_at
        if self._streams and still > timeout:
            return f"{self.num_open} requests are open, and none has moved for {still:.1f} s"
        if self._pong is None or self._pong.done():
            self._pong = self._loop.create_future()
            self._pings += 1
            self._post(Ping(self._pings))
        try:
            await asyncio.wait_for(asyncio.shield(self._pong), timeout)
        except TimeoutError:
            return f"the engine has not answered for {timeout:g} s"
        return self.failure

    # ---- the wire --------------------------------------------------------------------------------------------------

    def _bind(self) -> str:
        """Opens our end of the wire: a socket in a private folder, or the loopback where there are none."""
        context = self._resources.enter_context(zmq.asyncio.Context())
        self._socket = self._resources.enter_context(context.socket(zmq.PAIR))
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if zmq.has("ipc"):
            self._folder = Path(tempfile.mkdtemp(prefix="deltaserve-"))
            self._resources.callback(self._forget_folder)
            address = f"ipc://{self._folder / 'engine'}"
            if len(address) <= MAX_IPC_ADDRESS:
                self._socket.bind(address)
                return address
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def _forget_folder(self) -> None:
        """Once both ends are connected the socket needs no name, and a server that is killed leaves nothing behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _hand_over(self, process: subprocess.Popen[bytes], address: str) -> None:
        """Tells the process what it is to do. Its input stays open for as long as we live."""
        launch = Launch(
            config=self._launch.config,
            address=address,
            factory=self._launch.factory,
            search_path=[entry or "." for entry in sys.path],
            log_level=self._launch.log_level,
        )
        assert process.stdin is not None, "the process has no input"
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the watcher tells
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()

    def _post(self, command: Command) -> None:
        """Queues a command. The socket has no limit, so this neither waits nor fails while it is open."""
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(command))

    async def _receive(self) -> None:
        """Takes all that has come before streams go on: when the engine is ahead, they get several steps at once."""
        at_hand: zmq.Socket[bytes] = zmq.Socket(self._socket)
        while True:
            self._take(await self._socket.recv())
            for _ in range(MAX_REPORTS_AT_ONCE):
                if not at_hand.poll(0):
                    break
                self._take(at_hand.recv())
            await asyncio.sleep(0)

    def _take(self, data: bytes) -> None:
        report = self._decoder.decode(data)
        match report:
            case Progress(outputs, stats, queued):
                self._update(stats)
                for seconds in queued:
                    self.on_begin(seconds)
                for output in outputs:
                    self._deliver(output)
            case Rejected(request_id, message):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.fail(ValueError(message))
            case Pong(_, stats):
                self._update(stats)
                if self._pong is not None and not self._pong.done():
                    self._pong.set_result(None)
            case Ready(info, stats):
                self.info, self.stats, self._is_up = info, stats, True
                self._ready.set_result(None)
            case Failed(message, refused):
                self._fail(message, ValueError if refused else EngineStoppedError)

    def _deliver(self, output: Output) -> None:
        if output.finish_reason is None:
            stream = self._streams.get(output.request_id)
        else:
            stream = self._streams.pop(output.request_id, None)
        if stream is not None:  # else it was cancelled while this was under way
            stream.put(output)

    def _update(self, stats: Stats) -> None:
        before, self.stats = self.stats, stats
        if stats.prefilled_tokens != before.prefilled_tokens or stats.generated_tokens != before.generated_tokens:
            self._moved_at = time.monotonic()

    # ---- death -----------------------------------------------------------------------------------------------------

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: waits for the process to end."""
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORD_SECONDS, self._on_exit, code)

    def _on_receiver_end(self, receiver: asyncio.Task[None]) -> None:
        """Nobody listens to the engine any more: an error of ours, and no reason to look alive."""
        if not receiver.cancelled():
            logger.error("the engine's reports cannot be read", exc_info=receiver.exception())
            self._fail("the engine's reports cannot be read")
            self.kill()

    def _on_exit(self, code: int) -> None:
        cause = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        self._fail(f"the engine process {cause}")

    def _fail(self, reason: str, kind: type[Exception] = EngineStoppedError) -> None:
        """The engine is gone: everyone who waits for it hears why. The first reason stays."""
        if self.failure is not None:
            return
        self.failure = reason
        is_starting = self._process is not None and not self._ready.done()  # whoever waits for the start is told
        if not self._closing and not is_starting:
            logger.error("%s", reason)
        for stream in set(self._streams.values()):
            stream.fail(EngineStoppedError(reason))
        self._streams.clear()
        if self._pong is not None and not self._pong.done():
            self._pong.set_result(None)
        if is_starting:
            self._ready.set_exception(kind(reason))
            self._ready.exception()  # whoever gave up waiting leaves no complaint behind
        elif not self._closing:
            self.on_failure(reason)

    def _end(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process did not end within %g s and is killed", timeout)
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
