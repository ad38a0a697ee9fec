"""`deltaserve bench serve` against servers with known delays and faults, and against the built-in model's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaserve import cli
from tests.bench.scripted import Script, Scripted, scripted
from tests.serving import Server, free_port


def bench(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", "serve", *words])


def measure(tmp_path: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """What was printed, and the lines of JSON."""
    path = tmp_path / "lines.json"
    result = bench("--json", str(path), *words)
    assert result.exit_code == 0, result.output
    return result.output, [json.loads(line) for line in path.read_text().splitlines()]


def loads(server: Scripted) -> list[dict[str, Any]]:
    """The requests that came and count."""
    return [body for body in server.bodies if body["max_tokens"] != 8]


def test_known_delays(tmp_path: Path) -> None:
    with scripted(Script(first=0.1, gap=0.05, chunks=(1, 2, 1))) as server:
        words = ["--url", server.url, "--concurrency", "4", "--requests", "8", "--goodput", "ttft:90,e2e:1000"]
        said, (line,) = measure(tmp_path, *words)
    assert (line["completed"], line["failed"], line["load"]) == (8, 0, "clients 4")
    assert (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) == (80, 32, 0)
    for name, least in (("ttft_ms", 100), ("tpot_ms", 100 / 3), ("itl_ms", 25), ("e2e_ms", 200)):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert 0.9 * least <= line[name][statistic] <= 4 * least + 100, name
    assert line["itl_ms"]["p99"] >= 45, "the last token had a chunk of its own"
    assert line["duration_s"] >= 0.4, "two requests of a client, one after the other"
    assert line["output_tokens_per_s"] == pytest.approx(32 / line["duration_s"])
    assert (line["goodput_share"], line["goodput_per_s"]) == (0, 0), "no first token comes within 90 ms"
    assert line["server"] == {
        "url": server.url,
        "server": "scripted",
        "model": "scripted",
        "max_model_len": 4096,
        "extra_fields": ["ignore_eos", "return_token_ids"],
    }
    assert "clients 4" in said
    assert len(loads(server)) == 8


def test_what_is_sent(tmp_path: Path) -> None:
    with scripted(Script()) as server:
        measure(tmp_path, "--url", server.url, "--concurrency", "3", "--requests", "2", "--prompt-tokens", "20")
    bodies = loads(server)
    assert len(bodies) == 3, "one for each client at least"
    assert len({tuple(body["prompt"]) for body in bodies}) == 3
    for body in bodies:
        assert len(body.pop("prompt")) == 20
        assert body == {
            "model": "scripted",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 128,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


def test_arrivals_wait_for_nobody(tmp_path: Path) -> None:
    with scripted(Script(first=0.5)) as server:
        _, lines = measure(tmp_path, "--url", server.url, "--rates", "40,inf", "--requests", "10")
    assert [line["load"] for line in lines] == ["rate 40", "rate inf"]
    assert all(line["duration_s"] < 3 for line in lines), "five seconds if they came one by one"
    assert server.connections >= 10


def faults(number: int, body: dict[str, Any]) -> Script:
    kinds = [
        Script(status=503, error="busy"),
        Script(error="the engine is gone"),
        Script(has_usage=False),
        Script(has_end=False),
        Script(closes_early=True),
        Script(first=1.0),
    ]
    return kinds[number % 7 - 1] if number % 7 and body["max_tokens"] != 8 else Script()


def test_failures_are_counted_and_end_nothing(tmp_path: Path) -> None:
    with scripted(faults) as server:
        said, (line,) = measure(
            tmp_path, "--url", server.url, "--concurrency", "2", "--requests", "14", "--timeout", "0.5"
        )
    assert (line["completed"], line["failed"], line["requests"]) == (2, 12, 14)
    assert line["failures"] == {
        "HTTP 503: busy": 2,
        "error in the stream: the engine is gone": 2,
        "the stream brought no usage": 2,
        "the stream ended without [DONE]": 2,
        "the connection closed before the answer was whole": 2,
        "no end after 0.5 s": 2,
    }
    assert line["output_tokens"] == 6
    assert "failed 2 times: HTTP 503: busy" in said


def fails_behind_the_first(number: int, body: dict[str, Any]) -> Script:
    return Script() if body["max_tokens"] == 8 else Script(status=503, error="busy")


def test_a_load_without_an_answer_is_a_failure_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    with scripted(fails_behind_the_first) as server:
        result = bench("--json", str(path), "--url", server.url, "--concurrency", "1,2", "--requests", "3")
    assert result.exit_code == 1
    assert [json.loads(line)["completed"] for line in path.read_text().splitlines()] == [0, 0], "both were measured"
    assert result.stderr.startswith("error: no request was answered at "), result.stderr


def test_another_server_in_turn(tmp_path: Path) -> None:
    order: list[str] = []

    def slow(number: int, body: dict[str, Any]) -> Script:
        order.append("A")
        return Script(first=0.08, gap=0.08)

    def fast(number: int, body: dict[str, Any]) -> Script:
        order.append("B")
        return Script(first=0.02, gap=0.02)

    with scripted(slow) as ours, scripted(fast) as theirs:
        words = ["--url", ours.url, "--vs", theirs.url, "--concurrency", "1", "--requests", "2"]
        said, lines = measure(tmp_path, *words)
    assert "".join(order) == "AB" + "AABB" * 2
    assert [body["prompt"] for body in loads(ours)] == [body["prompt"] for body in loads(theirs)]
    assert [line["bench"] for line in lines] == ["serve"] * 4 + ["serve-ratio"]
    ratio = lines[-1]["ratio"]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 1.5 < ratio[name]["mean"] < 4.5
    assert 0.22 < ratio["requests_per_s"] < 0.67
    assert "A/B" in said


def test_a_server_against_itself_gets_other_prompts(tmp_path: Path) -> None:
    with scripted(Script()) as server:
        words = ["--url", server.url, "--vs", server.url + "/v1", "--concurrency", "1", "--requests", "2"]
        measure(tmp_path, *words)
    prompts = [tuple(body["prompt"]) for body in loads(server)]
    assert len(set(prompts)) == len(prompts) == 8


@pytest.mark.parametrize("refused", ["ignore_eos", "return_token_ids"])
def test_a_server_that_refuses_more_than_the_api(tmp_path: Path, refused: str) -> None:
    with scripted(Script(refuses=(refused,), tells_ids=False, gap=0.02, chunks=(2, 2))) as server:
        said, (line,) = measure(tmp_path, "--url", server.url, "--concurrency", "1", "--requests", "1")
    assert f"A refuses {refused}" in said
    assert all(refused not in body for body in loads(server))
    assert line["output_tokens"] == 4
    assert line["itl_ms"]["p50"] < line["tpot_ms"]["p50"] * 1.01


def test_prompts_that_were_cached_are_told(tmp_path: Path) -> None:
    with scripted(Script(cached_tokens=9)) as server:
        said, _ = measure(tmp_path, "--url", server.url, "--concurrency", "1", "--requests", "2")
    assert "18 of 20 prompt tokens were cached" in said


def test_words_are_fitted_to_the_tokens_of_the_server(tmp_path: Path) -> None:
    def three_for_a_word(number: int, body: dict[str, Any]) -> Script:
        return Script(prompt_tokens=10 + 3 * len(body["messages"][0]["content"].split()))

    with scripted(three_for_a_word) as server:
        words = [
            "--url",
            server.url,
            "--api",
            "chat",
            "--prompt-tokens",
            "100",
            "--concurrency",
            "1",
            "--requests",
            "2",
        ]
        _, (line,) = measure(tmp_path, *words)
    assert line["prompt_tokens"] == 200


# ---- one clear line ------------------------------------------------------------------------------------------------


def test_no_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = bench("--url", url)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no server answers at {url}: ")
    assert result.stderr.count("\n") == 1


def test_a_server_that_refuses_everything_is_one_line() -> None:
    with scripted(Script(status=400, error="too long")) as server:
        result = bench("--url", server.url)
    assert result.exit_code == 1
    assert result.stderr == f"error: {server.url} refuses the first request: HTTP 400: too long\n"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with scripted(Script()) as server:
        result = bench("--url", server.url, "--json", str(tmp_path / "nowhere" / "lines.json"))
    assert result.exit_code == 1
    assert "nowhere" in result.stderr
    assert not server.bodies


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "nowhere"],
        ["--concurrency", "0"],
        ["--rates", "fast"],
        ["--goodput", "speed:1"],
        ["--requests", "0"],
        ["--timeout", "0"],
    ],
)
def test_choices_without_meaning_are_refused(words: list[str]) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


# ---- the real thing ------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.metrics()
    words = ["--url", server.origin, "--api-key", server.api_key, "--prompt-tokens", "70", "--output-tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["deltaserve", *words])
    said, (line,) = measure(tmp_path, *words, "--concurrency", "4", "--requests", "6")
    after = server.metrics()
    probe = 70, 8
    assert (line["completed"], line["failed"]) == (6, 0), said
    assert (line["prompt_tokens"], line["output_tokens"]) == (420, 30)
    for name, count, more in (("prompt", 420, probe[0]), ("generated", 30, probe[1])):
        key = f"deltaserve_{name}_tokens_total"
        assert after[key] - before[key] == count + more
    assert line["server"]["version"]
    assert line["server"]["model"] == "builtin"
    assert "--api-key ***" in line["environment"]["command"]


def test_overload_is_counted(server: Server, tmp_path: Path) -> None:
    words = ["--url", server.origin, "--api-key", server.api_key, "--prompt-tokens", "16", "--output-tokens", "40"]
    _, (line,) = measure(tmp_path, *words, "--rates", "inf", "--requests", "12")
    assert line["completed"] + line["failed"] == 12
    assert line["failed"] > 0
    assert all(reason.startswith("HTTP 503") for reason in line["failures"])


def test_a_wrong_key_is_one_line(server: Server) -> None:
    result = bench("--url", server.origin, "--api-key", "wrong")
    assert result.exit_code == 1
    assert "answers HTTP 401" in result.stderr
    assert result.stderr.count("\n") == 1
