"""Steps of fixed shapes say what steps of any shape say; padding leaves no trace. On a CPU nothing is recorded, and the
same tensors at fixed places are read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan, Row, Seating
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.engine.workers import Workers
from deltaserve.runner import setup
from deltaserve.runner.graphs import StepGraphs, row_counts
from deltaserve.runner.inputs import Numbers


def test_row_counts() -> None:
    assert row_counts(1) == [1]
    assert row_counts(6) == [1, 2, 3, 4, 5, 6]
    assert row_counts(40) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    assert row_counts(37)[-2:] == [32, 37]


def with_graphs(engine: Engine, apart: bool = False) -> StepGraphs:
    """As on a GPU. `apart`: with steps of one kind, too."""
    runner = engine.workers.runner
    assert runner is not None
    graphs = setup._graphs(engine.blueprint, runner)
    graphs.record(progress=False)
    runner.use_graphs(graphs)
    engine.scheduler._apart = graphs.prompt_rows - 1 if apart else 0
    return graphs


def run(graphs: bool, apart: bool = False, **config: Any) -> dict[str, list[int]]:
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=7, max_num_batched_tokens=64, **config))
    replays: list[object] = []
    if graphs:
        recorded = with_graphs(engine, apart)
        inner = recorded.run
        recorded.run = lambda numbers: replays.append(found := inner(numbers)) or found  # type: ignore[method-assign, func-returns-value]
    draw, longest = random.Random(3), min(150, engine.max_model_len - 40)
    for number in range(12):
        prompt = [draw.randrange(2000) for _ in range(draw.randrange(1, longest))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.9]),
            seed=number,
            max_tokens=draw.randrange(1, 40),
            ignore_eos=True,
            repetition_penalty=draw.choice([1.0, 1.2]),
            logprobs=draw.choice([None, 2]),
        )
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, arrival=0.0))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check()
    engine.close()
    assert not graphs or sum(found is not None for found in replays) > 10
    assert not apart or all(found is not None for found in replays)
    return tokens


def test_a_step_of_decoding_sends_as_much_as_its_rows_need() -> None:
    """However many tokens of prompts another step may hold: copies are sent whole, and each step waits for its own."""
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=7, max_num_batched_tokens=2048, speculative_tokens="0"))
    assert engine.workers.runner is not None
    graphs = setup._graphs(engine.blueprint, engine.workers.runner)
    assert len(graphs.columns.buffer) < 11 * (7 + 1)
    engine.close()


@pytest.mark.parametrize("speculative_tokens", ["0", "2"])
@pytest.mark.parametrize("more", [{}, {"max_model_len": 56}], ids=["", "contexts shorter than a step"])
def test_fixed_shapes_say_the_same(speculative_tokens: str, more: dict[str, Any]) -> None:
    config: dict[str, Any] = {"speculative_tokens": speculative_tokens, "dtype": "float64"} | more
    expected = run(False, **config)
    assert run(True, **config) == expected
    assert run(True, apart=True, **config) == expected


def test_prompts_together_may_be_longer_than_a_context() -> None:
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=3, max_num_batched_tokens=96, max_model_len=64))
    graphs, num = with_graphs(engine), np.array([40, 40, 10])
    zeros, starts = np.zeros(3, dtype=np.int64), np.concatenate(([0], num.cumsum()))
    numbers = Numbers(np.arange(3), zeros, num, zeros, zeros - 1, np.full(90, -1), starts, np.arange(3), 0)
    assert graphs._shape_of(numbers) is not None
    engine.close()


def test_where_there_are_graphs_steps_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "most_prompts", 3)
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=64))
    assert engine.scheduler._apart == 3
    engine.close()
    monkeypatch.undo()
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=64))
    assert engine.workers.most_prompts == 0
    with_graphs(engine)
    assert engine.workers.most_prompts == 4
    engine.close()


def test_padding_writes_nothing() -> None:
    """One row in a graph of five: only its slot and its place in its block change."""
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=5, speculative_tokens="0"), fill=float("nan"))
    graphs, runner = with_graphs(engine), engine.workers.runner
    assert runner is not None
    graphs.rows = [5]
    params = SamplingParams(temperature=0.0, seed=0)
    seating = Seating(seat=2, token_ids=[5, 6, 7], num_prompt=3, params=params, blocks=(9,))
    prefill = Row(seat=2, start=0, num_tokens=3, samples=True, write_slots=(-1, -1, 4))
    runner.step(Plan(step=0, seatings=[seating], rows=[prefill], num_decode=0))
    pools = (*runner.pools.kv, *runner.pools.per_slot)
    before = [pool.clone() for pool in pools]
    row = Row(seat=2, start=3, num_tokens=1, samples=True, read_slot=4, write_slots=(6,))
    result = runner.step(Plan(step=1, rows=[row], num_decode=1))
    assert len(result.rows[0].token_ids) == 1
    for number, (old, new) in enumerate(zip(before, pools, strict=True)):
        changed = ~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)
        where = changed.nonzero()
        if number < len(runner.pools.kv):
            assert {(int(i[1]), int(i[2])) for i in where} == {(9, 3)}
        else:
            assert {int(i[0]) for i in where} == {6}
    engine.close()


@pytest.mark.parametrize("length", [1, 32, 40, 63, 64])
def test_padding_of_a_prompt_is_told_from_its_tokens(length: int) -> None:
    """By the place of a key, where the layout says so; a step of extending rows does without."""
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=5, max_num_batched_tokens=64, speculative_tokens="0"))
    graphs, runner = with_graphs(engine), engine.workers.runner
    assert runner is not None
    seen: list[tuple[bool, list[int]]] = []
    model: Any = graphs.model

    def watched(token_ids: Any, context: Any) -> Any:
        seen.append((context.layout.is_padded, context.layout.kv_index.tolist()))
        return model(token_ids, context)

    graphs.model = watched  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, seed=0)
    seating = Seating(seat=0, token_ids=[5] * length, num_prompt=length, params=params, blocks=(1, 2))
    prefill = Row(seat=0, start=0, num_tokens=length, samples=True, write_slots=(*[-1] * (length - 1), 4))
    runner.step(Plan(step=0, seatings=[seating], rows=[prefill], num_decode=0))
    row = Row(seat=0, start=length, num_tokens=1, samples=True, read_slot=4, write_slots=(6,))
    runner.step(Plan(step=1, rows=[row], num_decode=1))
    (prompt_is_padded, places), (step_is_padded, _) = seen
    assert prompt_is_padded
    assert not step_is_padded
    assert [place >= 0 for place in places] == [token < length for token in range(len(places))]
    engine.close()


def test_a_seat_that_changes_hands_keeps_none_of_its_blocks() -> None:
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=2, max_num_batched_tokens=64, speculative_tokens="0"))
    graphs, runner = with_graphs(engine), engine.workers.runner
    assert runner is not None
    for blocks in ((7, 8, 9), (5,)):
        params = SamplingParams(temperature=0.0, seed=0)
        runner.seats.seat(Seating(seat=1, token_ids=[1], num_prompt=1, params=params, blocks=blocks))
        graphs._copy_blocks(np.array([1]))
        assert graphs.block_table[1, :4].tolist() == [*blocks, -1, -1, -1][:4]
    runner.seats.append_blocks(1, (6,))
    graphs._copy_blocks(np.array([1]))
    assert graphs.block_table[1, :4].tolist() == [5, 6, -1, -1]
    engine.close()


def test_rows_that_do_not_fit_run_as_they_are() -> None:
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=2, speculative_tokens="0"))
    graphs, runner = with_graphs(engine), engine.workers.runner
    assert runner is not None
    params = SamplingParams(temperature=0.0, seed=0)
    seating = Seating(seat=0, token_ids=[5, 6, 7], num_prompt=3, params=params, blocks=(1,))
    row = Row(seat=0, start=0, num_tokens=3, samples=True, write_slots=(-1, -1, 0))
    result = runner.step(Plan(step=0, seatings=[seating], rows=[row], num_decode=0))
    assert graphs.run(Numbers.of(Plan(step=1, rows=[row, row], num_decode=1))) is None
    assert graphs.run(Numbers.of(Plan(step=1, rows=[row, row, row], num_decode=0))) is None  # more than there are seats
    assert runner.inputs.recent[:, 0].tolist() == [result.rows[0].token_ids[0], 0, 0]
    engine.close()
