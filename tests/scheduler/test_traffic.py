"""Random traffic: whatever comes, goes, is sent back or given up, every finished request equals the oracle."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from deltaserve.cache.prefix import NoPrefixIndex
from deltaserve.core.plan import Plan
from deltaserve.core.request import SamplingParams
from tests.scheduler.fake import VOCAB
from tests.scheduler.rig import Rig, prefix_index

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Traffic:
    """One random world. All that happens in it follows from the seed."""

    seed: int
    with_index: bool
    num_requests: int = 25
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.random = rnd = random.Random(self.seed)
        self.max_drafts = rnd.choice([0, 0, 1, 2, 3, 4])
        self.block_size = rnd.choice([1, 2, 4, 8])
        seats = rnd.randrange(1, 7)
        snapshots = rnd.choice([0.0, 0.3, 1.0])
        self.rig = Rig(
            num_blocks=rnd.choice([8, 16, 40, 200]),
            num_slots=(1 + self.max_drafts) * rnd.randrange(1, seats + 1) + rnd.choice([0, 0, 1, 2, 10, 60]),
            block_size=self.block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=rnd.choice([seats, seats + 1, seats + 7, 50]),
            max_model_len=rnd.choice([30, 100, 1000]),
            max_drafts=self.max_drafts,
            index=prefix_index(lambda boundary, known: rnd.random() < snapshots) if self.with_index else NoPrefixIndex,
            right_drafts=lambda k: rnd.randrange(k + 1),
            num_drafts_for=lambda sequence: rnd.randrange(self.max_drafts + 1),
            apart=rnd.choice([0, 0, 1, 2, 16]),
        )
        self.aborts, self.preemptions = rnd.choice([0.0, 0.02, 0.1]), rnd.choice([0.0, 0.02, 0.1])
        # A prompt of many small chunks that is sent back again and again would never be whole.
        self.preemptions_left = 100
        self.corpus = [self.tokens(1, 40) for _ in range(4)]
        self.aborted: set[str] = set()
        self.overlaps = rnd.choice([0.0, 0.5, 1.0, 1.0])
        self.digest = hashlib.sha256()

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randrange(low, high))]

    def run(self) -> None:
        rig, rnd = self.rig, self.random
        added = 0
        while added < self.num_requests or rig.scheduler.has_work:
            while added < self.num_requests and rnd.random() < 0.4:
                self.add()
                added += 1
            self.disturb()
            plan = rig.in_flight or self.begin()
            if plan is None:
                continue
            self.disturb()
            rig.in_flight = self.begin() if rnd.random() < self.overlaps else None
            self.disturb()
            result = rig.runner.wait(plan.step)
            self.disturb()
            for output in rig.commit(plan, result):
                if output.finish_reason is not None:
                    rig.compare(output.request_id)
        assert len(self.aborted) + sum(a.finish_reason is not None for a in rig.answers.values()) == added
        rig.finish()

    def begin(self) -> Plan | None:
        plan = self.rig.plan()
        if plan is None:
            return None
        self.digest.update(msgspec.json.encode(plan))
        self.disturb()
        order = list(range(len(plan.rows)))
        self.random.shuffle(order)
        self.rig.launch(plan, order)
        return plan

    def add(self) -> None:
        rnd, rig = self.random, self.rig
        finished = [name for name, answer in rig.answers.items() if answer.finish_reason is not None]
        if finished and rnd.random() < 0.5:  # the next turn of a conversation
            name = rnd.choice(finished)
            prompt = rig.requests[name].prompt_token_ids + rig.answers[name].token_ids + self.tokens(1, 8)
        else:
            prompt = rnd.choice(self.corpus) + self.tokens(1, 12)
        prompt = prompt[: rig.max_len - 1]
        scored = rnd.choice([None, None, None, 0, 5])
        max_tokens = rnd.choice([1, 2, 5, 30, 60, None if rig.max_len <= 100 else 60])
        if scored is not None and rnd.random() < 0.3:
            max_tokens = 0
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=rnd.random() < 0.5,
            stop_token_ids=tuple(self.tokens(0, 3)),
            min_tokens=rnd.choice([0, 0, 3]) if max_tokens is None or max_tokens >= 3 else 0,
            logprobs=rnd.choice([None, 2]),
            prompt_logprobs=scored,
        )
        rig.add(prompt, params)

    def disturb(self) -> None:
        """Perhaps somebody goes away, perhaps somebody is sent back: at any phase of a step."""
        rnd, rig = self.random, self.rig
        everybody = [*rig.running, *rig.waiting]
        if everybody and rnd.random() < self.aborts:
            name = rnd.choice(everybody)
            assert rig.abort(name, rnd.choice(["disconnect", "timeout"]))
            assert not rig.abort(name)
            self.aborted.add(name)
        if rig.running and self.preemptions_left and rnd.random() < self.preemptions:
            assert rig.preempt(rnd.choice(rig.running))
            self.preemptions_left -= 1


def run(seed: int, with_index: bool) -> Traffic:
    traffic = Traffic(seed, with_index)
    try:
        traffic.run()
    except Exception as error:
        raise AssertionError(f"Traffic({seed}, with_index={with_index}).run(): {error}") from error
    return traffic


@pytest.mark.parametrize("with_index", [False, True], ids=["no index", "index"])
def test_traffic(with_index: bool, seed: int, traffic_seconds: float) -> None:
    end, count = time.monotonic() + traffic_seconds, 0
    seen = {"preemptions": 0, "aborts": 0, "cached": 0, "accepted": 0, "refused": 0, "prefilled": 0, "ahead": 0}
    while count < 10 or time.monotonic() < end:
        rig = run(seed + count, with_index).rig
        stats = rig.scheduler.stats()
        seen["ahead"] += rig.num_ahead
        count += 1
        seen["preemptions"] += stats.preemptions
        seen["aborts"] += sum(stats.aborts.values())
        seen["cached"] += stats.cached_tokens
        seen["accepted"] += stats.accepted_tokens
        seen["refused"] += stats.draft_tokens - stats.accepted_tokens
        seen["prefilled"] += stats.prefilled_tokens
    print(count, "worlds", seen)
    assert all(seen[what] for what in seen if with_index or what != "cached"), f"traffic without some: {seen}"


DIGEST = """
from tests.scheduler.test_traffic import run
for seed in (1, 5, 9):
    print(run(seed, with_index=seed % 2 == 1).digest.hexdigest())
"""


def test_equal_traffic_gives_equal_plans_in_any_process() -> None:
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert digests[0]
    assert digests[0] == digests[1]
