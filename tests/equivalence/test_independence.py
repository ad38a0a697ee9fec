"""What a request says depends on itself alone: not on batch mates, arrival order, pool sizes or the step's budget."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from tests.equivalence.truth import Answer
from tests.models.factory import tiny_config, write_checkpoint

PROMPTS = (1, 2, 63, 64, 65, 130)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("tiny"), tiny_config(num_hidden_layers=2, full_attention_interval=2), seed=11
    )


def make_engine(folder: Path, **settings: Any) -> Engine:
    tokens = settings.pop("max_num_batched_tokens", 256)
    seqs = min(settings.pop("max_num_seqs", 8), tokens)
    return Engine(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            state_dtype="float64",
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            **{"num_blocks": 40, **settings},
        )
    )


def requests() -> list[Request]:
    """Every prompt greedy, and drawn from a seed with everything that looks at the past."""
    draw = random.Random(3)
    drawn = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": 5}
    made = []
    for number, length in enumerate(PROMPTS * 2):
        params: dict[str, Any] = {"temperature": 0.0} if number < len(PROMPTS) else drawn
        made.append(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=draw.choices(range(160), k=length),
                params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1, **params),
                arrival=0.0,
            )
        )
    return made


def run(engine: Engine, batches: Sequence[Sequence[Request]]) -> dict[str, Answer]:
    """Each batch waits for the one before."""
    answers = {request.request_id: Answer(request) for batch in batches for request in batch}
    for batch in batches:
        for request in batch:
            engine.add(request)
        while engine.has_work():
            for output in engine.step():
                answers[output.request_id].add(output)
    return answers


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Answer]:
    return run(make_engine(folder, max_num_seqs=1), [[request] for request in requests()])


def assert_same(answers: dict[str, Answer], alone: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        right = alone[name]
        assert answer.token_ids == right.token_ids, name
        assert len(answer.token_ids) == NUM_TOKENS
        told, expected = ([entry.logprob for entry in one.logprobs] for one in (answer, right))
        torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=0, atol=1e-9)
        told, expected = (
            [entry.logprob for entry in one.prompt_logprobs or () if entry is not None] for one in (answer, right)
        )
        assert len(told) == len(answer.request.prompt_token_ids) - 1
        torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=0, atol=1e-9)


def test_batch_mates_and_arrival_order(folder: Path, alone: dict[str, Answer]) -> None:
    engine = make_engine(folder, max_num_seqs=12)
    together = requests()
    assert_same(run(engine, [together]), alone)
    assert_same(run(engine, [together[::-1]]), alone)
    random.Random(1).shuffle(together)
    assert_same(run(engine, [together[:5], together[5:]]), alone)


@pytest.mark.parametrize("budget", [1, 2, 3, 63, 64, 65, 128])
def test_budget_of_a_step(budget: int, folder: Path, alone: dict[str, Answer]) -> None:
    assert_same(run(make_engine(folder, max_num_batched_tokens=budget, max_num_seqs=3), [requests()]), alone)


@pytest.mark.parametrize("settings", [{"num_blocks": 3}, {"num_blocks": 5}, {"num_blocks": 41, "num_slots": 33}])
def test_pool_sizes(settings: dict[str, int], folder: Path, alone: dict[str, Answer]) -> None:
    engine = make_engine(folder, **settings)
    assert_same(run(engine, [requests()]), alone)
    assert (engine.stats().preemptions > 0) == (settings["num_blocks"] == 3)


def test_seeds_differ_and_the_same_seed_repeats(folder: Path, alone: dict[str, Answer]) -> None:
    tokens = [answer.token_ids for answer in alone.values()]
    assert len({tuple(one) for one in tokens}) == len(tokens)
