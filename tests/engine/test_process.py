"""The engine process's loop over a socket, in this process: what it answers to each command, and its last words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.core.stats import Stats
from deltaserve.engine.messages import (
    Cancel,
    Command,
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
from deltaserve.engine.process import EngineLoop, find_factory, serve
from tests.engine import scripted

ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Report)


class Peer:
    """The API process's side."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.code: int | None = None

    def say(self, command: Command) -> None:
        self.socket.send(ENCODER.encode(command))

    def hear(self) -> Report:
        assert self.socket.poll(5000), "nothing was said within 5 s"
        report: Report = DECODER.decode(self.socket.recv())
        return report


@contextmanager
def serving(factory: str = "fast", **config: Any) -> Iterator[Peer]:
    launch = Launch(
        config=EngineConfig(**config), address="", factory=f"tests.engine.scripted:{factory}", search_path=[]
    )
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        peer = Peer(ours)

        def work() -> None:
            peer.code = serve(launch, theirs)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield peer
        finally:
            peer.say(Stop())
            thread.join(10)
            assert not thread.is_alive(), "told to stop, it goes on"


def ask(name: str, **params: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=[3, 4], params=SamplingParams(**params), arrival=0.0)


def test_one_message_a_step_then_one_when_idle() -> None:
    with serving() as peer:
        assert isinstance(peer.hear(), Ready)
        peer.say(Submit([ask("a", max_tokens=2), ask("b", max_tokens=3)]))
        steps = [peer.hear() for _ in range(4)]
        assert all(isinstance(report, Progress) for report in steps)
        named = [[output.request_id for output in step.outputs] for step in steps if isinstance(step, Progress)]
        assert named == [["a", "b"], ["a", "b"], ["b"], []]
        last = steps[-1]
        assert isinstance(last, Progress)
        assert (last.stats.running, last.stats.generated_tokens) == (0, 5)
        peer.say(Ping(7))
        pong = peer.hear()
        assert isinstance(pong, Pong)
        assert pong.number == 7
    assert peer.code == 0


def test_the_wait_of_each_request_is_told_once() -> None:
    with serving("slow", max_num_seqs=1) as peer:
        peer.hear()
        peer.say(Submit([ask("first", max_tokens=3), ask("second", max_tokens=3), ask("gone", max_tokens=3)]))
        peer.say(Cancel(["gone"], "gone"))
        waits: list[int] = []
        while not isinstance(report := peer.hear(), Progress) or report.outputs:
            assert isinstance(report, Progress)
            assert all(seconds > 0 for seconds in report.queued)
            waits.append(len(report.queued))
        assert waits == [1, 0, 0, 1, 0, 0]


def test_a_cancel_reaches_waiting_and_running_requests() -> None:
    with serving("slow", max_num_seqs=1) as peer:
        peer.hear()
        peer.say(Submit([ask("runs", max_tokens=4000), ask("waits", max_tokens=4000)]))
        peer.hear()
        peer.say(Cancel(["runs", "waits", "nobody"], "gone"))
        while True:
            report = peer.hear()
            assert isinstance(report, Progress)
            if not report.outputs:
                break
        assert report.stats.aborts == {"gone": 2}
        assert (report.stats.running, report.stats.waiting) == (0, 0)


def test_a_refused_request_is_told_and_the_rest_goes_on() -> None:
    with serving(max_model_len=2, max_num_batched_tokens=64) as peer:
        peer.hear()
        good = Request(request_id="good", prompt_token_ids=[3], params=SamplingParams(max_tokens=1), arrival=0.0)
        peer.say(Submit([ask("bad", max_tokens=1), good]))
        refusal, answer = peer.hear(), peer.hear()
        assert refusal == Rejected("bad", "the engine has no room for 2 tokens")
        assert isinstance(answer, Progress)
        assert answer.outputs[0].request_id == "good"


class Ahead(scripted.ScriptedEngine):
    """Its steps overlap: each hands out what the one before gave, and one is left at the end."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, 0.0)
        self.in_flight: list[Output] | None = None

    def has_work(self) -> bool:
        return super().has_work() or self.in_flight is not None

    def step(self) -> list[Output]:
        ended, self.in_flight = self.in_flight, super().step() if super().has_work() else None
        return ended or []


class Wire:
    """Takes what is said, and gives commands when there is no more to do."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.said: list[Report] = []

    def poll(self, timeout: int | None = None) -> bool:
        return bool(self.commands) and (timeout is None or isinstance(self.commands[0], Submit | Cancel))

    def recv(self) -> bytes:
        return ENCODER.encode(self.commands.pop(0))

    def send(self, data: bytes) -> None:
        self.said.append(DECODER.decode(data))


def test_a_step_without_news_is_no_end_and_no_message() -> None:
    """Of 2 tokens: a step that begins the first, one that tells it and begins the last, one that tells the last."""
    engine = Ahead(EngineConfig())
    stats: list[Stats] = []
    wire: Any = Wire(Submit([ask("a", max_tokens=2)]))
    loop = EngineLoop(engine, wire)
    assert loop._obey()
    while engine.has_work():
        loop._step()
        stats.append(engine.stats())
    assert len(stats) == 3
    assert [[output.request_id for output in told.outputs] for told in wire.said] == [[], ["a"], ["a"]]
    assert [told.stats for told in wire.said] == stats
    engine.in_flight = []  # of requests that were cancelled meanwhile
    loop._step()
    assert len(wire.said) == 3


@pytest.mark.parametrize(
    ("factory", "last_word", "code"),
    [
        ("refusing", Failed("model is None; there is no such model, name another", refused=True), 2),
        ("failing", Failed("the engine did not start: ArithmeticError: told to fail at the start", refused=False), 1),
    ],
)
def test_a_failed_start(factory: str, last_word: Failed, code: int) -> None:
    with serving(factory) as peer:
        assert peer.hear() == last_word
    assert peer.code == code


def test_a_failed_step() -> None:
    with serving() as peer:
        peer.hear()
        peer.say(Submit([ask("bad", seed=scripted.RAISE)]))
        assert peer.hear() == Failed("the engine failed: ArithmeticError: told to fail", refused=False)
    assert peer.code == 1


def test_the_factory_is_found_by_name() -> None:
    assert find_factory("tests.engine.scripted:fast") is scripted.fast


def test_a_launch_survives_the_wire() -> None:
    config = EngineConfig(model="somewhere", max_num_seqs=3, cache_memory_gib=0.5, dtype="bfloat16")
    launch = Launch(config=config, address="ipc://x", factory="a:b", search_path=["p"])
    line = msgspec.json.encode(launch)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Launch) == launch
