"""Drafts on a GPU: a launch waits for nothing, however many it verifies and proposes, and they change no token."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan
from deltaserve.core.request import Request
from deltaserve.engine.engine import Engine
from deltaserve.runner.inputs import Numbers
from deltaserve.runner.runner import Runner
from deltaserve.scheduler.speculation import Speculation
from tests.runner.test_graphs_gpu import requests

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


class Restless(Speculation):
    """Another number of drafts every few steps, none among them."""

    steps = 0

    def choose(self, num_rows: int) -> int:
        self.steps += 1
        return random.Random(self.steps // 4).randrange(self.max_drafts + 1)


def answers(guesses: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens of each request, and how many drafts were right."""
    launch = Runner.launch

    def without_waiting(runner: Runner, plan: Plan) -> Pending:
        if runner.inputs.scored(Numbers.of(plan)):
            return launch(runner, plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(runner, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    config = EngineConfig(
        device="cuda",
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=200,
        speculative_tokens=str(guesses),  # type: ignore[arg-type]
        **settings,
    )
    engine = Engine(config, speculation=Restless(guesses))
    monkeypatch.setattr(Runner, "launch", without_waiting)
    prompts, params = requests(40)
    said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        asked = msgspec.structs.replace(asked, seed=number)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=asked, arrival=0.0))
    while engine.has_work():
        for output in engine.step():
            said[output.request_id] += output.token_ids
    engine.check()
    monkeypatch.undo()
    num_right = engine.stats().accepted_tokens
    engine.close()
    return list(said.values()), num_right


def test_drafts_change_no_token_and_no_launch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = answers(0, monkeypatch)
    for settings in (dict[str, Any](), {"enforce_eager": True}):
        said, num_right = answers(3, monkeypatch, **settings)
        assert said == plain
        assert num_right > 0
