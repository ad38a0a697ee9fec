"""A plan in, a result out, with a model whose next token is known: three times the last one, plus one."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.core.plan import Plan, Row, RowResult, Seating
from deltaserve.core.request import SamplingParams
from deltaserve.layers.context import ForwardContext
from deltaserve.runner.memory import Footprint, MemoryPlan, Pools
from deltaserve.runner.runner import LOGITS_BYTES, Runner

VOCAB, BAD = 50, 49
SIZES = Footprint(weights=0, block=0, slot=0)
PLAN = MemoryPlan(SIZES, "cpu", free=0, num_blocks=8, num_slots=8, max_num_seqs=4, max_model_len=128, max_keep=1)


def after(token: int) -> int:
    return (3 * token + 1) % VOCAB


class Threes:
    """Hidden states are the tokens themselves. Token BAD makes its logits NaN."""

    mtp = None

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        return token_ids_T[:, None].float()

    def look_ahead(self, token_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        raise AssertionError("the model has no MTP layer")

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, hidden_ND: Tensor, wide: bool = True) -> Tensor:
        self.asked.append(len(hidden_ND))
        best_N1 = (3 * hidden_ND + 1) % VOCAB
        distance_NV = (torch.arange(VOCAB) - best_N1).abs()
        return (-distance_NV).masked_fill(hidden_ND == BAD, math.nan)


def make_runner(vocab_size: int = VOCAB) -> tuple[Runner, Threes]:
    model = Threes()
    return Runner(model, vocab_size, PLAN, Pools((), (), ()), torch.float32), model


def seating(seat: int, token_ids: list[int], num_prompt: int | None = None, **params: Any) -> Seating:
    sampling = SamplingParams(temperature=0.0, seed=1, **params)
    return Seating(
        seat=seat,
        token_ids=token_ids,
        num_prompt=num_prompt or len(token_ids),
        params=sampling,
        blocks=(seat, seat + 4),
    )


def row(seat: int, start: int, num_tokens: int, samples: bool) -> Row:
    slots = (-1,) * (num_tokens - 1) + (seat,)
    return Row(seat=seat, start=start, num_tokens=num_tokens, samples=samples, write_slots=slots)


def step(
    runner: Runner, rows: list[Row], num_decode: int = 0, seatings: list[Seating] | None = None
) -> list[RowResult]:
    result = runner.step(Plan(step=7, seatings=seatings or [], rows=rows, num_decode=num_decode))
    assert result.step == 7
    return result.rows


def test_tokens_the_scheduler_never_saw_come_from_the_seat() -> None:
    runner, _ = make_runner()
    first = step(runner, [row(2, 0, 3, True)], seatings=[seating(2, [4, 5, 6])])
    assert first == [RowResult(token_ids=[after(6)])]
    assert step(runner, [row(2, 3, 1, True)], 1) == [RowResult(token_ids=[after(after(6))])]


def test_only_what_is_wanted_gets_logits() -> None:
    runner, model = make_runner()
    seatings = [seating(0, [1, 2, 3]), seating(1, list(range(10, 30))), seating(3, [7, 8])]
    rows = [row(0, 0, 3, True), row(1, 0, 12, False), row(3, 0, 2, True)]
    results = step(runner, rows, seatings=seatings)
    assert results == [RowResult(token_ids=[after(3)]), RowResult(), RowResult(token_ids=[after(8)])]
    assert model.asked == [2]
    assert step(runner, [row(0, 3, 1, True), row(1, 12, 5, False)], 1)[0] == RowResult(token_ids=[after(after(3))])
    assert model.asked == [2, 1]
    step(runner, [row(1, 17, 2, False)])
    assert model.asked == [2, 1]


def logprob_of(token: int, last: int) -> float:
    logits = -(torch.arange(VOCAB, dtype=torch.float64) - after(last)).abs()
    return float(logits.log_softmax(0)[token])


@pytest.mark.parametrize("chunks", [[20], [7, 13], [1] * 20, [19, 1]])
@pytest.mark.parametrize("slice_len", [1000, 6, 1])
def test_prompt_logprobs_in_any_chunks_and_slices(chunks: list[int], slice_len: int) -> None:
    runner, model = make_runner()
    runner.slice_len = slice_len
    prompt = [(7 * i) % 40 for i in range(20)]
    seatings, told, start = [seating(1, prompt, prompt_logprobs=2)], [], 0
    for chunk in chunks:
        last = start + chunk == 20
        [result] = step(runner, [row(1, start, chunk, last)], seatings=seatings)
        told += result.prompt_logprobs or []
        assert result.token_ids == ([after(prompt[-1])] if last else [])
        seatings, start = [], start + chunk
    assert max(model.asked) <= slice_len
    assert [entry.token_id for entry in told] == prompt[1:]
    for entry, token, last_token in zip(told, prompt[1:], prompt, strict=False):
        assert entry.logprob == pytest.approx(logprob_of(token, last_token), abs=1e-5)
        assert entry.top_ids[0] == after(last_token)
        assert len(entry.top_ids) == 2
    [decoded] = step(runner, [row(1, 20, 1, True)], 1)
    assert decoded.prompt_logprobs is None


def test_output_of_a_request_sent_back_is_no_prompt() -> None:
    runner, _ = make_runner()
    [result] = step(runner, [row(0, 0, 6, True)], seatings=[seating(0, [1, 2, 3, 4, 5, 6], 4, prompt_logprobs=0)])
    assert [entry.token_id for entry in result.prompt_logprobs or []] == [2, 3, 4]


def test_logits_of_a_long_prompt_stay_small() -> None:
    runner, _ = make_runner(vocab_size=151936)
    assert runner.slice_len >= 64
    assert runner.slice_len * 151936 * 4 <= LOGITS_BYTES


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    runner, _ = make_runner()
    seatings = [seating(0, [1, BAD]), seating(1, [1, 2]), seating(2, [BAD, 2], prompt_logprobs=0), seating(3, [BAD, 2])]
    rows = [row(seat, 0, 2, True) for seat in range(4)]
    ends, good, scored, before = step(runner, rows, seatings=seatings)
    assert "not finite" in (ends.error or "")
    assert ends.token_ids == []
    assert "not finite" in (scored.error or "")
    assert good == before == RowResult(token_ids=[after(2)])
