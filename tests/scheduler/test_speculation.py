"""The number of drafts follows what is accepted: to nothing where it does not pay, and back."""

from __future__ import annotations

import random

import pytest

from deltaserve.scheduler.speculation import GPU_COST, PROBE_EVERY, PROBE_STEPS, WINDOW, Speculation, StepCost


def run(speculation: Speculation, chance: float, steps: int, num_rows: int = 1, seed: int = 0) -> list[int]:
    """Drafts proposed in each step, when each draft is right with `chance` after those before it."""
    draw, chosen = random.Random(seed), []
    for _ in range(steps):
        chosen.append(speculation.choose(num_rows))
        for _ in range(num_rows if chosen[-1] else 0):
            right = 0
            while right < chosen[-1] and draw.random() < chance:
                right += 1
            speculation.observe(chosen[-1], right)
    return chosen


def test_right_drafts_are_asked_for_to_the_full() -> None:
    assert set(run(Speculation(3), 1.0, 500)[-300:]) == {3}


def test_wrong_drafts_stop_within_a_window_and_are_hardly_tried_again() -> None:
    chosen = run(Speculation(3), 0.0, 4 * PROBE_EVERY)
    first_stop = chosen.index(0)
    assert first_stop <= WINDOW
    assert sum(k > 0 for k in chosen[first_stop:]) <= 4 * PROBE_STEPS
    assert max(chosen[first_stop:]) == 1


def test_drafting_resumes_when_it_pays_again() -> None:
    speculation = Speculation(3)
    run(speculation, 0.0, 2 * PROBE_EVERY)
    chosen = run(speculation, 1.0, PROBE_EVERY + 200)
    assert set(chosen[-100:]) == {3}


def test_the_best_number_is_chosen_between() -> None:
    """With free drafts but dear tokens a low acceptance pays one draft at most."""
    cost = StepCost(fixed=1.0, per_token=0.4, per_draft=0.0, per_drafted_token=0.0)
    assert min(run(Speculation(4, cost), 0.95, 400)[-50:]) >= 3
    assert max(run(Speculation(4, cost), 0.35, 400)[-50:]) <= 1


def test_large_batches_want_fewer_drafts() -> None:
    cost = StepCost(fixed=10.0, per_token=1.0, per_draft=0.5, per_drafted_token=0.1)
    few, many = (run(Speculation(4, cost), 0.7, 300, num_rows)[-1] for num_rows in (1, 60))
    assert few > many


def test_an_alarm_where_hardly_any_draft_is_right(caplog: pytest.LogCaptureFixture) -> None:
    """Said once; taken back when drafts are right again."""
    speculation = Speculation(3, adaptive=False)
    for _ in range(3):
        run(speculation, 0.04, 334)
    assert speculation.alarm
    [record] = caplog.records
    assert "mtp.*" in record.getMessage()
    run(speculation, 0.5, 400)
    assert not speculation.alarm


@pytest.mark.parametrize("chance", [0.9, 0.6, 0.1])
@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
def test_on_a_gpu_drafts_are_asked_for_where_they_pay(num_rows: int, chance: float) -> None:
    """By the costs that are assumed, whatever is chosen gives no fewer tokens for its time than no drafts give."""
    chosen = run(Speculation(3, GPU_COST), chance, 400, num_rows)[-1]
    tokens = sum(chance**place for place in range(chosen + 1))
    assert tokens / GPU_COST.of(num_rows, chosen) > 0.98 / GPU_COST.of(num_rows, 0)
    if chance == 0.9 and num_rows == 1:
        assert chosen > 0


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_without_a_layer_nothing_is_proposed(num_rows: int) -> None:
    speculation = Speculation(0)
    assert speculation.choose(num_rows) == 0
    speculation.observe(2, 1)
    assert speculation.choose(num_rows) == 0


def test_equal_histories_give_equal_choices() -> None:
    assert run(Speculation(4), 0.5, 700, 3) == run(Speculation(4), 0.5, 700, 3)
