"""Who waits for whom, and how long at most."""

from __future__ import annotations

import pytest

from tests.scheduler.fake import VOCAB
from tests.scheduler.rig import Rig


def numbers(n: int) -> list[int]:
    return [i % VOCAB for i in range(n)]


def steps_until(rig: Rig, name: str, max_steps: int = 1000) -> int:
    """Steps until the request's first token."""
    for count in range(1, max_steps + 1):
        rig.step()
        if rig.answers[name].token_ids:
            return count
    raise AssertionError(f"no token after {max_steps} steps")


def test_a_long_prompt_does_not_stall_those_who_extend() -> None:
    rig = Rig(num_blocks=2000, max_num_batched_tokens=32)
    extending = [rig.add(numbers(5), max_tokens=400) for _ in range(3)]
    rig.step()
    long = rig.add(numbers(5000), max_tokens=1)
    while not rig.answers[long].token_ids:
        before = [len(rig.answers[name].token_ids) for name in extending]
        plan = rig.plan()
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows) <= 32
        rig.commit(plan, rig.compute(plan))
        assert [len(rig.answers[name].token_ids) for name in extending] == [n + 1 for n in before]


def test_a_short_prompt_passes_a_very_long_one() -> None:
    rig = Rig(num_blocks=4000, max_num_batched_tokens=64)
    long = rig.add(numbers(10000), max_tokens=1)
    for _ in range(3):
        rig.step()
    short = rig.add(numbers(20), max_tokens=4)
    assert steps_until(rig, short) == 1
    assert not rig.answers[long].token_ids
    rig.finish()


def test_a_short_prompt_passes_several_long_ones_that_came_before() -> None:
    rig = Rig(num_blocks=8000, max_num_batched_tokens=64, max_num_seqs=8)
    long = [rig.add(numbers(10000 + i), max_tokens=1) for i in range(5)]
    short = rig.add(numbers(20), max_tokens=1)
    assert steps_until(rig, short) == 1
    assert not any(rig.answers[name].token_ids for name in long)


def test_short_prompts_without_end_do_not_starve_a_long_one() -> None:
    """The long one gets half of each step, so it takes at most twice as long as alone."""
    rig = Rig(num_blocks=2000, max_num_batched_tokens=64, max_num_seqs=8, num_slots=8)
    long = rig.add(numbers(3200), max_tokens=1)
    count = 0
    while not rig.answers[long].token_ids:
        for _ in range(4 - len(rig.waiting)):
            rig.add(numbers(30), max_tokens=1)
        rig.step()
        count += 1
    assert count <= 2 * 3200 / 64 + 1
    assert sum(a.finish_reason is not None for a in rig.answers.values()) > 80


def test_a_long_prompt_that_waits_is_passed_over_and_not_forgotten() -> None:
    """Three long ones ahead, short ones without end: the fourth long one has its turn when it is the oldest."""
    rig = Rig(num_blocks=4000, max_num_batched_tokens=64, max_num_seqs=4, num_slots=4)
    long = [rig.add(numbers(1000), max_tokens=1) for _ in range(4)]
    for _ in range(4 * 2 * 1000 // 64 + 8):
        while len(rig.waiting) < 6:
            rig.add(numbers(40), max_tokens=1)
        rig.step()
    assert all(rig.answers[name].token_ids for name in long)


def test_the_head_of_the_line_is_not_overtaken_for_memory() -> None:
    """A request that needs nearly all blocks waits for those who run; nobody behind it takes what becomes free."""
    rig = Rig(num_blocks=16, block_size=8, max_num_seqs=4)
    running = [rig.add(numbers(20), max_tokens=20 + 10 * i) for i in range(2)]
    rig.step()
    rig.step()
    big = rig.add(numbers(110), max_tokens=2)
    small = [rig.add(numbers(6), max_tokens=2) for _ in range(5)]
    while big in rig.waiting:
        assert not set(small) & set(rig.running)
        rig.step()
    assert all(rig.answers[name].finish_reason for name in running)
    rig.finish()


def test_seats_are_given_in_the_order_of_arrival() -> None:
    rig = Rig(max_num_seqs=2)
    names = [rig.add(numbers(5), max_tokens=3) for _ in range(6)]
    order: list[str] = []
    while rig.scheduler.has_work:
        rig.step()
        order += [name for name in names if rig.answers[name].token_ids and name not in order]
    assert order == names
    assert max(len(plan.rows) for plan in rig.plans) == 2
    assert {row.seat for plan in rig.plans for row in plan.rows} == {0, 1}


def test_the_youngest_makes_room_and_keeps_its_place() -> None:
    """Memory for two: the third goes back, the fourth does not pass it, and the oldest never goes back."""
    rig = Rig(num_blocks=14, block_size=4, max_num_seqs=3, num_slots=4)
    names = [rig.add(numbers(5), max_tokens=30) for _ in range(4)]
    seats: dict[str, list[int]] = {name: [] for name in names}
    while rig.scheduler.has_work:
        rig.step()
        for name in rig.running:
            sequence = rig.sequence(name)
            assert sequence is not None
            seats[name].append(sequence.seat)
        everybody = [int(name[1:]) for name in (*rig.running, *rig.waiting)]
        assert everybody == sorted(everybody), "somebody was overtaken"
    rig.finish()
    assert rig.scheduler.stats().preemptions >= 1
    assert len(set(seats[names[0]])) == 1
    first = [len(rig.answers[name].token_ids) for name in names]
    assert first == [30] * 4


@pytest.mark.parametrize("num_blocks", [9, 12, 15, 18, 20, 25])
def test_a_request_is_not_let_in_only_to_be_sent_back(num_blocks: int) -> None:
    """Prompts whose blocks are not in sight wait: the work of a request is done once."""
    rig = Rig(num_blocks=num_blocks, block_size=8, max_num_batched_tokens=16, max_num_seqs=4)
    for _ in range(8):
        rig.add(numbers(70), max_tokens=1)
    rig.finish()
    stats = rig.scheduler.stats()
    assert (stats.preemptions, stats.prefilled_tokens) == (0, 8 * 70)
