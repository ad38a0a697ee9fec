"""The README's example with the openai package prints what it shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.markdown import README, examples
from tests.serving import serving

pytest.importorskip("openai", reason="needs the openai package: make test-clients")


@pytest.mark.clients
def test_openai_example() -> None:
    (example,) = [example for example in examples(README.read_text()) if "import OpenAI" in example.code]
    with serving() as server:
        code = example.code.replace("http://127.0.0.1:8000", server.origin)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == (example.output or "").strip()
