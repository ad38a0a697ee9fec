"""lm_eval against the running server in three modes, beside lm_eval over transformers on the same rows.

Both sides run the same tasks by the same code, so scores, answers and log-likelihoods must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import API_KEY, BUILTIN, HERE
from tests.serving import Server

pytest.importorskip("lm_eval", reason="needs lm_eval: make test-clients")

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("idle")]

CHAT = ("--apply_chat_template", "--fewshot_as_multiturn", "true")
TOLERANCE = 1e-3
"""Of a sum of some forty log-probabilities in float32."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of each task, and each row's own answer."""

    scores: dict[str, dict[str, float]]
    samples: dict[str, dict[int, list[Any]]]
    """By task and row: what the model answered, one entry for each request of the row."""


def evaluate(folder: Path, tasks: str, model: str, model_args: str, *flags: str) -> Evaluation:
    """Run lm_eval as its users do. Raises AssertionError with its words when it fails."""
    command = [sys.executable, "-m", "lm_eval", "run", "--include_path", "tasks", "--tasks", tasks, "--log_samples"]
    command += ["--model", model, "--model_args", model_args, "--output_path", str(folder), *flags]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = os.environ | offline | {"OPENAI_API_KEY": API_KEY}
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    (results,) = folder.rglob("results_*.json")
    samples = {
        file.name.removeprefix("samples_").rsplit("_", 1)[0]: read_samples(file)
        for file in folder.rglob("samples_*.jsonl")
    }
    return Evaluation(json.loads(results.read_text())["results"], samples)


def read_samples(file: Path) -> dict[int, list[Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["doc_id"]: row["resps"] for row in rows}


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if isinstance(value, float)}


@pytest.fixture(scope="module")
def model_name(server: Server) -> str:
    name: str = json.loads(server.get("/v1/models"))["data"][0]["id"]
    return name


@pytest.fixture(scope="module")
def with_transformers(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    args = f"pretrained={BUILTIN},dtype=float32"
    folder = tmp_path_factory.mktemp("transformers")
    return evaluate(folder, "sums_rows,hellaswag_rows", "hf", args, "--device", "cpu", "--batch_size", "1")


def test_completions_of_text(server: Server, model_name: str, with_transformers: Evaluation, tmp_path: Path) -> None:
    """Many at once, prompts as text, no tokenizer on the client's side."""
    args = f"model={model_name},base_url={server.base_url}/completions,tokenizer_backend=None,tokenized_requests=False"
    args += ",num_concurrent=16,max_retries=1,eos_string=<|im_end|>"
    ours = evaluate(tmp_path, "sums_rows", "local-completions", args)
    assert ours.samples["sums_rows"] == with_transformers.samples["sums_rows"]
    assert ours.scores["sums_rows"] == with_transformers.scores["sums_rows"]
    assert ours.scores["sums_rows"]["exact_match,strict-match"] > 0.5


def test_loglikelihood_of_token_ids(
    server: Server, model_name: str, with_transformers: Evaluation, tmp_path: Path
) -> None:
    """Four prompts a request, as lists of ids of different lengths, with echo and logprobs."""
    args = f"model={model_name},base_url={server.base_url}/completions,tokenizer_backend=huggingface"
    args += f",tokenizer={BUILTIN},tokenized_requests=True,max_retries=1"
    ours = evaluate(tmp_path, "hellaswag_rows", "local-completions", args, "--batch_size", "4")
    theirs = with_transformers.samples["hellaswag_rows"]
    assert set(ours.samples["hellaswag_rows"]) == set(theirs)
    for row, endings in ours.samples["hellaswag_rows"].items():
        for (ending,), (expected,) in zip(endings, theirs[row], strict=True):
            assert float(ending[0]) == pytest.approx(float(expected[0]), abs=TOLERANCE)
            assert str(ending[1]) == str(expected[1]), "is it what greedy decoding would say?"
    assert numbers(ours.scores["hellaswag_rows"]) == numbers(with_transformers.scores["hellaswag_rows"])


def test_chat(server: Server, model_name: str, tmp_path: Path) -> None:
    """The shots as turns of a conversation; the server renders the template."""
    args = f"model={model_name},base_url={server.base_url}/chat/completions,max_retries=1,num_concurrent=4"
    ours = evaluate(tmp_path / "ours", "sums_rows", "local-chat-completions", args, *CHAT)
    args = f"pretrained={BUILTIN},dtype=float32"
    theirs = evaluate(tmp_path / "theirs", "sums_rows", "hf", args, "--device", "cpu", "--batch_size", "1", *CHAT)
    assert ours.samples == theirs.samples
    assert ours.scores == theirs.scores
    assert ours.scores["sums_rows"]["exact_match,strict-match"] > 0.5
