"""Plans made while a step is in flight: what they hold, when they are not made, and that nobody is served otherwise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from deltaserve.cache.prefix import NoPrefixIndex
from deltaserve.scheduler import policy
from deltaserve.scheduler.speculation import Speculation
from tests.scheduler.fake import VOCAB, oracle
from tests.scheduler.rig import Rig, prefix_index

DRAFTING: dict[str, Any] = {"num_drafts_for": policy.proposed_drafts, "speculation": Speculation(3, adaptive=False)}


def numbers(n: int) -> list[int]:
    return [i % VOCAB for i in range(n)]


def test_rows_whose_last_token_is_in_flight_chunks_and_newcomers() -> None:
    rig = Rig(overlap=True, max_num_batched_tokens=16)
    rig.add(numbers(5), max_tokens=20)
    long = rig.add(numbers(30), max_tokens=20)
    first = rig.begin()
    rig.add(numbers(3), max_tokens=20)
    second = rig.plan()
    assert first is not None
    assert second is not None
    assert [(row.start, row.num_tokens, row.samples) for row in first.rows] == [(0, 5, True), (0, 8, False)]
    assert [(row.start, row.num_tokens, row.samples) for row in second.rows] == [
        (5, 1, True),
        (8, 12, False),
        (0, 3, True),
    ]
    assert (second.num_decode, len(second.seatings)) == (1, 1)
    rig.launch(second)
    rig.in_flight = first
    rig.commit(first, rig.runner.wait(first.step))
    rig.in_flight = second
    assert rig.answers[long].token_ids == []
    rig.finish()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_last_token_by_length_is_followed_by_no_row(max_tokens: int) -> None:
    rig = Rig(overlap=True)
    rig.add(numbers(9), max_tokens=max_tokens)
    rig.finish()
    assert rig.scheduler.stats().steps == max_tokens


def test_a_prompt_alone_is_followed_by_no_row() -> None:
    rig = Rig(overlap=True)
    rig.add(numbers(9), max_tokens=0, prompt_logprobs=1)
    rig.finish()
    assert rig.scheduler.stats().steps == 1


def test_a_stop_token_costs_one_row_that_says_nothing() -> None:
    rig = Rig(overlap=True)
    name = rig.add(numbers(6), max_tokens=30)
    stop = oracle(rig.requests[name], (), rig.max_len).token_ids[4]
    rig.abort(name)
    name = rig.add(numbers(6), max_tokens=30, stop_token_ids=(stop,))
    rig.finish()
    answer, stats = rig.answers[name], rig.scheduler.stats()
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", stop)
    assert stats.generated_tokens == len(answer.token_ids)
    assert stats.steps == len(answer.token_ids) + 1


def test_a_failed_row_is_followed_by_one_that_says_nothing() -> None:
    rig = Rig(overlap=True, index=prefix_index())
    bad, good = rig.add(numbers(8), max_tokens=20), rig.add([5] * 8, max_tokens=20)
    plan = rig.begin()
    assert plan is not None
    rig.runner.failing.add(plan.rows[0].seat)
    rig.in_flight = plan
    [failed, _] = rig.step()
    assert (failed.request_id, failed.finish_reason) == (bad, "error")
    rig.runner.failing.clear()
    del rig.answers[bad]
    rig.finish()
    rig.compare(good)


def test_a_row_behind_drafts_starts_later_by_those_that_are_accepted() -> None:
    rig = Rig(overlap=True, max_drafts=3, right_drafts=lambda _: 1, **DRAFTING)
    rig.add(numbers(20), max_tokens=61)
    for _ in range(3):
        rig.step()
    first, second = rig.plans[-2].rows[0], rig.plans[-1].rows[0]
    assert (first.start, len(first.later_slots)) == (
        21,
        3,
    )  # behind the first row of four, of which two become the truth
    assert (second.start, second.read_slot, *second.later_slots) == (23, *first.write_slots)
    rig.finish()


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_steps_with_drafts_overlap_and_cost_no_step_but_the_last(right: int) -> None:
    """A request that ends within a row has one row more behind it."""
    steps = []
    for overlap in (False, True):
        rig = Rig(overlap=overlap, max_drafts=3, right_drafts=lambda k: min(k, right), **DRAFTING)
        rig.add(numbers(20), max_tokens=61)
        rig.add(numbers(4), max_tokens=61)
        rig.finish()
        stats = rig.scheduler.stats()
        assert stats.preemptions == 0
        assert stats.generated_tokens == 122
        steps.append(stats.steps)
    assert rig.num_ahead > steps[1] - 4
    assert 0 <= steps[1] - steps[0] <= 1


def test_near_the_longest_context_rows_behind_drafts_wait() -> None:
    """No row may reach beyond it, whatever is accepted."""
    for length in range(30, 39):
        rig = Rig(overlap=True, max_drafts=3, max_model_len=39, **DRAFTING)
        rig.add(numbers(length), max_tokens=None)
        rig.add(numbers(4), max_tokens=30)
        while rig.scheduler.has_work:
            rig.step()
            assert all(r.start + len(r.later_slots) + r.num_tokens <= 39 for r in rig.plans[-1].rows)
        rig.finish()


def test_drafts_that_resume_wait_for_a_token_that_is_known() -> None:
    """Entries of the layer that drafts begin anew at it."""

    class Once(Speculation):
        calls = 0

        def choose(self, num_rows: int) -> int:
            self.calls += 1
            return 0 if self.calls % 5 == 0 else 3

    rig = Rig(overlap=True, max_drafts=3, num_drafts_for=policy.proposed_drafts, speculation=Once(3))
    rig.add(numbers(20), max_tokens=200)
    rig.finish()
    behind = [(a.drafts, b.drafts, bool(b.rows[0].later_slots)) for a, b in pairwise(rig.plans)]
    assert (True, False, True) in behind
    assert (False, True, False) in behind
    assert (False, True, True) not in behind


def test_a_plan_ahead_proposes_drafts() -> None:
    """The second prompt comes while the first one's chunk is in flight."""
    rig = Rig(
        overlap=True,
        max_drafts=3,
        max_num_batched_tokens=16,
        **DRAFTING,
    )
    rig.add(numbers(60), max_tokens=20)
    rig.in_flight = rig.begin()
    rig.add(numbers(4), max_tokens=20)
    rig.step()
    assert [row.num_propose for row in rig.plans[-1].rows] == [0, 3]
    assert rig.num_ahead == 1
    rig.finish()


def test_chunks_of_a_prompt_do_not_wait_for_each_other_where_drafts_are_made() -> None:
    rig = Rig(
        overlap=True,
        max_drafts=3,
        max_num_batched_tokens=16,
        **DRAFTING,
    )
    rig.add(numbers(60), max_tokens=20)
    for _ in range(3):
        rig.step()
    assert rig.num_ahead == 3
    assert not any(row.samples for plan in rig.plans[:3] for row in plan.rows)
    rig.finish()
    assert rig.scheduler.stats().accepted_tokens > 10


def test_a_plan_ahead_takes_memory_from_nobody() -> None:
    """In blocks of one token room runs out at any place."""
    for num_blocks in range(41, 60):
        counts = []
        for overlap in (False, True):
            rig = Rig(num_blocks=num_blocks, block_size=1, max_num_seqs=3, max_num_batched_tokens=16, overlap=overlap)
            for i in range(3):
                rig.add(numbers(4 + i), max_tokens=30)
            rig.finish()
            counts.append(rig.scheduler.stats().preemptions)
        assert counts[1] <= counts[0] + 1
        assert num_blocks > 50 or counts[0] > 0


@pytest.mark.parametrize("n", [2, 4])
def test_answers_to_one_prompt_cost_one_prefill(n: int) -> None:
    costs = []
    for overlap in (False, True):
        rig = Rig(index=prefix_index(), overlap=overlap, max_num_batched_tokens=16, num_slots=30)
        for _ in range(n):
            rig.add(numbers(41), max_tokens=5)
        rig.finish()
        costs.append(rig.scheduler.stats().prefilled_tokens)
    assert costs[0] == costs[1] == 41 + n - 1


def test_a_chat_goes_on_from_its_last_whole_block() -> None:
    saved = []
    for overlap in (False, True):
        rig = Rig(index=prefix_index(), overlap=overlap)
        history = numbers(5)
        for _ in range(6):
            name = rig.add(history, max_tokens=13)
            rig.finish()
            history = history + rig.answers[name].token_ids + [1, 2]
        saved.append(rig.scheduler.stats().cached_tokens)
    assert saved[0] == saved[1] > 0


def test_a_step_in_flight_is_work_though_nobody_waits_for_it() -> None:
    rig = Rig(overlap=True)
    name = rig.add(numbers(6))
    rig.step()
    assert rig.in_flight is not None
    assert rig.abort(name)
    assert rig.scheduler.has_work
    assert rig.step() == []
    assert not rig.scheduler.has_work
    rig.finish()


@pytest.mark.parametrize("with_index", [False, True])
def test_a_request_sent_back_in_flight_loses_the_step_and_says_the_same(with_index: bool) -> None:
    rig = Rig(overlap=True, index=prefix_index() if with_index else NoPrefixIndex)
    name = rig.add(numbers(10), max_tokens=20, logprobs=1)
    for _ in range(3):
        rig.step()
    assert rig.preempt(name)
    assert rig.step() == [], "what was in flight counts no more"
    rig.finish()
