"""The engine process: takes commands from a socket, steps the engine, reports each step in one message.

Runs as `python -m deltaserve.engine.process`, started by engine/client.py. Knows no text and no HTTP. It ends when it
is told to stop, when its engine fails, or when its standard input ends, which is the death of the API process.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

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

logger = logging.getLogger(__name__)

LINGER_MS = 2000
"""How long a last word may take to leave the process."""


class ServedEngine(Protocol):
    """What this process asks of an engine."""

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that can never be served."""

    def abort(self, request_id: str, reason: str) -> bool: ...
    def waits(self, request_id: str) -> bool: ...
    def step(self) -> Sequence[Output]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...


class EngineLoop:
    """Obeys commands between steps, and steps while there is work."""

    def __init__(self, engine: ServedEngine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._stats: Stats | None = None
        """As they were reported last."""
        self._arrivals: dict[str, float] = {}
        """Of the requests that have not begun."""
        self._reported_idle = True

    def run(self) -> None:
        """Returns when told to stop. Whatever the engine raises comes through."""
        while self._obey():
            if self._engine.has_work():
                self._step()

    def send(self, report: Report) -> None:
        self._socket.send(self._encoder.encode(report))

    def _step(self) -> None:
        now = time.time()
        outputs = list(self._engine.step())
        stats = self._engine.stats()
        begun = [request_id for request_id in self._arrivals if not self._engine.waits(request_id)]
        queued = [now - self._arrivals.pop(request_id) for request_id in begun]
        self._reported_idle = False
        if outputs or queued or stats != self._stats:  # the end of a step in flight may bring no news
            self.send(Progress(outputs, stats, queued))
            self._stats = stats

    def _obey(self) -> bool:
        """Handles every command that has come, waiting for one when there is nothing else to do. False: stop."""
        if not self._engine.has_work():
            self._fall_idle()
            self._socket.poll()
        while self._socket.poll(0):
            command = self._decoder.decode(self._socket.recv())
            match command:
                case Submit(requests):
                    self._add(requests)
                case Cancel(request_ids, reason):
                    for request_id in request_ids:
                        self._engine.abort(request_id, reason)
                        self._arrivals.pop(request_id, None)
                    self._reported_idle = False
                case Ping(number):
                    self.send(Pong(number, self._engine.stats()))
                case Stop():
                    return False
        return True

    def _fall_idle(self) -> None:
        """An abort leaves no output to report, but changes the figures."""
        if not self._reported_idle:
            self.send(Progress([], self._engine.stats()))
            self._reported_idle = True

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                self._engine.add(request)
                self._arrivals[request.request_id] = request.arrival
            except ValueError as refusal:
                self.send(Rejected(request.request_id, str(refusal)))
        self._reported_idle = False


def load(config: EngineConfig) -> tuple[ServedEngine, EngineInfo]:
    """The engine of this package, and what the API must know of it."""
    from deltaserve.engine.engine import Engine  # brings torch, which an engine of a test does without

    engine = Engine(config)
    blueprint = engine.blueprint
    return engine, EngineInfo(
        checkpoint=str(blueprint.path),
        vocab_size=blueprint.model.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=blueprint.memory.max_num_seqs,
        device=str(blueprint.device),
        dtype=str(blueprint.dtype).removeprefix("torch."),
    )


def find_factory(name: str) -> Callable[[EngineConfig], tuple[ServedEngine, EngineInfo]]:
    """`module:name` to the thing of that name."""
    module, _, attribute = name.partition(":")
    factory: Callable[[EngineConfig], tuple[ServedEngine, EngineInfo]] = getattr(
        importlib.import_module(module), attribute
    )
    return factory


def serve(launch: Launch, socket: zmq.Socket[bytes]) -> int:
    """Makes the engine and runs it to its end. Returns the process's exit code: 0, 1 for a failure, 2 for a refusal."""
    encoder = msgspec.msgpack.Encoder()
    try:
        engine, info = find_factory(launch.factory)(launch.config)
    except ValueError as refusal:
        socket.send(encoder.encode(Failed(str(refusal), refused=True)))
        return 2
    except Exception as failure:
        logger.exception("the engine did not start")
        socket.send(encoder.encode(Failed(f"the engine did not start: {words_of(failure)}", refused=False)))
        return 1
    loop = EngineLoop(engine, socket)
    loop.send(Ready(info, engine.stats()))
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    except Exception as failure:
        logger.exception("the engine failed")
        loop.send(Failed(f"the engine failed: {words_of(failure)}", refused=False))
        return 1
    engine.close()
    return 0


def words_of(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__


def end_with_input() -> None:
    """The API process holds the other end of standard input and never writes to it again: its end is that process's."""
    while os.read(sys.stdin.fileno(), 1):
        continue
    os._exit(1)


def main() -> int:
    # A signal to the whole process group is for the API process, which lets running requests finish first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=end_with_input, daemon=True, name="end-with-input").start()
    logging.basicConfig(level=launch.log_level.upper(), format="%(asctime)s %(levelname)s engine %(message)s")
    sys.path[:] = launch.search_path
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(launch.address)
        return serve(launch, socket)


if __name__ == "__main__":
    sys.exit(main())
