"""The commands of `deltaserve bench`: their names, their flags, and what they start."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaserve import cli
from deltaserve.bench import multi_turn, serve, steps
from deltaserve.bench.client_config import ClientConfig, LoadConfig, MultiTurnConfig
from deltaserve.config import EngineConfig

COMMANDS = ["decode", "prefill", "steps", "ops", "serve", "multi-turn"]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *words], env={"COLUMNS": "250"})


def helped(*words: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", invoke(*words, "--help").output)


def test_help_lists_the_commands() -> None:
    words = helped()
    assert all(re.search(rf"\b{name}\b", words) for name in COMMANDS)


@pytest.mark.parametrize(
    ("command", "config", "other"),
    [
        ("decode", EngineConfig, LoadConfig),
        ("serve", LoadConfig, EngineConfig),
        ("multi-turn", MultiTurnConfig, EngineConfig),
    ],
)
def test_each_has_its_flags_and_no_others(command: str, config: type[Any], other: type[Any]) -> None:
    words = helped(command)
    own, others = ({f"--{f.name.replace('_', '-')} " for f in dataclasses.fields(c)} for c in (config, other))
    assert all(flag in words for flag in own)
    assert not any(flag in words for flag in others - own - {"--json "})


@pytest.mark.parametrize(
    ("command", "decode", "prefill"), [("decode", [2, 4], []), ("prefill", [], [64]), ("steps", [2, 4], [64])]
)
def test_steps_start_with_their_sizes(
    monkeypatch: pytest.MonkeyPatch, command: str, decode: list[int], prefill: list[int]
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(steps, "run", lambda config, **given: calls.append({"config": config, **given}))
    result = invoke(command, "--batches", "2,4", "--lengths", "64", "--max-num-seqs", "7")
    assert result.exit_code == 0, result.output
    assert calls == [{"config": EngineConfig(max_num_seqs=7), "decode": decode, "prefill": prefill, "path": None}]


@pytest.mark.parametrize("flag", ["--batches", "--lengths"])
def test_sizes_without_meaning(flag: str) -> None:
    result = invoke("steps", flag, "1,0")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {flag[2:]} is '1,0'")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--batches", "1,3"],
            "batches has 3, but 2 requests of 641 tokens run at once, which is the largest legal value",
        ),
        (["--max-model-len", "640"], "max_model_len is 640; decode steps are timed up to 641 tokens"),
        (["--lengths", "64,700"], "lengths has 700, but the context of 700 tokens leaves room for 699"),
    ],
)
def test_sizes_beyond_the_engine_are_refused_before_any_is_timed(flags: list[str], words: str) -> None:
    given = ["--batches", "1", "--lengths", "64", "--max-num-seqs", "2", "--max-model-len", "700", *flags]
    result = invoke("steps", *given)
    assert result.exit_code == 2
    assert f"error: {words}" in result.stderr
    assert not result.stdout


def test_a_file_that_cannot_be_written_is_told_before_any_is_timed(tmp_path: Path) -> None:
    result = invoke("steps", "--batches", "1", "--lengths", "64", "--json", str(tmp_path / "none" / "steps.json"))
    assert result.exit_code == 1
    assert "No such file" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it must be a number from 0 on"),
        (["--temperature", "nan"], "temperature is nan; it must be a number from 0 on"),
        (["--url", "http://127.0.0.1:99999"], "url is 'http://127.0.0.1:99999'; it must be like http://127.0.0.1:8000"),
        (["--url", "http://[::1"], "url is 'http://[::1'; it must be like http://127.0.0.1:8000"),
    ],
)
def test_choices_of_a_client_without_meaning(flags: list[str], words: str) -> None:
    result = invoke("serve", *flags)
    assert result.exit_code == 2
    assert result.stderr == f"error: {words}\n"


@pytest.mark.parametrize(
    ("command", "module", "config"), [("serve", serve, LoadConfig), ("multi-turn", multi_turn, MultiTurnConfig)]
)
def test_every_field_of_a_client_is_a_flag(
    monkeypatch: pytest.MonkeyPatch, command: str, module: Any, config: type[ClientConfig]
) -> None:
    calls: list[ClientConfig] = []
    monkeypatch.setattr(module, "run", calls.append)
    for field in dataclasses.fields(config):
        value = {"api": "chat" if field.default == "completions" else "completions", "prompts": "words"}.get(
            field.name, "7"
        )
        result = invoke(command, "--" + field.name.replace("_", "-"), value)
        assert result.exit_code == 0, result.output
        made = dataclasses.asdict(calls.pop())
        assert str(made.pop(field.name)).removesuffix(".0") == value
        assert made == {f.name: f.default for f in dataclasses.fields(config) if f != field}
