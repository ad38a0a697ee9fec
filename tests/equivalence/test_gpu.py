"""The engine on a GPU says what the engine on a CPU says, token for token. Needs a GPU."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve import LLM, SamplingParams
from tests.equivalence.test_traffic import draw_config
from tests.equivalence.traffic import Traffic
from tests.equivalence.truth import Truth
from tests.equivalence.watch import Watched
from tests.models.factory import BUILTIN

SUMS = Path(__file__).parents[2] / "training/eval/sums.jsonl"
QUESTIONS = [
    "Who are you?",
    "What is 17 * 6?",
    "Mia has 14 marbles and buys 3 bags with 8 marbles each. How many marbles does Mia have now?",
    "Count from 1 to 30.",
]


def answers(device: str, dtype: str, prompts: list[str | list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """With steps of 96 tokens: prompts are cut, and steps mix prompts and decoding."""
    with LLM(device=device, dtype=dtype, max_num_batched_tokens=96, max_num_seqs=8) as llm:
        found = llm.generate(prompts, params, progress=False)
    return [generation.outputs[0].token_ids for generation in found]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gpu_equals_cpu(dtype: str) -> None:
    with LLM(device="cpu", max_num_seqs=1) as llm:
        chats: list[str | list[int]] = [
            llm.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS
        ]
    prompts = chats + [[random.randrange(2000) for _ in range(random.randrange(1, 300))] for _ in range(12)]
    params = [
        SamplingParams(temperature=0.0 if i % 2 == 0 else 0.8, seed=i, top_k=i % 5 * 10, max_tokens=40, ignore_eos=True)
        for i in range(len(prompts))
    ]
    assert answers("cuda", dtype, prompts, params) == answers("cpu", dtype, prompts, params)


def evaluation(rows: list[dict[str, str]], enforce_eager: bool, dtype: str) -> list[str]:
    with LLM(device="cuda", dtype=dtype, max_num_seqs=16, enforce_eager=enforce_eager) as llm:
        chats: list[str | list[int]] = [llm.render_chat([{"role": "user", "content": row["question"]}]) for row in rows]
        params = SamplingParams(temperature=0.0, max_tokens=256)
        return [generation.outputs[0].text for generation in llm.generate(chats, params, progress=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_with_graphs_equals_without(dtype: str) -> None:
    """The held-out sums: the same answers, and as many right as on a CPU, but for three that bf16 may cost."""
    rows = [json.loads(line) for line in SUMS.read_text(encoding="utf-8").splitlines()]
    stored = json.loads(SUMS.with_name("reference.json").read_text(encoding="utf-8"))
    found = evaluation(rows, False, dtype)
    assert found == evaluation(rows, True, dtype)
    result = re.compile(r"#### (\d+)")
    right = [result.findall(text)[:1] == result.findall(row["answer"]) for text, row in zip(found, rows, strict=True)]
    print(sum(right), "of", len(rows))
    assert sum(right) >= stored["accuracy"] * stored["rows"] - (3 if dtype == "bfloat16" else 0)


@pytest.mark.gpu
def test_random_traffic(seed: int) -> None:
    """As tests/equivalence/test_traffic.py, with graphs, and steps that overlap."""
    truth, seen = Truth(BUILTIN), Counter[str]()
    for number in range(4):
        draw = random.Random(f"{seed} {number}")
        config = replace(draw_config(draw, number, None, "float32"), device="cuda", overlap="on")
        watched = Watched(config, draw.choice([float("nan"), 1e3]))
        assert watched.engine.scheduler._apart > 0
        watched.engine.scheduler._apart *= number % 2
        seen += Traffic(watched, truth, draw, greedy_only=True).run(12, tolerance=2e-3)
        watched.engine.close()
    print(dict(sorted(seen.items())))
    assert seen["mixed steps"]
    assert seen["tokens from the cache"]
