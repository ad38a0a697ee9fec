"""The commands of docs/bench.md run, against the built-in model and with fewer and shorter requests."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve import cli
from deltaserve.bench import steps
from tests.bench.test_commands import COMMANDS
from tests.markdown import ROOT, examples
from tests.serving import Server

PAGE = ROOT / "docs" / "bench.md"
SMALL = {
    "serve": ["--requests", "3", "--prompt-tokens", "20", "--output-tokens", "3"],
    "multi-turn": ["--turns", "2", "--prompt-tokens", "40", "--turn-tokens", "20", "--output-tokens", "4"],
    "steps": [],
}


def commands() -> list[list[str]]:
    """The words after `deltaserve` of each line, without its comment."""
    text = "".join(example.code for example in examples(PAGE.read_text()) if example.language == "sh")
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("deltaserve bench")]


def test_the_page_shows_every_command() -> None:
    assert {words[1] for words in commands()} == {*SMALL}
    assert all(f"`{name}`" in PAGE.read_text() for name in COMMANDS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_page_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[1] == "steps":  # half a minute on a CPU: only its flags are tried
        monkeypatch.setattr(steps, "run", lambda config, decode, prefill, path: path.write_text("{}"))
    few = [word.replace("8,32,256", "1,3").replace("1,4,inf", "5,inf") for word in words]
    to = [] if words[1] == "steps" else ["--url", server.origin, "--api-key", server.api_key]
    to += ["--vs", server.origin] if "--vs" in words else []
    result = CliRunner().invoke(cli.app, [*few, *SMALL[words[1]], *to])
    assert result.exit_code == 0, result.output
    assert "\n    failed " not in result.output, result.output
    if "--json" in words:
        assert (tmp_path / words[words.index("--json") + 1]).read_text().startswith("{")
