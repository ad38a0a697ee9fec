"""A whole server as a process: signals, deaths, ports. The engine is scripted, so that it comes up in a second."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.running import error

ROOT = Path(__file__).parents[2]
FOR_EVER = 3600.0
"""Seconds. Whatever ends does not wait for a timeout of so long, however slow the machine is."""
PATIENCE = 60.0
"""Seconds until a test gives up: no statement about speed."""
SCRIPT = """
import logging, sys
from deltaserve.config import EngineConfig
from deltaserve.engine.client import EngineLaunch
from deltaserve.server import lifecycle
from deltaserve.server.config import ServerConfig
factory, seconds = sys.argv[1], float(sys.argv[2])
logging.basicConfig(level="INFO")
def announce(info, model, address):
    print("ready", model, address, flush=True)
launch = EngineLaunch(EngineConfig(), "tests.engine.scripted:" + factory)
sys.exit(lifecycle.run(launch, ServerConfig(port=0, shutdown_timeout=seconds), announce))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line[:2] == ["ready", "builtin"], f"not ready: {line}"
        self.http = httpx.Client(base_url=line[2], verify=False, timeout=PATIENCE)
        self.port = int(line[2].rsplit(":", 1)[1])
        self.engine = next(
            child for child in psutil.Process(process.pid).children() if "deltaserve.engine.process" in child.cmdline()
        )

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "a b c", **fields})

    def num_running(self) -> int:
        lines = self.get("/metrics").text.splitlines()
        return int(float(next(line for line in lines if line.startswith("deltaserve_requests_running ")).split()[1]))

    def later(self, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        """A request in a thread, on its way when this returns."""
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(self.post(**fields))

        thread = threading.Thread(target=ask)
        wanted = self.num_running() + 1
        thread.start()
        while self.num_running() < wanted:
            assert thread.is_alive(), "it has ended before it was seen"
            time.sleep(0.01)
        return thread, answers

    def ends(self) -> int:
        """Its exit code; its engine is gone too."""
        code = self.process.wait(PATIENCE)
        self.engine.wait(PATIENCE)
        return code


@contextlib.contextmanager
def serving(factory: str = "slow", shutdown_timeout: float = FOR_EVER) -> Iterator[Process]:
    command = [sys.executable, "-c", SCRIPT, factory, str(shutdown_timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            server = Process(process)
            with server.http:
                yield server
        finally:
            process.kill()


def last_event(response: httpx.Response) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    return event


def test_sigterm_lets_running_requests_finish() -> None:
    with serving() as server:
        whole, whole_answers = server.later(max_tokens=300)
        stream, stream_answers = server.later(max_tokens=300, stream=True)
        server.process.send_signal(signal.SIGTERM)
        while server.get("/health").status_code == 200:
            time.sleep(0.01)
        assert error(server.post(), 503)["code"] == "shutting_down"
        assert server.get("/health").status_code == 503
        whole.join(PATIENCE)
        stream.join(PATIENCE)
        assert whole_answers[0].json()["usage"]["completion_tokens"] == 300
        assert stream_answers[0].text.endswith("data: [DONE]\n\n")
        assert server.ends() == 0


def test_an_idle_server_ends_at_once() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.ends() == 0


def test_what_outlasts_the_timeout_is_answered_with_an_error() -> None:
    with serving(shutdown_timeout=0.3) as server:
        whole, whole_answers = server.later(max_tokens=4000)
        stream, stream_answers = server.later(max_tokens=4000, stream=True)
        server.process.send_signal(signal.SIGTERM)
        whole.join(PATIENCE)
        stream.join(PATIENCE)
        assert "shutting down" in error(whole_answers[0], 503)["message"]
        assert "shutting down" in last_event(stream_answers[0])["error"]["message"]
        assert server.ends() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with serving() as server:
        peer = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "a", "max_tokens": 4000})
        peer.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        while not server.num_running():
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while server.get("/health").status_code == 200:
            time.sleep(0.01)
        assert server.process.poll() is None, "the first signal waits for what runs"
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() != 0
        peer.close()


def test_a_dead_engine_ends_the_server() -> None:
    with serving() as server:
        whole, whole_answers = server.later(max_tokens=4000)
        stream, stream_answers = server.later(max_tokens=4000, stream=True)
        os.kill(server.engine.pid, signal.SIGKILL)
        whole.join(PATIENCE)
        stream.join(PATIENCE)
        assert "signal 9" in error(whole_answers[0], 503)["message"]
        assert "signal 9" in last_event(stream_answers[0])["error"]["message"]
        assert server.ends() == 1


def test_an_engine_that_fails_ends_the_server() -> None:
    with serving() as server:
        answer = server.post(seed=9001)
        assert "told to fail" in error(answer, 503)["message"]
        assert server.ends() == 1


def test_a_killed_server_takes_its_engine_along() -> None:
    with serving() as server:
        assert server.post(max_tokens=10).status_code == 200
        server.process.kill()
        server.engine.wait(PATIENCE)


@pytest.mark.parametrize(
    ("factory", "words"),
    [("refusing", "there is no such model, name another"), ("failing", "told to fail at the start")],
)
def test_a_start_that_fails_ends_with_an_error(factory: str, words: str) -> None:
    command = [sys.executable, "-c", SCRIPT, factory, "1"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert run.returncode != 0
    assert words in run.stderr
    assert run.stdout == ""


def test_while_the_model_loads_health_says_so() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("port=0", f"port={(port := free_port())}"), "loading", "1"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        try:
            told = error(first_answer(f"http://127.0.0.1:{port}/health"), 503)
            assert told["code"] == "loading"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def first_answer(url: str) -> httpx.Response:
    end = time.monotonic() + PATIENCE
    with httpx.Client(verify=False) as client:
        while True:
            try:
                return client.get(url)
            except httpx.ConnectError:
                assert time.monotonic() < end, "nobody listens"
                time.sleep(0.02)


def test_a_port_in_use_is_told_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        script = SCRIPT.replace("port=0", f"port={port}")
        run = subprocess.run(
            [sys.executable, "-c", script, "dying", "1"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
            check=False,
        )
    assert run.returncode != 0
    assert f"cannot listen on host 127.0.0.1, port {port}" in run.stderr
    assert "choose another --port" in run.stderr
    assert "ended by signal" not in run.stderr, "the engine was started all the same"
