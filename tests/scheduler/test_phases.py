"""Aborts and preemptions at every phase of a request, one at a time."""

from __future__ import annotations

import copy
import random

import pytest

from deltaserve.cache.prefix import IndexFactory, NoPrefixIndex
from deltaserve.core.plan import NO_SLOT
from tests.scheduler.fake import VOCAB, oracle
from tests.scheduler.rig import Rig, prefix_index

INDEXES = pytest.mark.parametrize("index", [NoPrefixIndex, prefix_index()], ids=["no index", "index"])


def numbers(n: int) -> list[int]:
    return [i % VOCAB for i in range(n)]


@INDEXES
@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_after_every_token(overlap: bool, index: IndexFactory) -> None:
    """A request that is sent back after each of its 200 tokens says the same."""
    rig = Rig(num_blocks=64, index=index, max_num_batched_tokens=512, overlap=overlap)
    name = rig.add(numbers(10), max_tokens=200, logprobs=0)
    count = 0
    while rig.scheduler.has_work:
        spoken = len(rig.answers[name].token_ids)
        rig.step()
        if len(rig.answers[name].token_ids) > spoken and rig.preempt(name):
            count += 1
    rig.finish()
    assert (count, rig.scheduler.stats().preemptions) == (199, 199)


@INDEXES
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_preemption_at_each_token_of_a_generation(index: IndexFactory, max_drafts: int) -> None:
    """One preemption, at each step of 200 tokens in turn, beside a request that is left alone."""
    rig = Rig(num_blocks=64, index=index, max_num_batched_tokens=512, max_drafts=max_drafts)
    other = rig.add([3] * 9, max_tokens=210)
    name = rig.add(numbers(10), max_tokens=200)
    truth = oracle(rig.requests[name], (), rig.max_len).token_ids
    while rig.step() and rig.answers[name].finish_reason is None:
        rig.plans.clear()
        world = copy.deepcopy(rig)
        spoken = len(world.answers[name].token_ids)
        assert world.preempt(name)
        for _ in range(3):
            world.step()
        answer = world.answers[name]
        assert len(answer.token_ids) >= min(spoken + 2, 200)
        assert answer.token_ids == truth[: len(answer.token_ids)]
        assert len(world.answers[other].token_ids) > spoken
    rig.finish()


def test_a_small_pool_preempts_at_any_token() -> None:
    """Blocks of one token: room runs out at every possible place, and everybody still says the same."""
    places = set()
    for num_blocks in range(41, 80):
        rig = Rig(num_blocks=num_blocks, block_size=1, max_num_seqs=3, max_num_batched_tokens=16)
        for i in range(3):
            rig.add(numbers(4 + i), max_tokens=30)
        while rig.scheduler.has_work:
            before = {name: len(rig.answers[name].token_ids) for name in rig.running}
            rig.step()
            places |= {n for name, n in before.items() if name in rig.waiting}
        rig.finish()
    assert len(places) >= 20, f"preempted only at tokens {sorted(places)}"


PHASES = [
    "waiting",
    "planned",
    "computed",
    "between chunks",
    "decode planned",
    "decode computed",
    "decoding",
    "sent back",
]


def reach(rig: Rig, phase: str, name: str) -> None:
    """Abort `name` at the phase; the step in flight, if there is one, is ended."""
    if phase == "waiting":
        assert rig.abort(name)
        return
    chunks = {"planned": 0, "computed": 0, "between chunks": 1}.get(phase, 4)
    for _ in range(chunks):
        rig.step()
    if phase in ("between chunks", "decoding", "sent back"):
        if phase == "sent back":
            assert rig.preempt(name)
            assert name in rig.waiting
        assert rig.abort(name)
        return
    plan = rig.plan()
    assert plan is not None
    if "computed" not in phase:
        assert rig.abort(name)
    result = rig.compute(plan)
    if "computed" in phase:
        assert rig.abort(name)
    assert name not in {output.request_id for output in rig.commit(plan, result)}


@INDEXES
@pytest.mark.parametrize("max_drafts", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_abort_at_each_phase(phase: str, max_drafts: int, index: IndexFactory) -> None:
    rig = Rig(index=index, max_num_batched_tokens=16, max_drafts=max_drafts, num_blocks=40)
    rig.add(numbers(30), max_tokens=3)
    rig.finish()
    beside = rig.add([4] * 12, max_tokens=12)
    name = rig.add(numbers(40), max_tokens=20, prompt_logprobs=None)
    reach(rig, phase, name)
    rig.scheduler.check()
    assert not rig.abort(name)
    assert rig.sequence(name) is None
    spoken = len(rig.answers[name].token_ids)
    after = rig.add(numbers(40), max_tokens=5)
    rig.finish()
    assert len(rig.answers[name].token_ids) == spoken, "an aborted request speaks"
    assert all(rig.answers[each].finish_reason == "length" for each in (beside, after))
    assert rig.scheduler.stats().aborts == {"abort": 1}


def test_a_request_sent_back_in_flight_loses_that_step_only() -> None:
    rig = Rig()
    name = rig.add(numbers(10), max_tokens=6)
    rig.step()
    plan = rig.plan()
    assert plan is not None
    assert rig.preempt(name)
    assert rig.commit(plan, rig.compute(plan)) == []
    rig.finish()


def test_a_row_of_an_earlier_lease_counts_no_more() -> None:
    """The request sits again before the step that it was sent back from has ended, as overlapping steps allow."""
    rig = Rig()
    name = rig.add(numbers(10), max_tokens=6)
    rig.step()
    plan = rig.plan()
    assert plan is not None
    result = rig.compute(plan)
    assert rig.preempt(name)
    assert [s.request_id for s in rig.scheduler._admission.admit(32)] == [name]
    spoken = list(rig.answers[name].token_ids)
    assert rig.commit(plan, result) == []
    sequence = rig.sequence(name)
    assert sequence is not None
    assert sequence.token_ids.tolist() == [*numbers(10), *spoken]


def test_a_thousand_random_events() -> None:
    """Start, finish, abort: those who run are those who hold, no two of them write one place, and all comes back."""
    rnd = random.Random(1)
    rig = Rig(num_blocks=60, num_slots=16, max_num_seqs=6, max_drafts=1, index=prefix_index())
    corpus = [[rnd.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    aborted, events = set(), 0
    while events < 1000:
        if rnd.random() < 0.5 and len(rig.waiting) < 5:
            rig.add(rnd.choice(corpus)[: rnd.randrange(1, 31)], max_tokens=rnd.randrange(1, 12))
            events += 1
        everybody = [*rig.running, *rig.waiting]
        if everybody and rnd.random() < 0.2:
            aborted.add(rnd.choice(everybody))
            events += rig.abort(rnd.choice(sorted(aborted)))
        events += sum(output.finish_reason is not None for output in rig.step())
        leases = [s.lease for s in rig.scheduler._lines.running if s.lease is not None]
        owned = [slot for lease in leases for slot in lease.own]
        assert len(set(owned)) == len(owned) == 2 * len(rig.running)
        assert all(lease.read == NO_SLOT or owned.count(lease.read) <= 1 for lease in leases)
        assert rig.cache.usage().slots_used >= len(owned)
    rig.finish()
    assert rig.scheduler.stats().cached_tokens > 0
