"""Starts `deltaserve serve` as a process of its own, waits until it is ready, reads its numbers, ends it.

Used by every test and benchmark that needs a real server. Knows the command line and HTTP, nothing of the inside.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

READY_SECONDS = 60.0
STOP_SECONDS = 60.0


@dataclass
class Server:
    """A running server. `base_url` is what the openai package wants."""

    origin: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    api_key: str = ""
    ready_after: float = field(default=0.0)
    """Seconds from the start of the process to the first good /health."""

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    @property
    def port(self) -> int:
        return int(self.origin.rsplit(":", 1)[1])

    def get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with urllib.request.urlopen(urllib.request.Request(self.origin + path, headers=headers), timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def said(self) -> str:
        """What it has written to its terminal so far."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Each sample's value by its name with labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def in_use(self) -> dict[str, float]:
        """What requests hold now: the requests themselves, KV blocks and state slots."""
        numbers = self.metrics()
        names = ("requests_running", "requests_waiting", "kv_blocks_used", "state_slots_used")
        return {name: numbers[f"deltaserve_{name}"] for name in names}

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Raises AssertionError when something is still in use after `seconds`."""
        end = time.monotonic() + seconds
        while any(self.in_use().values()):
            assert time.monotonic() < end, f"still in use: {self.in_use()}"
            time.sleep(0.05)

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Raises AssertionError with the server's own words when it ends or takes longer."""
        start = time.monotonic()
        while not self.is_ready():
            assert self.process.poll() is None, f"ended before it was ready:\n{self.said()}"
            assert time.monotonic() - start < seconds, f"not ready after {seconds} s:\n{self.said()}"
            time.sleep(0.02)
        self.ready_after = time.monotonic() - start

    def is_ready(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def stop(self) -> int:
        """Ends it as an operator does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_SECONDS)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def serving(*flags: str, api_key: str = "", ready_seconds: float = READY_SECONDS) -> Iterator[Server]:
    """`deltaserve serve` on a free port with these flags, ready. Killed at the end if it does not stop by itself."""
    port = free_port()
    command = [sys.executable, "-m", "deltaserve.cli", "serve", "--port", str(port), *flags]
    if api_key:
        command += ["--api-key", api_key]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        server = Server(f"http://127.0.0.1:{port}", process, log, api_key)
        try:
            server.wait_until_ready(ready_seconds)
            yield server
            status = server.stop()
            assert status == 0, f"SIGTERM ended the server with status {status}:\n{server.said()}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
