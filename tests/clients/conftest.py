"""A running server for the outside clients, and transformers' own answers on the built-in model to compare with."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BUILTIN = HERE.parents[1] / "src" / "deltaserve" / "builtin"
API_KEY = "sk-local"
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Server:
    """Where the server answers, and its numbers."""

    origin: str
    process: subprocess.Popen[bytes]

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.origin + path, headers={"Authorization": f"Bearer {API_KEY}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """Each sample's value by its name with labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def in_use(self) -> dict[str, float]:
        """What running requests hold: requests, KV blocks and state slots."""
        numbers = self.metrics()
        return {name: numbers[f"deltaserve_{name}"] for name in ("running", "waiting", "kv_blocks_used", "slots_used")}

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Raises AssertionError when something is still in use after `seconds`."""
        end = time.monotonic() + seconds
        while any(self.in_use().values()):
            assert time.monotonic() < end, f"still in use: {self.in_use()}"
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def is_ready(server: Server) -> bool:
    try:
        server.get("/health")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`deltaserve serve` on the built-in model in float32, with an API key; ended by SIGTERM, which must exit 0."""
    port = free_port()
    command = [sys.executable, "-m", "deltaserve.cli", "serve", "--port", str(port), "--api-key", API_KEY]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--dtype", "float32"], stdout=log, stderr=subprocess.STDOUT)
        running = Server(f"http://127.0.0.1:{port}", process)
        end = time.monotonic() + READY_SECONDS
        while not is_ready(running):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                log.seek(0)
                pytest.fail(f"the server did not become ready:\n{log.read().decode(errors='replace')}")
            time.sleep(0.1)
        yield running
        process.terminate()
        assert process.wait(timeout=60) == 0, "SIGTERM did not end the server with status 0"


@pytest.fixture
def idle(server: Server) -> Iterator[None]:
    """The test leaves nothing in use behind."""
    yield
    server.wait_until_idle()


@pytest.fixture(scope="session")
def continue_text() -> Callable[[str, int], str]:
    """transformers' greedy continuation of a text, by the built-in model in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN)
    model: Any = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype="float32")
    model.eval()

    def continued(text: str, max_tokens: int) -> str:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        # The checkpoint's own defaults sample; all of them must go for a greedy answer without warnings.
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ids = model.generate(**inputs, **greedy, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
        answer: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answer

    return continued


@pytest.fixture(scope="session")
def render() -> Callable[[list[dict[str, str]]], str]:
    """The prompt that the built-in model's template makes of a conversation."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN)
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
