"""`deltaserve bench multi-turn`: what is sent back, and what the built-in model's server computes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaserve import cli
from tests.bench.scripted import Script, scripted
from tests.serving import Server


def measure(tmp_path: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    path = tmp_path / "lines.json"
    result = CliRunner().invoke(cli.app, ["bench", "multi-turn", "--json", str(path), *words])
    assert result.exit_code == 0, result.output
    return result.output, [json.loads(line) for line in path.read_text().splitlines()]


def talk(number: int, body: dict[str, Any]) -> Script:
    """Each turn is 100 tokens longer; from the second on 30 prompt tokens are not cached."""
    turn = (len(body["messages"]) + 1) // 2
    return Script(prompt_tokens=100 * turn, cached_tokens=100 * turn - 30 if turn > 1 else 0, chunks=(1, 4))


def test_every_turn_sends_the_past_back(tmp_path: Path) -> None:
    with scripted(talk) as server:
        words = ["--url", server.url, "--clients", "2", "--conversations", "3", "--turns", "3"]
        said, lines = measure(tmp_path, *words)
    talks = [body["messages"] for body in server.bodies if body["max_tokens"] != 8]
    assert sorted(len(messages) for messages in talks) == [1, 1, 1, 3, 3, 3, 5, 5, 5]
    for messages in talks:
        roles = ["user", "assistant"] * 3
        assert [message["role"] for message in messages] == roles[: len(messages)]
        assert all(message["content"] == "word word " for message in messages[1::2])
        assert any(messages[:-2] == other for other in talks) or len(messages) == 1
    assert all("ignore_eos" not in body for body in server.bodies if body["max_tokens"] != 8)
    first, second, third, every = lines
    assert [line["turn"] for line in lines] == [1, 2, 3, "all"]
    assert (first["prefilled_tokens"], first["new_tokens"], first["excess_tokens"]) == (100, 100, None)
    for line in (second, third):
        assert (line["prefilled_tokens"], line["new_tokens"], line["excess_tokens"]) == (30, 95, -65)
    assert (every["completed"], every["turns_with_a_past"], every["turns_beyond_a_block"]) == (9, 6, 0)
    assert "0 of 6 later turns prefilled more" in said


def test_excess_is_told(tmp_path: Path) -> None:
    def forgetful(number: int, body: dict[str, Any]) -> Script:
        return Script(prompt_tokens=100 * len(body["messages"]), cached_tokens=0)

    with scripted(forgetful) as server:
        said, lines = measure(tmp_path, "--url", server.url, "--clients", "1", "--turns", "2")
    assert lines[1]["excess_tokens"] == 300 - (300 - 103)
    assert "1 of 1 later turns prefilled more" in said


def test_a_conversation_that_fails_ends_and_the_others_go_on(tmp_path: Path) -> None:
    failed: list[int] = []

    def faulty(number: int, body: dict[str, Any]) -> Script:
        if len(body["messages"]) == 3 and not failed:
            failed.append(number)
            return Script(status=500, error="broken")
        return Script()

    with scripted(faulty) as server:
        said, lines = measure(tmp_path, "--url", server.url, "--clients", "2", "--turns", "3")
    assert [(line["completed"], line["failed"]) for line in lines] == [(2, 0), (1, 1), (1, 0), (4, 1)]
    assert "failed 1 times: HTTP 500: broken" in said


def test_a_server_that_does_not_tell_what_was_cached(tmp_path: Path) -> None:
    with scripted(Script(cached_tokens=None)) as server:
        said, lines = measure(tmp_path, "--url", server.url, "--clients", "1", "--turns", "2")
    assert lines[-1]["cached_tokens"] is lines[-1]["excess_tokens"] is None
    assert "no excess can be told" in said


def test_token_ids_are_needed_to_send_them_back(tmp_path: Path) -> None:
    with scripted(Script(tells_ids=False)) as server:
        said, lines = measure(tmp_path, "--url", server.url, "--api", "completions", "--clients", "1")
    assert "use --api chat" in said
    assert lines[-1]["failed"] == 1


# ---- the real thing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_cached_tokens_are_those_of_the_server(server: Server, tmp_path: Path, api: str) -> None:
    name = "deltaserve_cached_prompt_tokens_total"
    before = server.metrics()
    words = [
        "--url",
        server.origin,
        "--api-key",
        server.api_key,
        "--api",
        api,
        "--clients",
        "2",
        "--turns",
        "3",
        "--prompt-tokens",
        "150",
    ]
    said, lines = measure(tmp_path, *words, "--output-tokens", "24", "--turn-tokens", "40")
    after = server.metrics()
    every = lines[-1]
    assert (every["completed"], every["failed"]) == (6, 0), said
    assert every["cached_tokens"] * 6 == after[name] - before[name] > 0
    assert every["turns_with_a_past"] == 4
    assert every["turns_beyond_a_block"] == 0, said
    assert 0 <= every["most_excess_tokens"] <= 64
