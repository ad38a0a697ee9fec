"""The number of drafts follows what is accepted and what steps take: to nothing where it does not pay, and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from deltaserve.scheduler import policy
from deltaserve.scheduler.costs import GPU_COST, Costs, StepCost
from deltaserve.scheduler.speculation import PROBE_STEPS, WINDOW, Speculation
from tests.scheduler.rig import Rig

H200 = {
    1: (2.09, 3.65, 4.57, 5.46),
    8: (6.03, 9.03, 11.3, 13.4),
    32: (12.5, 18.45, 22.5, 25.1),
    128: (25.2, 31.7, 37.3, 41.8),
}
"""Milliseconds of a step by the number of drafts (docs/LOG.md)."""
CHEAP = {1: (2.17, 2.4, 2.7, 3.0), 8: (6.0, 7.0, 8.0, 9.0), 128: (25.8, 30.0, 35.0, 40.0)}
DEAR = {1: (2.17, 4.5, 7.0, 9.0), 8: (6.0, 12.0, 18.0, 24.0), 128: (25.8, 60.0, 90.0, 120.0)}


def run(
    speculation: Speculation,
    chance: float,
    steps: int,
    num_rows: int = 1,
    seed: int = 0,
    took: Callable[[int], float] | None = None,
) -> list[int]:
    """Drafts verified in each step, when each draft is right with `chance` after those before it. With `took`, a step
    takes so long by their number, give or take, and sometimes a multiple of it."""
    draw, verified, proposed = random.Random(seed), list[int](), 0
    for _ in range(steps):
        number, proposed = proposed, speculation.choose(num_rows)
        if took is not None and number == proposed and verified[-1:] == [number]:
            noise = 1 + draw.gauss(0, 0.05) + 2 * (draw.random() < 0.01)
            speculation.took(num_rows, number, speculation.keeps_up, took(number) * noise)
        verified.append(number)
        for _ in range(num_rows if number else 0):
            right = 0
            while right < number and draw.random() < chance:
                right += 1
            speculation.observe(number, right)
    return verified


def rate(verified: Sequence[int], chance: float, took: Callable[[int], float]) -> float:
    """Tokens of a request over the time."""
    tokens = sum(sum(chance**place for place in range(number + 1)) for number in verified)
    return tokens / sum(took(number) for number in verified)


def share(verified: Sequence[int], number: int) -> float:
    return verified.count(number) / len(verified)


def test_right_drafts_are_asked_for_to_the_full() -> None:
    assert share(run(Speculation(3), 1.0, 900)[-600:], 3) > 0.95


def test_wrong_drafts_stop_within_a_window_and_are_hardly_tried_again() -> None:
    verified = run(Speculation(3), 0.0, 4000)
    first = next(step for step, number in enumerate(verified) if number)
    stop = verified.index(0, first)
    assert stop - first <= WINDOW
    assert share(verified[stop:], 0) > 0.97
    assert share(verified[2000:], 0) > 0.99
    assert max(verified[stop:]) == 1


def test_drafting_resumes_when_it_pays_again() -> None:
    speculation = Speculation(3)
    run(speculation, 0.0, 1000)
    assert share(run(speculation, 1.0, 1500)[-500:], 3) > 0.9


def test_the_best_number_is_chosen_between() -> None:
    """With free drafts but dear tokens a low acceptance pays one draft at most."""
    cost = StepCost(fixed=1.0, per_token=0.4, per_draft=0.0, per_drafted_token=0.0)
    high, low = (run(Speculation(4, cost), chance, 2000)[-1000:] for chance in (0.95, 0.35))
    assert sum(number >= 3 for number in high) > 950
    assert sum(number <= 1 for number in low) > 950


def test_large_batches_want_fewer_drafts() -> None:
    cost = StepCost(fixed=10.0, per_token=1.0, per_draft=0.5, per_drafted_token=0.1)
    few, many = (sum(run(Speculation(4, cost), 0.7, 300, num_rows)[-100:]) for num_rows in (1, 60))
    assert few > many


def test_an_alarm_where_hardly_any_draft_is_right(caplog: pytest.LogCaptureFixture) -> None:
    """Said once; taken back when drafts are right again."""
    speculation = Speculation(3, adaptive=False)
    for _ in range(3):
        run(speculation, 0.04, 335)
    assert speculation.alarm
    [record] = caplog.records
    assert "mtp.*" in record.getMessage()
    run(speculation, 0.5, 400)
    assert not speculation.alarm


@pytest.mark.parametrize("chance", [0.9, 0.6, 0.1])
@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
def test_on_a_gpu_drafts_are_asked_for_where_they_pay(num_rows: int, chance: float) -> None:
    """By the costs that are assumed, whatever is chosen gives no fewer tokens for its time than no drafts give."""

    def took(number: int) -> float:
        return GPU_COST.of(num_rows, number)

    verified = run(Speculation(3, GPU_COST), chance, 2000, num_rows)
    assert rate(verified, chance, took) > 0.98 / took(0)
    if chance == 0.9 and num_rows == 1:
        assert share(verified, 0) < 0.1


@pytest.mark.parametrize("chance", [0.95, 0.8, 0.6, 0.3, 0.0])
@pytest.mark.parametrize(
    ("num_rows", "world"),
    [(rows, world) for world in (H200, CHEAP, DEAR) for rows in world],
    ids=[f"{name} {rows}" for name, world in (("h200", H200), ("cheap", CHEAP), ("dear", DEAR)) for rows in world],
)
def test_what_steps_take_is_learnt(num_rows: int, world: dict[int, tuple[float, ...]], chance: float) -> None:
    """Wherever the guess of the costs is wrong, either way: never slower than without drafts by more than 2 %, and not
    by 4 % than the best number always, the tries included."""
    took = world[num_rows].__getitem__
    verified = run(Speculation(3, GPU_COST), chance, 5000 if num_rows < 100 else 2500, num_rows, took=took)
    found = rate(verified[500:], chance, took)
    assert found > 0.98 / took(0)
    assert found > 0.96 * max(rate([number], chance, took) for number in range(4))


@pytest.mark.parametrize("chance", [0.9, 0.7, 0.6, 0.3, 0.0])
@pytest.mark.parametrize("num_rows", H200)
def test_little_is_lost_soon(num_rows: int, chance: float) -> None:
    """Behind 200 steps never more than 2 % of what no drafts give, on the whole; and of a single request whose drafts
    are wrong, in no 192 steps that follow each other."""
    took = H200[num_rows].__getitem__
    verified = run(Speculation(3, GPU_COST), chance, 2000, num_rows, seed=num_rows, took=took)
    assert rate(verified[200:], chance, took) > 0.98 / took(0)
    if chance < 0.5 and num_rows == 1:
        windows = [verified[first : first + 192] for first in range(200, len(verified) - 192, 8)]
        assert min(rate(window, chance, took) for window in windows) > 0.98 / took(0)


def test_a_slower_device_changes_no_choice() -> None:
    """Only ratios count."""
    for number in (0, 3):
        slow, fast = Costs(GPU_COST), Costs(GPU_COST)
        for _ in range(20):
            slow.took(4, number, 50.0)
            fast.took(4, number, 0.5)
        for rows in (1, 4, 100):
            ratios = [slow.of(rows, drafts) / fast.of(rows, drafts) for drafts in range(4)]
            assert ratios == pytest.approx([100.0] * 4)


def test_a_number_that_was_never_timed_costs_as_its_neighbour_says() -> None:
    costs = Costs(StepCost())
    assert costs.of(1, 2) == StepCost().of(1, 2)
    costs.took(1, 0, 2 * StepCost().of(1, 0))
    costs.took(1, 3, 6 * StepCost().of(1, 3))
    told = [costs.of(rows, drafts) / StepCost().of(rows, drafts) for rows, drafts in ((1, 1), (1, 2), (9, 0), (9, 2))]
    assert told == pytest.approx([2, 6, 2, 6])


def test_one_slow_step_is_not_believed() -> None:
    costs = Costs(StepCost())
    for _ in range(10):
        costs.took(1, 1, 1.0)
    costs.took(1, 1, 500.0)
    assert costs.of(1, 1) < 1.2
    for _ in range(60):
        costs.took(1, 1, 3.0)
    assert costs.of(1, 1) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("stall", [10, 50, 200])
def test_a_stall_among_the_first_times_is_forgotten(stall: float) -> None:
    """Also if it is the first, or the only one of its number of drafts, which is then tried again soon."""
    cost, chance, behind = StepCost(), 0.8, []
    best = max(rate([number], chance, partial(cost.of, 1)) for number in range(4))
    for place in range(40):
        times = iter([*[1.0] * place, float(stall)])

        def took(number: int, times: Iterator[float] = times) -> float:
            return cost.of(1, number) * next(times, 1.0)

        verified = run(Speculation(3, cost), chance, 4000, seed=place, took=took)
        behind.append(rate(verified, chance, partial(cost.of, 1)) / best)
    assert min(behind) > 0.9
    assert sum(share < 0.95 for share in behind) <= 1


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_without_a_layer_nothing_is_proposed(num_rows: int) -> None:
    speculation = Speculation(0)
    assert speculation.choose(num_rows) == 0
    speculation.observe(2, 1)
    assert speculation.choose(num_rows) == 0


def test_equal_histories_give_equal_choices() -> None:
    assert run(Speculation(4), 0.5, 700, 3) == run(Speculation(4), 0.5, 700, 3)


def test_only_steps_behind_others_like_them_are_timed() -> None:
    """Two prompts, the second of which comes later: neither its step counts, nor the first with it."""
    told: list[tuple[int, int, bool, float]] = []

    class Listening(Speculation):
        def took(self, num_rows: int, num_drafts: int, kept_up: bool, seconds: float) -> None:
            told.append((num_rows, num_drafts, kept_up, seconds))

    rig = Rig(max_drafts=2, num_drafts_for=policy.proposed_drafts, speculation=Listening(2, adaptive=False))
    rig.add(range(3), max_tokens=100)
    kinds = []
    for step in range(9):
        if step == 4:
            rig.add(range(5), max_tokens=100)
        plan = rig.plan()
        assert plan is not None
        kinds.append([(row.num_tokens, row.num_propose) for row in plan.rows])
        rig.scheduler.commit(plan, rig.compute(plan), float(step))
    assert kinds == [[(3, 2)], *[[(3, 2)]] * 3, [(3, 2), (5, 2)], *[[(3, 2), (3, 2)]] * 4]
    assert told == [(1, 2, True, 2.0), (1, 2, True, 3.0), (2, 2, True, 6.0), (2, 2, True, 7.0), (2, 2, True, 8.0)]


def test_what_drafts_are_made_of_is_kept_up_while_none_are_tried() -> None:
    """And not when they are given up."""
    speculation = Speculation(3)
    seen = set()
    for chance in (1.0, 0.0):
        for _ in range(600):
            number = speculation.choose(1)
            seen.add((chance, number > 0, speculation.keeps_up))
            right = number if chance else 0
            speculation.observe(number, right)
    assert (1.0, False, True) in seen
    assert not speculation.keeps_up
    speculation = Speculation(1)
    speculation._taken = 1
    speculation.took(1, 0, True, 1.0)
    kept_up = speculation.costs.of(1, 0)
    speculation = Speculation(1)
    speculation.took(1, 0, False, 1.0)
    assert kept_up < speculation.costs.of(1, 0)


def test_a_try_is_short() -> None:
    verified = run(Speculation(3), 0.0, 6000)[1000:]
    tries = "".join(str(number) for number in verified).split("0")
    assert {len(each) for each in tries if each} == {PROBE_STEPS}
