"""One request after the other: what is refused, how plans look, how requests end, what the counters say."""

from __future__ import annotations

import msgspec
import pytest

from deltaserve.cache.manager import CacheManager
from deltaserve.core.plan import Plan, Result, RowResult
from deltaserve.core.request import Request, SamplingParams
from deltaserve.scheduler.scheduler import Scheduler
from tests.scheduler.fake import VOCAB, oracle
from tests.scheduler.rig import EOS, Rig, prefix_index


def numbers(n: int) -> list[int]:
    return [i % VOCAB for i in range(n)]


def sampled(rig: Rig, n: int, count: int) -> list[int]:
    """The tokens that follow a prompt of `n`."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    request = Request(request_id="oracle", prompt_token_ids=numbers(n), params=params, arrival=0.0)
    return oracle(request, EOS, rig.max_len).token_ids


# ---- add -----------------------------------------------------------------------------------------------------------


def test_what_could_never_run_is_refused() -> None:
    rig = Rig(num_blocks=4, block_size=8, max_model_len=20)
    for n, complaint in ((0, "no tokens"), (20, "20 tokens; at most 19 fit max_model_len 20")):
        with pytest.raises(ValueError, match=complaint):
            rig.add(numbers(n))
    rig.add(numbers(19))
    small = Rig(num_blocks=2, block_size=8)
    with pytest.raises(ValueError, match=r"16 tokens and the cache holds 16.*num_blocks"):
        small.add(numbers(16))
    small.add(numbers(16), max_tokens=0, prompt_logprobs=0)
    small.add(numbers(15))
    for each in (rig, small):
        each.finish()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    rig = Rig()
    name = rig.add(numbers(5))
    with pytest.raises(ValueError, match="'r0' is in use"):
        rig.scheduler.add(rig.requests[name])
    rig.finish()
    rig.scheduler.add(rig.requests[name])


def test_a_step_holds_one_token_of_each_request() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3, below max_num_seqs 4"):
        Scheduler(CacheManager(8, 8), 4, 3, 100, EOS)


def test_seatings_tell_seed_and_all_stop_ids() -> None:
    rig = Rig()
    rig.add(numbers(3), stop_token_ids=(7, 3), ignore_eos=False)
    rig.add(numbers(3), stop_token_ids=(7, 3), ignore_eos=True, seed=5)
    plan = rig.plan()
    assert plan is not None
    one, two = plan.seatings
    assert (one.params.stop_token_ids, two.params.stop_token_ids) == ((3, 7, 49), (3, 7))
    assert one.params.seed is not None
    assert two.params.seed == 5
    assert {one.seat, two.seat} == {row.seat for row in plan.rows}


def test_requests_without_a_seed_get_different_ones() -> None:
    rig = Rig()
    for _ in range(3):
        rig.add(numbers(3))
    plan = rig.plan()
    assert plan is not None
    assert len({seating.params.seed for seating in plan.seatings}) == 3


# ---- plan ----------------------------------------------------------------------------------------------------------


def test_decode_rows_first_then_prefill_rows() -> None:
    rig = Rig(max_num_batched_tokens=16)
    for _ in range(2):
        rig.add(numbers(6), max_tokens=20)
    rig.step()
    rig.add(numbers(40))
    rig.add(numbers(4))
    plan = rig.plan()
    assert plan is not None
    assert [(row.num_tokens, row.samples) for row in plan.rows[: plan.num_decode]] == [(1, True), (1, True)]
    assert [(row.num_tokens, row.samples) for row in plan.rows[plan.num_decode :]] == [(10, False), (4, True)]


def test_nothing_to_do_is_no_plan() -> None:
    rig = Rig()
    assert rig.scheduler.plan() is None
    rig.add(numbers(3), max_tokens=1)
    rig.finish()
    assert rig.scheduler.plan() is None


def test_a_prompt_that_ends_in_one_token_is_a_prefill_row() -> None:
    rig = Rig(max_num_batched_tokens=8, block_size=8, max_drafts=2)
    rig.add(numbers(9))
    rig.step()
    plan = rig.plan()
    assert plan is not None
    assert (plan.num_decode, plan.rows[0].num_tokens, plan.rows[0].num_drafts) == (0, 1, 0)
    rig.commit(plan, rig.compute(plan))
    rig.finish()


def test_two_plans_are_in_flight_at_most_and_committed_in_their_order() -> None:
    rig = Rig()
    rig.add(numbers(3))
    first, second = rig.plan(), rig.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match=r"steps \[0, 1\] are planned and not committed"):
        rig.scheduler.plan()
    with pytest.raises(AssertionError, match="step 1 is committed before those in front of it"):
        rig.scheduler.commit(second, Result(step=1, rows=[]))
    with pytest.raises(AssertionError, match="0 results for 1 rows"):
        rig.scheduler.commit(first, Result(step=0, rows=[]))
    with pytest.raises(AssertionError, match="step 0 is not in flight"):
        rig.scheduler.commit(first, Result(step=0, rows=[]))


@pytest.mark.parametrize(
    "result",
    [RowResult(), RowResult(token_ids=[1, 2])],
    ids=["no token where one is due", "more tokens than drafts and one"],
)
def test_a_result_that_does_not_fit_its_row_is_told(result: RowResult) -> None:
    rig = Rig()
    rig.add(numbers(3))
    plan = rig.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="a row gives"):
        rig.scheduler.commit(plan, Result(step=0, rows=[result]))


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 63, 64, 65, 100, 128, 199, 200])
def test_chunks_of_any_size_give_the_same(budget: int) -> None:
    rig = Rig(num_blocks=8, block_size=64, max_num_seqs=1, max_num_batched_tokens=budget)
    rig.add(numbers(200), max_tokens=3, prompt_logprobs=0, logprobs=0)
    rig.finish()
    assert rig.scheduler.stats().steps == -(-200 // budget) + 2


def test_every_split_of_a_prompt_gives_the_same() -> None:
    for split in range(1, 200):
        rig = Rig(num_blocks=8, block_size=64, max_num_seqs=2, max_num_batched_tokens=200)
        other = rig.add([7] * (200 - split), max_tokens=1)  # leaves `split` tokens of the first step
        rig.add(numbers(200), max_tokens=2, prompt_logprobs=0)
        rig.step()
        rig.abort(other)
        rig.finish()


# ---- how requests end ----------------------------------------------------------------------------------------------


def test_max_tokens_and_the_context_end_by_length() -> None:
    rig = Rig(max_model_len=30)
    for max_tokens in (1, 5, 24, 25, 26, None):
        rig.add(numbers(6), max_tokens=max_tokens)
    rig.finish()
    assert [len(a.token_ids) for a in rig.answers.values()] == [1, 5, 24, 24, 24, 24]
    assert {a.finish_reason for a in rig.answers.values()} == {"length"}


def test_the_pool_is_a_context_too() -> None:
    rig = Rig(num_blocks=3, block_size=8)
    rig.add(numbers(6), max_tokens=None)
    rig.finish()
    assert len(rig.answers["r0"].token_ids) == 18


def test_a_stop_id_is_kept_and_named() -> None:
    rig = Rig()
    stop = sampled(rig, 6, 3)[2]
    rig.add(numbers(6), stop_token_ids=(stop,))
    rig.finish()
    answer = rig.answers["r0"]
    assert (answer.finish_reason, answer.stop_token_id, answer.token_ids[-1]) == ("stop", stop, stop)


def test_no_stop_before_min_tokens() -> None:
    rig = Rig()
    tokens = sampled(rig, 6, 8)
    first = tokens.index(tokens[2]) + 1
    for min_tokens in (first - 1, first):
        rig.add(numbers(6), stop_token_ids=(tokens[2],), min_tokens=min_tokens)
    rig.finish()
    lengths = [len(a.token_ids) for a in rig.answers.values()]
    assert lengths[0] == first < lengths[1]


def test_end_of_text_ends_unless_ignored() -> None:
    rig = Rig(max_model_len=400)
    rig.add(numbers(6), max_tokens=None, ignore_eos=False)
    rig.add(numbers(6), max_tokens=None, ignore_eos=True)
    rig.finish()
    one, two = rig.answers.values()
    assert (one.finish_reason, one.stop_token_id) == ("stop", EOS[0])
    assert (two.finish_reason, len(two.token_ids)) == ("length", 394)


def test_logits_that_are_not_finite_end_one_request_and_withdraw_its_prefix() -> None:
    rig = Rig(index=prefix_index(), max_num_batched_tokens=16)
    bad, good = rig.add(numbers(20)), rig.add([5] * 20)
    rig.step()
    assert rig.cache.usage().blocks_used > 0
    rig.runner.failing.add(next(s.seat for s in rig.scheduler._lines.running if s.request_id == bad))
    outputs = [output for _ in range(3) for output in rig.step()]
    failed = next(output for output in outputs if output.request_id == bad)
    assert (failed.finish_reason, failed.error, failed.token_ids) == ("error", "the logits are not finite", [])
    rig.runner.failing.clear()
    del rig.answers[bad]
    rig.finish()
    rig.compare(good)
    again = rig.add(numbers(20))
    rig.finish()
    assert rig.cached[again] == 0
    assert rig.scheduler.stats().finished == {"error": 1, "length": 2}


# ---- prompt logprobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 8, 9, 33])
def test_prompt_logprobs_come_whole_and_once(n: int, max_tokens: int) -> None:
    rig = Rig(index=prefix_index(), max_num_batched_tokens=8)
    rig.add(numbers(n), max_tokens=2)
    rig.finish()
    name = rig.add(numbers(n), max_tokens=max_tokens, prompt_logprobs=2, logprobs=0)
    rig.finish()
    scores = rig.answers[name].prompt_logprobs
    assert scores is not None
    assert (len(scores), scores[0], rig.cached[name]) == (n, None, 0), "a prompt with logprobs is computed whole"
    assert rig.answers[name].finish_reason == "length"


def test_prompt_logprobs_survive_preemption() -> None:
    for steps in range(8):
        rig = Rig(index=prefix_index(), max_num_batched_tokens=8)
        name = rig.add(numbers(20), max_tokens=6, prompt_logprobs=0)
        for _ in range(steps):
            rig.step()
        assert rig.preempt(name) == (steps > 0)
        spoken = bool(rig.answers[name].token_ids)
        plan = rig.plan()
        assert plan is not None
        asked = plan.seatings[0].params.prompt_logprobs
        assert (asked is None) == spoken, "logprobs that are out are not asked for again"
        assert (plan.rows[0].start > 0) == spoken, "and the prefix may be reused then"
        rig.commit(plan, rig.compute(plan))
        rig.finish()


# ---- drafts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "right"), [(k, a) for k in range(5) for a in range(k + 1)])
def test_right_drafts_save_steps_and_change_nothing(k: int, right: int) -> None:
    rig = Rig(max_drafts=k, right_drafts=lambda num: min(right, num))
    rig.add(numbers(9), max_tokens=61, logprobs=1)
    rig.finish()
    stats = rig.scheduler.stats()
    assert stats.steps == 1 + -(-60 // (right + 1))
    assert stats.generated_tokens == 61
    if right < k:
        assert 0 < stats.accepted_tokens < stats.draft_tokens or right == 0
    else:
        assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("position", range(8))
def test_tokens_behind_a_stop_are_dropped_with_their_logprobs(position: int) -> None:
    rig = Rig(max_drafts=4)
    tokens = sampled(rig, 9, 8)
    rig.add(numbers(9), max_tokens=8, stop_token_ids=(tokens[position],), logprobs=0)
    rig.finish()
    answer = rig.answers["r0"]
    assert answer.token_ids == tokens[: tokens.index(tokens[position]) + 1]
    assert len(answer.logprobs) == len(answer.token_ids)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_drafts_never_pass_the_last_token(max_tokens: int) -> None:
    rig = Rig(max_drafts=4, num_blocks=3, block_size=8, max_model_len=20)
    rig.add(numbers(9), max_tokens=max_tokens)
    rig.finish()
    assert max(row.start + row.num_tokens for plan in rig.plans for row in plan.rows) <= 9 + max_tokens - 1 or (
        max_tokens == 1
    )


def test_drafts_leave_prompts_their_half() -> None:
    rig = Rig(max_drafts=4, max_num_batched_tokens=12, num_slots=40)
    rig.add(numbers(4), max_tokens=200)
    rig.add(numbers(4), max_tokens=200)
    rig.step()
    rig.add(numbers(100))
    for _ in range(5):
        plan = rig.plan()
        assert plan is not None
        assert sum(row.num_drafts for row in plan.rows) == 4  # of 12 tokens: 2 that extend, 6 for prompts
        rig.commit(plan, rig.compute(plan))


def test_drafts_are_given_up_before_a_request_is() -> None:
    """Two grow side by side in eight blocks, and at some tokens only one of them has room for drafts."""
    rig = Rig(max_drafts=4, right_drafts=lambda k: 0, num_blocks=8, block_size=4, num_slots=10, max_num_seqs=2)
    rig.add([1], max_tokens=16)
    rig.add([2], max_tokens=10)
    rig.finish()
    drafts = [[row.num_drafts for row in plan.rows] for plan in rig.plans]
    assert any(len(numbers) == 2 and min(numbers) == 0 < max(numbers) for numbers in drafts)
    assert rig.scheduler.stats().preemptions == 0


# ---- what the counters say -----------------------------------------------------------------------------------------


def test_counters() -> None:
    rig = Rig(index=prefix_index(), max_num_batched_tokens=16, max_num_seqs=1)
    rig.add(numbers(20), max_tokens=3)
    rig.add(numbers(20), max_tokens=3)
    third = rig.add(numbers(20))
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.steps, stats.prefilled_tokens) == (1, 2, 1, 16)
    assert (stats.cache.blocks_used, stats.cache.blocks_total) == (2, 64)
    assert stats.cache.slots_used >= 1
    assert rig.abort(third, "disconnect")
    assert not rig.abort(third, "disconnect")
    assert not rig.abort("nobody", "disconnect")
    rig.finish()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.cache.blocks_used, stats.cache.slots_used) == (0, 0, 0, 0)
    assert (stats.prefilled_tokens, stats.cached_tokens, stats.generated_tokens) == (24, 16, 6)
    assert (stats.finished, stats.aborts) == ({"length": 2}, {"disconnect": 1})
    assert rig.cached == {"r0": 0, "r1": 16}


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A request that resumes from what it computed itself, before it was sent back, has saved nothing."""
    rig = Rig(index=prefix_index(), max_num_batched_tokens=16)
    name = rig.add(numbers(40))
    rig.step()
    assert rig.preempt(name)
    plan = rig.plan()
    assert plan is not None
    assert plan.rows[0].start == 16
    rig.commit(plan, rig.compute(plan))
    rig.finish()
    assert (rig.cached[name], rig.scheduler.stats().cached_tokens) == (0, 0)


def test_a_stop_string_is_no_abort() -> None:
    rig = Rig()
    rig.abort(rig.add(numbers(3)), "stop")
    assert (rig.scheduler.stats().finished, rig.scheduler.stats().aborts) == ({"stop": 1}, {})


def test_twenty_turns_compute_what_is_new() -> None:
    """An append-only chat: each turn computes its new tokens and less than a block of what it had."""
    rig = Rig(num_blocks=100, num_slots=8, block_size=8, index=prefix_index(), max_num_batched_tokens=64)
    history: list[int] = []
    num_known = 0
    for turn in range(20):
        history += [turn % VOCAB, *numbers(7 + turn % 5)]
        before = rig.scheduler.stats().prefilled_tokens
        name = rig.add(history, max_tokens=9)
        rig.finish()
        assert rig.scheduler.stats().prefilled_tokens - before <= len(history) - num_known + 8
        history += rig.answers[name].token_ids
        num_known = len(history) - 1


def test_plans_survive_the_wire() -> None:
    rig = Rig(max_drafts=2)
    rig.add(numbers(20), logprobs=1)
    rig.finish()
    for plan in rig.plans:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
