"""Clients that go away: whatever their requests held is free at once, in every phase, streaming or not."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.running import Running, running

LONG: dict[str, Any] = {"prompt": "Mia buys 12 apples. ", "max_tokens": 4000}


def send(server: Running, **fields: Any) -> socket.socket:
    """A request on a connection of its own; nothing is read."""
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    peer.sendall(head.encode() + body)
    return peer


def read_chunks(peer: socket.socket, count: int) -> bytes:
    """Reads until `count` chunks of a stream have come."""
    data = b""
    while data.count(b"data: ") < count:
        part = peer.recv(65536)
        assert part, f"the stream ended early: {data[-500:]!r}"
        data += part
    return data


def drop_politely(peer: socket.socket) -> None:
    peer.close()


def drop_rudely(peer: socket.socket) -> None:
    """With a reset instead of an end."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    peer.close()


@pytest.mark.parametrize("drop", [drop_politely, drop_rudely])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends(slow: Running, stream: bool, n: int, drop: Callable[[socket.socket], None]) -> None:
    peer = send(slow, **LONG, stream=stream, n=n)
    slow.wait_until_running(n)
    if stream:
        read_chunks(peer, 3)
    drop(peer)
    slow.wait_until_idle()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_request_ends(slow: Running, stream: bool, n: int) -> None:
    blockers = [send(slow, **LONG) for _ in range(8)]
    slow.wait_until_running(8)
    waits = send(slow, **LONG, stream=stream, n=n)
    slow.wait_until_running(8, waiting=n)
    waits.close()
    slow.wait_until_running(8, waiting=0)
    for blocker in blockers:
        blocker.close()
    slow.wait_until_idle()


def test_a_client_that_leaves_at_once(slow: Running) -> None:
    before = sum(slow.stats.aborts.values()) + sum(slow.stats.finished.values())
    for stream in (False, True) * 10:
        send(slow, **LONG, stream=stream).close()
    slow.wait_until_idle(3.0)
    assert sum(slow.stats.aborts.values()) + sum(slow.stats.finished.values()) >= before


def test_one_that_leaves_disturbs_no_other(slow: Running) -> None:
    answers: list[dict[str, Any]] = []
    stays = threading.Thread(target=lambda: answers.append(slow.complete(**{**LONG, "max_tokens": 40})))
    stays.start()
    peers = [send(slow, **LONG, stream=True) for _ in range(6)]
    for peer in peers:
        read_chunks(peer, 2)
        peer.close()
    stays.join(10)
    assert answers[0]["usage"]["completion_tokens"] == 40
    slow.wait_until_idle()


def test_two_hundred_streams_dropped_at_random() -> None:
    """Each is dropped after a random number of tokens; then a normal request is answered and nothing is in use."""
    with running("slow") as server:
        drop_two_hundred(server, random.Random(7))


def drop_two_hundred(server: Running, rng: random.Random) -> None:
    peers: list[tuple[socket.socket, int]] = []
    for _ in range(200):
        chunks = rng.choice([0, 0, 1, 2, 3, 8])
        peers.append((send(server, **LONG, stream=True, n=rng.choice([1, 1, 2])), chunks))
        if len(peers) >= 20:
            peer, chunks = peers.pop(rng.randrange(len(peers)))
            if chunks:
                read_chunks(peer, chunks)
            rng.choice([drop_politely, drop_rudely])(peer)
    for peer, chunks in peers:
        if chunks:
            read_chunks(peer, chunks)
        peer.close()
    start = time.monotonic()
    assert server.complete(prompt="after", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert time.monotonic() - start < 2.0
    server.wait_until_idle()
    assert server.stats.aborts["disconnect"] > 100


def test_a_slow_reader_holds_up_nobody(slow: Running) -> None:
    """A client that never reads fills its own buffers; others go on, and it is let go with its connection."""
    lazy = [send(slow, **LONG, stream=True, logprobs=20) for _ in range(3)]
    slow.wait_until_running(3)
    start = time.monotonic()
    slow.complete(prompt="quick", max_tokens=20)
    assert time.monotonic() - start < 2.0
    for peer in lazy:
        peer.close()
    slow.wait_until_idle()
