"""The recipes' commands exist with all their flags, run with a small model, and the numbers are those of the plan."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.config import EngineConfig
from deltaserve.runner import blueprint
from tests.markdown import ROOT, examples
from tests.models.factory import fp8_config, write_checkpoint
from tests.serving import serving

RECIPE = ROOT / "recipes" / "qwen3-next.md"
MODEL = re.compile(r"/models/[\w.-]+")


def commands() -> list[list[str]]:
    """The words of every `deltaserve` line, without the program."""
    lines = [line for example in examples(RECIPE.read_text()) for line in example.code.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(".venv/bin/deltaserve ")]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "deltaserve.cli"]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that can be quantised, with a tokenizer and an MTP layer."""
    sizes = {"vocab_size": 2048, "bos_token_id": 2032, "eos_token_id": 2034}
    return write_checkpoint(tmp_path_factory.mktemp("model"), fp8_config(**sizes), tokenizer=True, mtp=True)


def smaller(words: list[str], folder: Path) -> list[str]:
    """The same command with the small checkpoint, and in a small context."""
    words = [str(folder) if MODEL.fullmatch(word) else word for word in words]
    for flag in ("--max-model-len", "--host", "--port"):
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    if "--preset" in words:
        return words
    return [*words, "--num-blocks", "16" if "256" not in words else "256", "--device", "cpu"]


def is_possible(words: list[str]) -> bool:
    """On a small machine: a preset's 75 GiB are not."""
    return "--preset" not in words or "--gpu-memory-gib" in words


def test_every_kind_of_command_is_there() -> None:
    assert {words[0] for words in commands()} == {"inspect", "serve", "generate"}


def test_the_flags_exist() -> None:
    help_of = {name: run([name, "--help"]).stdout for name in ("inspect", "serve", "generate")}
    for name, *words in commands():
        for word in words:
            assert not word.startswith("--") or word in help_of[name], f"deltaserve {name} has no {word}"


@pytest.mark.parametrize("words", [words for words in commands() if words[0] != "serve" and is_possible(words)])
def test_it_runs(words: list[str], folder: Path) -> None:
    outcome = run(smaller(words, folder))
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip()


@pytest.mark.parametrize("words", [words for words in commands() if words[0] == "serve" and "--preset" not in words])
def test_it_serves(words: list[str], folder: Path) -> None:
    with serving(*smaller(words, folder)[1:]) as server:
        assert server.get("/health") is not None
        assert folder.name in server.get("/v1/models")


def test_the_numbers_are_those_of_the_plan() -> None:
    text = RECIPE.read_text()
    fp8 = "qwen3-next-80b-a3b-fp8"
    plain = blueprint.inspect(EngineConfig(preset=fp8), 139)
    with_mtp = blueprint.inspect(EngineConfig(preset=fp8, speculative_tokens="3"), 139)
    narrow = blueprint.inspect(EngineConfig(preset=fp8, speculative_tokens="3", state_dtype="bfloat16"), 139)
    for plan in (plain, with_mtp, narrow):
        for number in (
            *re.findall(r"weights +(\S+ GiB)", plan),
            *re.findall(r"x (\S+ MiB)", plan),
        ):
            assert number in text, f"the recipe does not say {number}"
    (tokens,) = re.findall(r"(\S+) tokens: ", plain)
    ((seqs, snapshots),) = re.findall(r"(\d+) requests of any length and (\d+) snapshots", plain)
    assert f"{tokens} tokens in KV blocks and {int(snapshots) + int(seqs)} states: {seqs} requests" in text
    assert f"{snapshots} snapshots" in text
    with pytest.raises(ValueError, match=r"the weights take 148.47 GiB, but only 139.00 GiB are free"):
        blueprint.inspect(EngineConfig(preset="qwen3-next-80b-a3b"), 139)
    assert "148.47 GiB" in text
