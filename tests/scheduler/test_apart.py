"""Steps of one kind: rows that extend and prompts take turns, and nobody waits for longer than a turn."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.core.plan import Plan
from deltaserve.scheduler import policy
from deltaserve.scheduler.speculation import Speculation
from tests.scheduler.fake import VOCAB
from tests.scheduler.rig import Rig

DRAFTING: dict[str, Any] = {
    "max_drafts": 2,
    "num_drafts_for": policy.proposed_drafts,
    "speculation": Speculation(2, adaptive=False),
}


def numbers(n: int) -> list[int]:
    return [i % VOCAB for i in range(n)]


def kinds(plans: list[Plan]) -> str:
    assert all(plan.num_decode in (0, len(plan.rows)) for plan in plans)
    return "".join("d" if plan.num_decode else "p" for plan in plans)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_and_rows_that_extend_take_turns(overlap: bool) -> None:
    rig = Rig(apart=4, overlap=overlap, max_num_batched_tokens=16)
    rig.add(numbers(5), max_tokens=9)
    rig.add(numbers(64), max_tokens=1)
    rig.finish()
    assert kinds(rig.plans) == "pdpdpdpdpdddd"
    chunks = [sum(row.num_tokens for row in plan.rows) for plan in rig.plans if not plan.num_decode]
    assert chunks == [16, 13, 16, 16, 8]  # the first is of both, the second ends a block


def test_prompts_that_find_no_memory_do_not_keep_the_others_waiting() -> None:
    rig = Rig(apart=4, num_blocks=6, num_slots=2, max_num_seqs=2)
    rig.add(numbers(20), max_tokens=20)
    rig.add(numbers(30), max_tokens=1)
    rig.finish()
    assert kinds(rig.plans) == "p" + "d" * 19 + "p"


@pytest.mark.parametrize("overlap", [False, True])
def test_with_drafts(overlap: bool) -> None:
    rig = Rig(apart=4, overlap=overlap, max_num_batched_tokens=16, **DRAFTING)
    rig.add(numbers(5), max_tokens=30)
    rig.add(numbers(90), max_tokens=3)
    rig.finish()
    assert "pdpdpdp" in kinds(rig.plans)
    assert any(row.num_drafts for plan in rig.plans for row in plan.rows)


def test_alone_each_kind_goes_on() -> None:
    rig = Rig(apart=4, max_num_batched_tokens=8)
    rig.add(numbers(30), max_tokens=4)
    rig.finish()
    assert kinds(rig.plans) == "ppppddd"


def test_a_step_has_no_more_prompts_than_its_graph() -> None:
    rig = Rig(apart=2, max_num_batched_tokens=32)
    for _ in range(4):
        rig.add(numbers(5), max_tokens=2)
    rig.finish()
    assert [len(plan.rows) for plan in rig.plans] == [2, 2, 2, 2]
    assert [len(plan.seatings) for plan in rig.plans] == [2, 0, 2, 0], "nobody takes a seat without a row"
    assert kinds(rig.plans) == "pdpd"


def test_one_who_comes_back_does_not_make_a_step_of_prompts_longer() -> None:
    rig = Rig(apart=2, max_num_batched_tokens=64, num_blocks=200)
    first = rig.add(numbers(5), max_tokens=20)
    rig.add(numbers(120), max_tokens=1)
    rig.add(numbers(120), max_tokens=1)
    while sum(len(plan.seatings) for plan in rig.plans) < 3:
        rig.step()
    assert rig.scheduler.preempt(first)
    rig.finish()
    assert max(len(plan.rows) for plan in rig.plans) == 2


def test_steps_of_prompts_neither_try_drafts_nor_hide_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = Speculation(2)
    timed: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(speculation, "took", lambda *what: timed.append(what[:3]))
    rig = Rig(apart=4, max_num_batched_tokens=16, max_drafts=2, speculation=speculation, num_blocks=200)
    rig.seconds = 0.01
    rig.add(numbers(5), max_tokens=60)
    for _ in range(3):
        rig.add(numbers(300), max_tokens=1)
    choose, chosen = speculation.choose, list[int]()

    def counted(rows: int) -> int:
        chosen.append(rows)
        return choose(rows)

    monkeypatch.setattr(speculation, "choose", counted)
    rig.finish()
    decoding = kinds(rig.plans).count("d")
    assert len(chosen) == decoding
    assert len(timed) > decoding // 2
