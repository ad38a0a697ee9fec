"""The openai package for Node against the running server; the checks themselves are in client.mjs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import API_KEY, HERE
from tests.serving import Server

PACKAGES = HERE.parents[1] / ".clients"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.usefixtures("idle"),
    pytest.mark.skipif(shutil.which("node") is None, reason="needs Node 20"),
    pytest.mark.skipif(not (PACKAGES / "node_modules").is_dir(), reason="needs .clients: make test-clients"),
]


def test_node_client(server: Server, continue_text: Callable[[str, int], str]) -> None:
    command = ["node", str(HERE / "client.mjs"), server.base_url, API_KEY, str(PACKAGES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    answers = {line["name"]: line["answer"] for line in map(json.loads, run.stdout.splitlines())}
    assert set(answers) == {"completion", "chat", "errors", "abort"}
    prompt = "Question: Tom has 17 apples. He buys 25 more. How many apples does Tom have?\nAnswer:"
    assert answers["completion"] == continue_text(prompt, 48)
