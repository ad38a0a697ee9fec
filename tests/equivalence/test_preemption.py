"""A request sent back at any of its tokens goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest

from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from tests.models.factory import tiny_config, write_checkpoint

NUM_TOKENS = 200


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_sent_back_at_every_token(overlap: Literal["off", "on"], tmp_path: Path) -> None:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2)
    folder = write_checkpoint(tmp_path, shape, seed=4)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            state_dtype="float64",
            max_num_seqs=100,
            max_num_batched_tokens=1024,
            num_blocks=400,
            overlap=overlap,
        )
    )
    prompt = random.Random(2).choices(range(160), k=40)
    outputs: dict[str, list[int]] = {}
    for number in (-1, *range(NUM_TOKENS - 1)):
        outputs[str(number)] = []
        # Ten tokens after the one at which it is sent back are enough to see whether it goes on rightly.
        num_tokens = min(number + 11, NUM_TOKENS) if number >= 0 else NUM_TOKENS
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=num_tokens, ignore_eos=True, frequency_penalty=0.1)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, arrival=0.0))
    while engine.has_work():
        for output in engine.step():
            tokens = outputs[output.request_id]
            tokens += output.token_ids
            if len(tokens) - 1 == int(output.request_id):
                assert engine.scheduler.preempt(output.request_id)
                engine.check()
    assert engine.stats().preemptions == NUM_TOKENS - 1
    untouched = outputs.pop("-1")
    assert len(untouched) == NUM_TOKENS
    for name, tokens in outputs.items():
        assert len(tokens) == min(int(name) + 11, NUM_TOKENS)
        assert tokens == untouched[: len(tokens)], f"differs when sent back at token {name}"
