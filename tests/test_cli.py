"""The command line: flags equal the configs, errors are one line, and the commands do what they say."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner

import deltaserve
from deltaserve import cli, flags
from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, SamplingParams
from deltaserve.engine.client import EngineLaunch
from deltaserve.engine.llm import LLM
from deltaserve.engine.tokenizer import GenerationDefaults
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.server import lifecycle
from deltaserve.server.config import ServerConfig
from tests.engine.scripted import BUILTIN, ScriptedEngine

ENGINES = ["serve", "generate", "chat", "inspect", "compare"]
COMMANDS = [*ENGINES, "bench"]


def invoke(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, list(words), **options)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "deltaserve.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


# ---- flags ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineLaunch, ServerConfig]]:
    """What `serve` would have started."""
    calls: list[tuple[EngineLaunch, ServerConfig]] = []

    def take(launch: EngineLaunch, server: ServerConfig, announce: Callable[..., None]) -> int:
        calls.append((launch, server))
        return 0

    monkeypatch.setattr(lifecycle, "run", take)
    return calls


def test_without_flags_everything_is_the_default(served: list[tuple[EngineLaunch, ServerConfig]]) -> None:
    assert invoke("serve").exit_code == 0
    assert served == [(EngineLaunch(EngineConfig()), ServerConfig())]


def another(config: type[Any], field: dataclasses.Field[Any]) -> str:
    """A legal value that is not the default."""
    choices = [choice for choice in get_args(get_type_hints(config)[field.name]) if isinstance(choice, str)]
    if choices:
        return next(choice for choice in choices if choice != field.default)
    if isinstance(field.default, str):
        return "::1"
    if field.name == "speculative_synthetic_acceptance":
        return "0.7"
    if field.default in (None, ()):
        return "7"
    default: Any = field.default
    if isinstance(default, bool):
        return str(not default)
    return str(type(default)(default + 7))


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_field_is_a_flag(served: list[tuple[EngineLaunch, ServerConfig]], config: type[Any]) -> None:
    for field in dataclasses.fields(config):
        served.clear()
        flag = "--" + field.name.replace("_", "-")
        words = [flag] if isinstance(field.default, bool) else [flag, another(config, field)]
        result = invoke("serve", *words)
        assert result.exit_code == 0, result.output
        launch, server = served[0]
        made = launch.config if config is EngineConfig else server
        value = getattr(made, field.name)
        assert value != field.default
        assert str(value[0] if isinstance(value, tuple) else value).removesuffix(".0") == another(
            config, field
        ).removesuffix(".0")
        others = {f.name: getattr(made, f.name) for f in dataclasses.fields(config) if f.name != field.name}
        assert others == {f.name: f.default for f in dataclasses.fields(config) if f.name != field.name}


def test_a_flag_that_may_come_several_times(served: list[tuple[EngineLaunch, ServerConfig]]) -> None:
    assert invoke("serve", "--api-key", "a", "--api-key", "b").exit_code == 0
    assert served[0][1].api_key == ("a", "b")


@pytest.mark.parametrize("words", [["some/model"], ["--model", "some/model"], ["some/model", "--model", "some/model"]])
def test_the_model_in_its_place_or_by_its_flag(
    served: list[tuple[EngineLaunch, ServerConfig]], words: list[str]
) -> None:
    assert invoke("serve", *words).exit_code == 0
    assert served[0][0].config.model == "some/model"


def test_two_models_are_one_too_many() -> None:
    result = invoke("serve", "a", "--model", "b")
    assert result.exit_code == 2
    assert result.stderr == "error: model is given twice, as 'a' and as 'b'; give one\n"


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_the_table_has_a_line_for_each_field(config: type[Any]) -> None:
    lines = flags.flag_table(config).splitlines()[2:]
    assert len(lines) == len(dataclasses.fields(config))
    for line, field in zip(lines, dataclasses.fields(config), strict=True):
        assert line.startswith(f"| `--{field.name.replace('_', '-')}` |")
        assert field.metadata["help"] in line
        assert line.count("|") == 5, "a bar in a cell breaks the table"


@pytest.mark.parametrize("command", ENGINES)
def test_help_names_every_flag_of_the_engine(command: str) -> None:
    words = re.sub(r"\x1b\[[0-9;]*m", "", invoke(command, "--help", env={"COLUMNS": "200"}).output)
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')} " in words


def test_the_page_names_the_commands_and_the_flags_of_sampling() -> None:
    page = (BUILTIN.parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)", page, re.MULTILINE) == COMMANDS
    told = set(re.findall(r"`--([\w-]+)`", page.split("## generate and chat")[1].split("\n## ")[0]))
    assert told == {name.replace("_", "-") for name in cli.SAMPLING}
    assert set(cli.SAMPLING) <= set(SamplingParams.__struct_fields__)


def test_help_and_version_are_light() -> None:
    script = "import sys, deltaserve.cli; print(*{'torch', 'transformers', 'fastapi', 'zmq'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == ""
    assert invoke("--version").output == f"deltaserve {deltaserve.__version__}\n"
    listed = invoke("--help").output
    assert all(command in listed for command in COMMANDS)


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--port", "99999"], "port is 99999; it must lie in [0, 65535]"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs is 0; it must be at least 1"),
        (["serve", "--num-threads", "100000"], "num_threads is 100000; it must be at most 1024"),
        (["serve", "--chat-template", "/nowhere/t.jinja"], "chat_template is /nowhere/t.jinja, which cannot be read"),
        (["inspect", "/nowhere/at/all"], "/nowhere/at/all"),
        (["generate", "a", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["generate", "a", "--temperature", "-1"], "temperature is -1.0; it must lie in"),
        (["generate", ""], "the prompt is empty"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_one_line(scripted_llm: LLM, words: list[str], message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_model_that_is_not_there_ends_the_server_with_one_line() -> None:
    result = run("serve", "/nowhere/at/all", "--port", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "/nowhere/at/all" in line


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (ValueError("no"), 2, "error: no"),
        (RuntimeError("no"), 1, "error: no"),
        (OSError("no"), 1, "error: no"),
        (MemoryError(), 1, "error: MemoryError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], failure: BaseException, code: int, words: str) -> None:
    def fail() -> None:
        raise failure

    assert flags.told(fail) == code
    assert capsys.readouterr().err.strip() == words


def test_an_error_of_ours_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        flags.told(lambda: 1 // 0)


# ---- commands without a server -------------------------------------------------------------------------------------


class Terminal(ScriptedEngine):
    """The scripted engine in this process, as LLM wants it; presses Ctrl-C when told to."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, 0.0)
        self.model_config = ModelConfig.from_hf(load_config_json(BUILTIN))
        self.tokenizer_path = BUILTIN
        self.generation_defaults = GenerationDefaults.load(BUILTIN)
        self.interrupt_at: int | None = None
        self.prompts: list[list[int]] = []

    def step(self) -> list[Output]:
        self.prompts += [request.prompt_token_ids for request in self.waiting]
        if self.steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step()


@pytest.fixture
def scripted_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Every command's LLM, around a scripted engine; wrong models are still refused."""
    llm = LLM.over(Terminal(EngineConfig()))

    def load(model: str | None = None, **options: Any) -> LLM:
        return LLM(model) if model is not None else llm

    monkeypatch.setattr("deltaserve.engine.llm.LLM", load)
    return llm


def test_generate_prints_the_answer(scripted_llm: LLM) -> None:
    text = "Mia buys 12 apples. "
    assert invoke("generate", text, "--max-tokens", "200", "--stop", "apples").output == "Mia buys 12 \n"
    assert invoke("generate", "-", "--max-tokens", "200", "--stop", "12", input=text).output == "Mia buys \n"


def test_ctrl_c_stops_generate_and_its_exit_code_says_so(scripted_llm: LLM) -> None:
    engine = scripted_llm.engine
    assert isinstance(engine, Terminal)
    engine.interrupt_at = 3
    result = invoke("generate", "one two three four five six seven", "--max-tokens", "200")
    assert result.output.endswith(" [stopped]\n")
    assert result.exit_code == 130
    assert not engine.has_work(), "the request is gone"


def converse(*lines: str, words: tuple[str, ...] = ()) -> list[str]:
    """What a chat prints after its greeting."""
    result = invoke("chat", *words, input="\n".join(lines))
    assert result.exit_code == 0, result.output
    greeting, *said = result.output.splitlines()
    assert greeting == cli.CHAT_HELP
    return list(said)


def test_a_chat_remembers_until_it_is_told_to_forget(scripted_llm: LLM) -> None:
    engine = scripted_llm.engine
    assert isinstance(engine, Terminal)
    assert converse("Hello", "", "Again", "/reset", "New") == [
        *["user", "Hello"],
        *["user", "Hello"],
        "The conversation is forgotten.",
        *["user", "New"],
    ]
    assert scripted_llm.tokenizer is not None
    first, second, third = (scripted_llm.tokenizer.decode(prompt, False) for prompt in engine.prompts)
    assert second.startswith(first + "user\nHello<|im_end|>")
    assert "Again" in second
    assert "Hello" not in third


def test_a_chat_ends(scripted_llm: LLM) -> None:
    assert converse("/exit", "Hello") == []
    assert converse() == []
    assert converse("/what now") == [f"There is no /what. {cli.CHAT_HELP}"]


def test_ctrl_c_stops_the_answer_and_not_the_program(scripted_llm: LLM) -> None:
    engine = scripted_llm.engine
    assert isinstance(engine, Terminal)
    engine.interrupt_at = 3
    text = "one two three four five six seven"
    said = converse(text, "Hello")
    assert said[1].endswith(" [stopped]")
    assert len(said[1]) < len(text)
    assert said[2] == "user", "the next answer begins"
    assert not engine.has_work(), "the request is gone"


def test_a_conversation_that_has_grown_too_long_goes_on_after_a_reset(scripted_llm: LLM) -> None:
    said = converse("word " * 5000, "/reset", "Hello")
    assert "/reset forgets the conversation" in said[0]
    assert said[-2:] == ["user", "Hello"]


def test_the_real_thing() -> None:
    """A chat with the built-in model, in a process of its own."""
    talk = run("chat", "--temperature", "0", "--num-threads", "1", input="What is 17 * 6?\n")
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.splitlines()[1:] == ["17 * 6 = 102"]


def test_inspect_prints_the_plan() -> None:
    words = invoke("inspect").output
    for part in ("model ", "memory plan", "KV blocks", "state", "requests"):
        assert part in words
