"""Graphs on a GPU: they say what eager steps say, padding leaves no trace, and nothing compiles once it serves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deltaserve import LLM, SamplingParams
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan, Row, Seating
from deltaserve.engine.engine import Engine
from deltaserve.runner.columns import COPIES, Feed
from deltaserve.runner.inputs import Numbers, Seats

pytestmark = pytest.mark.gpu


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of odd lengths, and every stage of sampling."""
    draw = random.Random(11)
    prompts = [[draw.randrange(2000) for _ in range(draw.choice([1, 3, 17, 64, 65, 130, 300]))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.0, 0.8]),
            seed=number,
            top_k=draw.choice([0, 20]),
            top_p=draw.choice([1.0, 0.9]),
            min_p=draw.choice([0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.1]),
            frequency_penalty=draw.choice([0.0, 0.2]),
            logit_bias=draw.choice([{}, {5: 2.0}]),
            min_tokens=draw.choice([0, 3]),
            logprobs=draw.choice([None, 3]),
            max_tokens=draw.randrange(3, 50),
            ignore_eos=draw.random() < 0.5,
        )
        for number in range(count)
    ]
    return prompts, params


def tokens_of(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[list[int]]:
    return [generation.outputs[0].token_ids for generation in llm.generate(prompts, params, progress=False)]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are looked up in the cache or compiled inside."""
    from triton import knobs

    seen: list[str] = []
    before = knobs.runtime.jit_cache_hook

    def note(**about: Any) -> bool:
        seen.append(about["repr"])
        return False  # and go on

    knobs.runtime.jit_cache_hook = note
    try:
        yield seen
    finally:
        knobs.runtime.jit_cache_hook = before


@pytest.mark.parametrize("speculative_tokens", ["0", "3"])
def test_graphs_equal_eager_and_nothing_compiles(speculative_tokens: str) -> None:
    prompts, params = requests(40)
    config: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 200,
        "speculative_tokens": speculative_tokens,
    }
    with LLM(**config) as llm, compilations() as compiled:
        with_graphs = tokens_of(llm, prompts, params)
        assert compiled == []
    with LLM(**config, enforce_eager=True) as llm, compilations() as compiled:
        eager = tokens_of(llm, prompts, params)
        assert compiled == []
    assert with_graphs == eager


def test_padding_writes_nothing() -> None:
    config = EngineConfig(
        device="cuda", dtype="float32", max_num_seqs=5, num_blocks=64, num_slots=16, speculative_tokens="0"
    )
    engine = Engine(config, fill=float("nan"))
    runner = engine.workers.runner
    assert runner is not None
    assert runner.graphs is not None
    runner.graphs.rows = [5]
    params = SamplingParams(temperature=0.0, seed=0)
    seating = Seating(seat=2, token_ids=[5, 6, 7], num_prompt=3, params=params, blocks=(9,))
    prefill = Row(seat=2, start=0, num_tokens=3, samples=True, write_slots=(-1, -1, 4))
    runner.step(Plan(step=0, seatings=[seating], rows=[prefill], num_decode=0))
    pools = (*runner.pools.kv, *runner.pools.per_slot)
    before = [pool.clone() for pool in pools]
    row = Row(seat=2, start=3, num_tokens=1, samples=True, read_slot=4, write_slots=(6,))
    runner.step(Plan(step=1, rows=[row], num_decode=1))
    torch.cuda.synchronize()
    for number, (old, new) in enumerate(zip(before, pools, strict=True)):
        where = (~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)).nonzero()
        if number < len(runner.pools.kv):
            assert {(int(i[1]), int(i[2])) for i in where} == {(9, 3)}
        else:
            assert {int(i[0]) for i in where} == {6}
    engine.close()


def test_no_buffer_is_filled_again_before_it_is_copied() -> None:
    """However many are sent before the device takes the first."""
    seats, device = Seats(1, 64), torch.device("cuda")
    seats.block_table[0] = 0
    feed, sent = Feed(seats, 2, 65, 1, device), []
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    for token in range(3 * COPIES):
        seats.token_ids[0] = token
        row = Row(seat=0, start=0, num_tokens=64, samples=False, write_slots=(-1,) * 64)
        feed.send(Numbers.of(Plan(step=token, rows=[row], num_decode=0)), 2, 65)
        sent.append(feed.columns.token[:64].clone())
    assert [set(tokens.tolist()) for tokens in sent] == [{token} for token in range(3 * COPIES)]


def test_a_step_that_samples_nothing_is_waited_for() -> None:
    """Or chunks of a long prompt would be launched without end, and a request that comes would stand behind them."""
    engine = Engine(
        EngineConfig(
            device="cuda", dtype="float32", max_num_seqs=2, num_blocks=64, speculative_tokens="0", enforce_eager=True
        )
    )
    runner = engine.workers.runner
    assert runner is not None
    params = SamplingParams(temperature=0.0, seed=0)
    seating = Seating(seat=0, token_ids=[5, 6, 7, 8], num_prompt=4, params=params, blocks=(1,))
    row = Row(seat=0, start=0, num_tokens=3, samples=False, write_slots=(-1, -1, 0))
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    pending = runner.launch(Plan(step=0, seatings=[seating], rows=[row], num_decode=0))
    assert not torch.cuda.current_stream().query()
    pending.result()
    assert torch.cuda.current_stream().query()
    engine.close()
