"""Answers are read the same however their bytes are cut, and events carry the moment their bytes came."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.bench.wire import Client, Exchange
from tests.bench.scripted import Keeps, Script, scripted

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()

    asyncio.run(run())


def read(pieces: list[bytes], closes: bool = False) -> tuple[Exchange, list[tuple[bytes, float]]]:
    """An exchange that was fed the n-th piece at time n."""
    events: list[tuple[bytes, float]] = []
    made: list[Exchange] = []

    async def feed() -> None:
        exchange = Exchange(lambda data, now: events.append((data, now)))
        made.append(exchange)
        for number, piece in enumerate(pieces):
            exchange.feed(piece, float(number))
        if closes:
            exchange.lose()
        await asyncio.wait_for(exchange.whole, 1.0)

    in_loop(feed)
    return made[0], events


STREAM = chunked(
    b"data: one\n\n: a comment\n\ndata: t", b"wo\r\n\r\nevent: x\ndata: three\ndata: lines\n\n", b"data:[DONE]\n\n"
)


def test_events_of_a_body_with_a_length_end() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n"
    exchange, events = read([head + b"data: a\n\n", b"data: [DONE]\n", b"\n"])
    assert exchange.whole.done()
    assert [data for data, _ in events] == [b"a", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    _, events = read([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    assert [data for data, _ in events] == [b"one", b"two", b"three\nlines", b"[DONE]"]
    assert [now for _, now in events] == sorted(now for _, now in events)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    first, second = STREAM.index(b"one"), STREAM.index(b"wo\r\n\r\n")
    _, events = read([STREAM[: first + 5], STREAM[first + 5 : second], STREAM[second:]])
    assert events[1] == (b"two", 2.0)
    assert events[0][1] < 2.0


@pytest.mark.parametrize(
    ("raw", "closes"),
    [
        (b"HTTP/1.1 404 Gone\r\nContent-Length: 4\r\n\r\nword", False),
        (b"HTTP/1.1 404 Gone\r\n\r\nword", True),
        (chunked(b"wo", b"rd").replace(b"200 OK", b"404 Gone"), False),
    ],
)
def test_a_body_that_is_no_stream(raw: bytes, closes: bool) -> None:
    exchange, events = read([raw], closes)
    assert (exchange.status, exchange.body, events) == (404, b"word", [])


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 OK\r\n", STREAM[:-5], b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nword"]
)
def test_an_answer_that_is_cut_off_fails(raw: bytes) -> None:
    with pytest.raises(ConnectionError, match="closed before"):
        read([raw], closes=True)


def test_what_is_no_http_fails() -> None:
    with pytest.raises(ConnectionError, match="no HTTP"):
        read([b"SSH-2.0-x y\r\n\r\n"])


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="it must be like"):
        Client(url)


def test_addresses_as_other_clients_want_them() -> None:
    for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert Client(url).origin == "http://a:1"
    assert Client("https://a/prefix/v1").origin == "https://a/prefix"


@pytest.mark.parametrize(("keeps", "connections"), [("open", 1), ("closed", 3), ("until asked", 3)])
def test_a_kept_connection_is_used_again_and_replaced_when_it_has_closed(keeps: Keeps, connections: int) -> None:
    with scripted(Script(), keeps=keeps) as server:

        async def ask() -> None:
            client = Client(server.url)
            for _ in range(3):
                answer = await client.post("/v1/completions", b"{}", lambda data, now: None)
                assert answer.status == 200
                await asyncio.sleep(0.02)
            client.close()

        in_loop(ask)
        assert server.connections == connections
