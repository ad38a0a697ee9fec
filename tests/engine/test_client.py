"""The client and a real engine process around a scripted engine: life, streams, refusals, aborts, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.engine.client import EngineClient, EngineLaunch, OverloadedError
from deltaserve.engine.stream import EngineStoppedError, Stream, StreamClosedError
from tests.engine import scripted

PROMPT = [5, 6, 7, 8]


@asynccontextmanager
async def running(factory: str = "fast", **config: Any) -> AsyncIterator[EngineClient]:
    launch = EngineLaunch(EngineConfig(**config), f"tests.engine.scripted:{factory}")
    client = EngineClient(launch)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def ask(name: str, max_tokens: int = 6, seed: int | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return Request(request_id=name, prompt_token_ids=PROMPT, params=params, arrival=time.time())


async def collect(stream: Stream, count: int) -> dict[int, list[int]]:
    """The tokens of `count` requests by their place, all of them until each has ended."""
    tokens: dict[int, list[int]] = {index: [] for index in range(count)}
    ends = 0
    while ends < count:
        for index, output in await stream.next():
            tokens[index] += output.token_ids
            ends += output.finish_reason is not None
    return tokens


async def drain(stream: Stream) -> None:
    """Reads until the stream raises."""
    while True:
        await stream.next()


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_requests_submitted_together_come_back_by_place() -> None:
    async def test() -> None:
        async with running() as client:
            assert client.info.vocab_size == scripted.VOCAB_SIZE
            stream = client.submit([ask("a", 6), ask("b", 2)])
            assert await collect(stream, 2) == {0: [5, 6, 7, 8, 5, 6], 1: [5, 6]}
            assert client.num_open == 0
            await eventually(lambda: client.stats.running == 0)
            assert client.stats.finished == {"length": 2}

    run(test)


def test_many_streams_at_once() -> None:
    async def test() -> None:
        async with running(max_num_seqs=16) as client:
            streams = [client.submit([ask(f"r{i}", 20)]) for i in range(100)]
            for answer in await asyncio.gather(*(collect(stream, 1) for stream in streams)):
                assert answer == {0: PROMPT * 5}

    run(test)


def test_a_refused_request_fails_its_stream_only() -> None:
    async def test() -> None:
        async with running(max_model_len=4, max_num_batched_tokens=64) as client:
            with pytest.raises(ValueError, match="no room for 4 tokens"):
                await client.submit([ask("long")]).next()
            short = Request(request_id="s", prompt_token_ids=[1], params=SamplingParams(max_tokens=2), arrival=0.0)
            assert await collect(client.submit([short]), 1) == {0: [1, 1]}

    run(test)


@pytest.mark.parametrize("phase", ["waiting", "running"])
def test_a_closed_stream_frees_its_requests(phase: str) -> None:
    async def test() -> None:
        async with running("slow", max_num_seqs=2) as client:
            first = client.submit([ask(f"n{i}", 3000) for i in range(4)])
            if phase == "running":
                await first.next()
            first.close()
            first.close()
            assert client.num_open == 0
            with pytest.raises(StreamClosedError):
                await drain(first)
            await eventually(lambda: client.stats.aborts.get("abort") == 4, 1.0)
            assert (client.stats.running, client.stats.waiting) == (0, 0)
            assert await collect(client.submit([ask("after")]), 1) == {0: [5, 6, 7, 8, 5, 6]}

    run(test)


def test_closing_wakes_whoever_waits() -> None:
    async def test() -> None:
        async with running("slow", max_num_seqs=1) as client:
            blocker = client.submit([ask("blocker", 3000)])
            stream = client.submit([ask("waits")])
            waiter = asyncio.ensure_future(stream.next())
            await asyncio.sleep(0.05)
            stream.close()
            with pytest.raises(StreamClosedError):
                await waiter
            blocker.close()

    run(test)


def test_one_of_several_can_be_cancelled() -> None:
    async def test() -> None:
        async with running("slow") as client:
            stream = client.submit([ask("keeps", 20), ask("goes", 3000)])
            kept: list[Output] = []
            while not kept or kept[-1].finish_reason is None:
                for index, output in await stream.next():
                    if index == 0:
                        kept.append(output)
                    else:
                        stream.cancel(1, "stop")
            assert len(kept) == 20
            await eventually(lambda: client.stats.running == 0)
            assert client.stats.finished == {"length": 1, "stop": 1}

    run(test)


def test_overload_is_refused() -> None:
    async def test() -> None:
        async with running("slow", max_num_seqs=2, max_waiting=3) as client:
            assert client.max_open == 5
            with pytest.raises(OverloadedError):
                client.submit([ask(f"x{i}") for i in range(6)])
            streams = [client.submit([ask(f"r{i}", 500)]) for i in range(5)]
            with pytest.raises(OverloadedError, match="no more than 3 may wait"):
                client.submit([ask("one more")])
            await eventually(lambda: client.stats.running == 2)
            with pytest.raises(OverloadedError):
                client.submit([ask("one more")])
            streams[4].close()
            client.submit([ask("fits now")])

    run(test)


def test_seats_without_memory_are_no_room() -> None:
    async def test() -> None:
        async with running("cramped", max_num_seqs=8, max_waiting=2) as client:
            client.submit([ask(f"r{i}", 500) for i in range(4)])
            await eventually(lambda: (client.stats.running, client.stats.waiting) == (2, 2))
            with pytest.raises(OverloadedError):
                client.submit([ask("one more")])

    run(test)


def test_no_waiting_still_lets_requests_run() -> None:
    async def test() -> None:
        async with running("slow", max_num_seqs=2, max_waiting=0) as client:
            client.submit([ask("a", 500)])
            client.submit([ask("b", 500)])
            with pytest.raises(OverloadedError):
                client.submit([ask("c")])

    run(test)


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        ("refusing", ValueError, "there is no such model, name another"),
        ("failing", EngineStoppedError, "ArithmeticError: told to fail at the start"),
        ("dying", EngineStoppedError, "was ended by signal 9"),
        ("absent", EngineStoppedError, "AttributeError"),
    ],
)
def test_a_start_that_fails_says_why(
    factory: str, error: type[Exception], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with pytest.raises(error, match=words):
            async with running(factory):
                pass

    run(test)
    assert words not in caplog.text, "said twice: whoever waits for the start says it"


@pytest.mark.parametrize(
    ("seed", "words"), [(scripted.RAISE, "ArithmeticError: told to fail"), (scripted.DIE, "was ended by signal 9")]
)
def test_a_dead_engine_fails_every_stream(seed: int, words: str) -> None:
    async def test() -> None:
        async with running("slow") as client:
            reasons: list[str] = []
            client.on_failure = reasons.append
            others = [client.submit([ask(f"o{i}", 3000)]) for i in range(3)]
            await others[0].next()
            others.append(client.submit([ask("bad", seed=seed)]))
            for stream in others:
                with pytest.raises(EngineStoppedError, match=words):
                    await drain(stream)
            assert len(reasons) == 1
            assert words in reasons[0]
            assert client.num_open == 0
            with pytest.raises(EngineStoppedError, match=words):
                client.submit([ask("late")])
            assert words in (await client.trouble(1.0) or "")
            await eventually(lambda: client.exit_code not in (None, 0))

    run(test)


def test_a_report_that_cannot_be_read_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running("slow") as client:
            stream = client.submit([ask("a", 3000)])
            await stream.next()
            client.on_begin = lambda seconds: 1 / 0
            client.submit([ask("b")])
            with pytest.raises(EngineStoppedError, match="cannot be read"):
                await drain(stream)
            await eventually(lambda: client.exit_code == -9)

    run(test)
    assert "ZeroDivisionError" in caplog.text


def test_health_tells_a_live_engine_from_a_still_one() -> None:
    async def test() -> None:
        async with running("fast") as client:
            assert await client.trouble(5.0) is None
            assert await asyncio.gather(*(client.trouble(5.0) for _ in range(10))) == [None] * 10
            stream = client.submit([ask("hangs", seed=scripted.HANG)])
            await asyncio.sleep(0.2)
            trouble = await client.trouble(0.1)
            assert trouble is not None
            assert "none has moved" in trouble
            stream.close()
            trouble = await client.trouble(0.1)
            assert trouble is not None
            assert "has not answered" in trouble
            client.kill()

    run(test)


def test_closing_ends_the_process_and_leaves_nothing() -> None:
    async def test() -> None:
        async with running() as client:
            pid = client.process_id
            assert pid is not None
            stream = client.submit([ask("open", 4000)])
            await stream.next()
        assert client.exit_code == 0
        assert not psutil.pid_exists(pid)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await drain(stream)

    run(test)


def test_signals_to_the_group_do_not_reach_the_engine() -> None:
    async def test() -> None:
        async with running() as client:
            assert client.process_id is not None
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(client.process_id, number)
            await asyncio.sleep(0.1)
            assert await collect(client.submit([ask("a")]), 1) == {0: [5, 6, 7, 8, 5, 6]}

    run(test)


PARENT = """
import asyncio, sys
from deltaserve.config import EngineConfig
from deltaserve.engine.client import EngineClient, EngineLaunch
async def main():
    client = EngineClient(EngineLaunch(EngineConfig(), "tests.engine.scripted:slow"))
    await client.start()
    print(client.process_id, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        engine.wait(timeout=5)
