"""What stands before the routes: keys, sizes, overload, shutting down; and the routes that need no model."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import deltaserve
from deltaserve.server import app, protocol
from deltaserve.server.config import ServerConfig
from tests.server.running import TOKENIZER, Running, error, ok, running

COMPLETIONS = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """Two keys, and bodies of at most 1000 bytes."""
    with running("fast", ServerConfig(api_key=("sk-one", "sk-two"), max_request_bytes=1000)) as server:
        yield server


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
def test_either_key_opens(guarded: Running, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    ok(guarded.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers=headers))
    ok(guarded.http.get("/v1/models", headers=headers))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-three"},
        {"Authorization": "Bearer sk-on"},
        {"Authorization": "Bearer"},
        {"Authorization": "sk-one"},
        {"Authorization": "Basic sk-one"},
        {"Authorization": "Bearer sk-\u00f6ne".encode()},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/tokenize", "/nothing"])
def test_a_wrong_key_opens_nothing(guarded: Running, path: str, headers: dict[str, Any]) -> None:
    response = guarded.http.post(path, json={"prompt": "a"}, headers=headers)
    told = error(response, 401)
    assert (told["code"], told["type"]) == ("invalid_api_key", "authentication_error")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_probes_need_no_key(guarded: Running, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused(guarded: Running, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 1000 + b'"}'
    content: bytes | Iterator[bytes] = iter([body[:600], body[600:]]) if chunked else body
    response = guarded.http.post(COMPLETIONS, content=content, headers={"Authorization": "Bearer sk-one"})
    told = error(response, 413)
    assert "the limit is 1000" in told["message"]
    assert "--max-request-bytes" in told["message"]


def test_overload_is_told_with_a_time_to_retry() -> None:
    with running("slow", max_num_seqs=1, max_waiting=1) as server:

        async def flood() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.http.base_url, timeout=20) as client:
                ask = {"prompt": "a", "max_tokens": 30}
                return await asyncio.gather(*(client.post(COMPLETIONS, json=ask) for _ in range(6)))

        responses = asyncio.run(flood())
        assert sorted(response.status_code for response in responses) == [200] * 2 + [503] * 4
        for response in responses:
            if response.status_code == 503:
                told = error(response, 503)
                assert told["code"] == "overloaded"
                assert "no more than 1 may wait" in told["message"]
                assert int(response.headers["retry-after"]) >= 1
        server.wait_until_idle()
        server.complete(prompt="a", max_tokens=1)


def test_a_server_that_drains_takes_no_work() -> None:
    with running("fast") as server:
        server.service.draining = True
        for path in (COMPLETIONS, "/v1/chat/completions"):
            response = server.post(path, prompt="a")
            assert error(response, 503)["code"] == "shutting_down"
            assert "retry-after" in response.headers
        assert "shutting down" in error(server.http.get("/health"), 503)["message"]
        assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("fields", [{"prompt": "a"}, {"prompt": "a", "stream": True}])
def test_work_that_comes_while_the_server_drains_is_refused(fields: dict[str, Any]) -> None:
    with running("fast") as server:
        body = json.dumps(fields).encode()
        peer = begin(server, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        peer.sendall(body[:5])
        time.sleep(0.1)  # it is let in
        server.service.draining = True
        peer.sendall(body[5:])
        answer = rest(peer)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer.lower()
        assert b"shutting_down" in answer


def test_health_tells_a_dead_engine() -> None:
    with running("slow") as server:
        assert ok(server.http.get("/health")) == {"status": "ok"}
        server.service.backend.client.kill()
        end = time.monotonic() + 5
        while server.http.get("/health").status_code == 200:
            assert time.monotonic() < end
        told = error(server.http.get("/health"), 503)
        assert "signal 9" in told["message"]
        assert error(server.post(COMPLETIONS, prompt="a"), 503)["code"] == "engine_stopped"


def test_health_tells_an_engine_that_stands_still() -> None:
    with running("fast", ServerConfig(health_timeout=0.3)) as server:
        client = server.service.backend.client
        start = time.monotonic()
        with httpx.Client(base_url=server.http.base_url, timeout=0.1) as hasty, pytest.raises(httpx.ReadTimeout):
            hasty.post(COMPLETIONS, json={"prompt": "a", "seed": 9004})
        told = error(server.http.get("/health"), 503)
        assert "has not answered for 0.3 s" in told["message"] or "none has moved" in told["message"]
        assert time.monotonic() - start < 3.0
        client.kill()


# ---- clients that take their time ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """Waits for nobody."""
    config = ServerConfig(header_timeout=0.3, body_timeout=0.3, keep_alive_timeout=1)
    with running("slow", config) as server:
        yield server


def begin(server: Running, data: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    peer.sendall(data)
    return peer


def rest(peer: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    with peer:
        data = b""
        while part := peer.recv(65536):
            data += part
        return data


def drip(peer: socket.socket, data: bytes) -> bytes:
    """Sends a byte now and then, without an end, until the server closes the connection."""
    end, answer = time.monotonic() + 20, b""
    with peer:
        peer.settimeout(0.05)
        while time.monotonic() < end:
            try:
                peer.sendall(data)
                part = peer.recv(65536)
                if not part:
                    return answer
                answer += part
            except TimeoutError:
                continue
            except OSError:  # a byte of ours met a closed end
                return answer
    raise AssertionError("the connection is kept for ever")


def test_a_head_that_does_not_end_is_answered(hasty: Running) -> None:
    answer = rest(begin(hasty, HEAD))
    assert answer.startswith(b"HTTP/1.1 408 ")
    told = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (told["code"], told["type"]) == ("request_timeout", "invalid_request_error")
    assert "head has not come within 0.3 s" in told["message"]


@pytest.mark.parametrize(
    ("head", "byte"), [(HEAD, b"x"), (HEAD + b"content-length: 100000\r\n\r\n", b" ")], ids=["head", "body"]
)
def test_bytes_now_and_then_are_no_way_to_stay(hasty: Running, head: bytes, byte: bytes) -> None:
    answer = drip(begin(hasty, head), byte)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


def test_a_refused_body_is_not_waited_for(hasty: Running) -> None:
    answer = drip(begin(hasty, HEAD.replace(b"completions", b"nothing") + b"content-length: 100000\r\n\r\n"), b" ")
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_a_body_that_does_not_end_is_answered(hasty: Running) -> None:
    peer = begin(hasty, HEAD + b"content-length: 100\r\n\r\n{")
    answer = rest(peer)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body has not come within 0.3 s" in answer


def test_a_connection_without_a_request_is_closed(hasty: Running) -> None:
    assert rest(begin(hasty, b"")) == b""
    answer = rest(begin(hasty, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_second_head_has_its_own_time(hasty: Running) -> None:
    peer = begin(hasty, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += peer.recv(65536)
    peer.sendall(HEAD)
    assert rest(peer).startswith(b"HTTP/1.1 408 ")


def test_a_long_answer_is_no_fault_of_the_client(hasty: Running) -> None:
    for stream in (False, True):
        hasty.post(COMPLETIONS, prompt="a", max_tokens=100, stream=stream).raise_for_status()
    hasty.wait_until_idle()


def test_a_large_body_is_read_beside_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    read_json = protocol.read_json

    def read(body: bytes) -> dict[str, Any]:
        readers.append(threading.current_thread().name)
        return read_json(body)

    monkeypatch.setattr(app, "read_json", read)
    server.complete(prompt="a", max_tokens=1)
    error(server.post(COMPLETIONS, prompt=[5] * 100_000), 400)
    small, large = readers
    assert small != large


# ---- heads and upgrades --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models", "/v1/models/scripted"])
def test_a_head_is_what_get_answers_without_the_body(server: Running, path: str) -> None:
    head, whole = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(whole.content))
    assert server.http.head("/nothing").status_code == 404
    assert server.http.head(COMPLETIONS).status_code == 405


def test_an_upgrade_is_not_taken_and_no_cause_for_alarm(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    with caplog.at_level(logging.INFO):
        assert server.http.get("/version", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_there_is_no_page_that_loads_scripts_from_elsewhere(server: Running, path: str) -> None:
    assert server.http.get(path).status_code == 404


# ---- routes about the model ----------------------------------------------------------------------------------------


def test_models(server: Running) -> None:
    body = ok(server.http.get("/v1/models"))
    (card,) = body["data"]
    assert body["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 4096)
    assert ok(server.http.get("/v1/models/scripted")) == card


def test_version(server: Running) -> None:
    assert ok(server.http.get("/version")) == {"version": deltaserve.__version__}


def test_tokenize_and_back(server: Running) -> None:
    text = "Mia buys 12 apples 🍎."
    body = ok(server.post("/tokenize", prompt=text, add_special_tokens=False))
    assert body == {"tokens": TOKENIZER.encode(text), "count": len(TOKENIZER.encode(text)), "max_model_len": 4096}
    assert ok(server.post("/detokenize", tokens=body["tokens"])) == {"prompt": text}
    assert ok(server.post("/tokenize", prompt="")) == {"tokens": [], "count": 0, "max_model_len": 4096}


def test_tokenize_messages(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = ok(server.post("/tokenize", messages=messages))
    assert TOKENIZER.decode(body["tokens"], False) == TOKENIZER.render_chat(messages)


def test_a_long_text_is_encoded_beside_the_loop(server: Running) -> None:
    text = "apples and pears " * 2000
    assert ok(server.post("/tokenize", prompt=text))["tokens"] == TOKENIZER.encode(text)


def test_detokenize_refuses_ids_that_are_none(server: Running) -> None:
    assert "vocabulary has ids 0 to 2047" in error(server.post("/detokenize", tokens=[5, 2048]), 400)["message"]
    assert "id -1" in error(server.post("/detokenize", tokens=[-1]), 400)["message"]


def test_tokenizer_info(server: Running) -> None:
    body = ok(server.http.get("/tokenizer_info"))
    assert body["eos_token"] == "<|im_end|>"
    assert body["pad_token"] == "<|endoftext|>"
    assert body["bos_token"] is None
    assert body["chat_template"] == TOKENIZER.chat_template


def test_the_schema_lists_every_route(server: Running) -> None:
    paths = ok(server.http.get("/openapi.json"))["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/tokenize"} <= set(paths)
