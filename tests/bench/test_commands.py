"""The commands of `deltaserve bench`: their names, their flags, and what they start."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaserve import cli
from deltaserve.bench import multi_turn, serve, steps
from deltaserve.bench.client_config import ClientConfig, LoadConfig, MultiTurnConfig
from deltaserve.config import EngineConfig

COMMANDS = ["decode", "prefill", "steps", "serve", "multi-turn"]


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
