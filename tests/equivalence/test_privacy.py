"""A request on memory that another one used: its logits are those of a fresh engine, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.layers.context import ForwardContext
from deltaserve.runner.model import Model

SECRET = [7 + number % 1500 for number in range(100)]
OTHER = [11, 500, 42]


class Recorder:
    """Keeps all logits that a model gives."""

    mtp = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.logits_seen: list[Tensor] = []

    def __call__(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        return self.model(token_ids_T, context)

    def look_ahead(self, token_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        return self.model.look_ahead(token_ids_T, hidden_TD, context)

    def shortened(self) -> AbstractContextManager[None]:
        return self.model.shortened()

    def logits(self, hidden_ND: Tensor, wide: bool = True) -> Tensor:
        self.logits_seen.append(self.model.logits(hidden_ND, wide).clone())
        return self.logits_seen[-1]


def make_engine() -> tuple[Engine, Recorder]:
    """One slot and just the blocks of the longest sequence: whoever comes next sits where the one before sat."""
    engine = Engine(
        EngineConfig(
            max_num_seqs=1,
            max_num_batched_tokens=32,
            max_model_len=256,
            num_blocks=4,
            num_slots=1,
            speculative_tokens="0",
        )
    )
    assert engine.workers.runner is not None
    recorder = Recorder(engine.workers.runner.model)
    engine.workers.runner.model = recorder
    return engine, recorder


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def steps(engine: Engine, num: int) -> None:
    for _ in range(num):
        engine.step()


def abort_in_the_prompt(engine: Engine) -> None:
    steps(engine, 2)
    assert engine.abort("secret", "disconnect")


def abort_in_the_answer(engine: Engine) -> None:
    steps(engine, 10)
    assert engine.abort("secret", "disconnect")


def send_back_then_finish(engine: Engine) -> None:
    steps(engine, 10)
    assert engine.scheduler.preempt("secret")
    finish(engine)


@pytest.mark.parametrize("end", [finish, abort_in_the_prompt, abort_in_the_answer, send_back_then_finish])
def test_earlier_tenant_leaves_no_trace(end: Callable[[Engine], None]) -> None:
    used, recorder = make_engine()
    used.add(request("secret", SECRET, 30))
    end(used)
    assert not used.has_work()
    recorder.logits_seen.clear()
    fresh, expected = make_engine()
    for engine in (used, fresh):
        engine.add(request("other", OTHER, 20))
        finish(engine)
    assert len(recorder.logits_seen) == len(expected.logits_seen) == 20
    for told, right in zip(recorder.logits_seen, expected.logits_seen, strict=True):
        assert torch.equal(told, right)
