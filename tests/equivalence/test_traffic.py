"""Under random traffic every request says what it says alone, nothing unowned is read or changed, the books balance.

A few seconds each by default; `--traffic-seconds` makes it hours.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from deltaserve.config import EngineConfig
from tests.equivalence.traffic import Traffic
from tests.equivalence.truth import Truth
from tests.equivalence.watch import Watched
from tests.models.factory import BUILTIN, random_config, tiny_config, write_checkpoint
from tests.runner.test_graphs import with_graphs

EVENTS = (
    "finished: length",
    "finished: stop",
    "aborted before its first token",
    "aborted after its first token",
    "sent back",
    "preempted",
    "mixed steps",
    "chunks before the last",
    "tokens from the cache",
    "states kept",
    "planned ahead",
)
BUILTIN_EVENTS = ("finished: length", "preempted", "mixed steps", "chunks before the last", "planned ahead")
MAX_ROUNDS = 8
"""Rounds go on for the given time, and further while something has not happened yet."""


def draw_config(draw: random.Random, number: int, folder: Path | None, dtype: str) -> EngineConfig:
    """Pools and budgets of every size, most of them tight. The first round is one in which everything happens."""
    max_num_seqs = draw.choice([1, 2, 3, 5, 8]) if number else 4
    guesses = draw.choice([0, 1, 2, 3, 5]) if number else 2
    spare = draw.choice([0, 1, 2, 7, 62, 63, 64, 130]) if number else 20
    return EngineConfig(
        model=None if folder is None else str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        state_dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare,
        num_blocks=draw.choice([2, 3, 4, 6, 10, 20]) if number else 11,
        num_slots=max_num_seqs * (1 + guesses) + draw.choice([0, 1, 2, 5, 30]) if number else 20,
        speculative_tokens=str(guesses),  # type: ignore[arg-type]
        prefix_cache=draw.choice(["on", "on", "on", "off"]) if number else "on",
        overlap=draw.choice(["on", "on", "off"]) if number else "on",
    )


def lacks(seen: Counter[str], events: tuple[str, ...]) -> list[str]:
    return [event for event in events if not seen[event]]


def assert_seen(seen: Counter[str], events: tuple[str, ...]) -> None:
    print(dict(sorted(seen.items())))
    missing = lacks(seen, events)
    assert not missing, f"the traffic never had {missing}: {seen}"


@pytest.mark.parametrize("poison", [float("nan"), 1e3])
def test_float64_models(poison: float, traffic_seconds: float, seed: int, tmp_path: Path) -> None:
    """A new random model and new pools in every round, every other one with steps of fixed shapes; drawn tokens must be
    the very ones."""
    end, seen, number = time.monotonic() + traffic_seconds, Counter[str](), 0
    while time.monotonic() < end or (lacks(seen, EVENTS) and number < MAX_ROUNDS):
        draw = random.Random(f"{seed} {number}")
        shape = tiny_config() if number == 0 else random_config(draw.getrandbits(30))
        folder = write_checkpoint(tmp_path / str(number), shape, seed=number, mtp=True)
        watched = Watched(draw_config(draw, number, folder, "float64"), poison)
        if number % 2 == 0:
            with_graphs(watched.engine, apart=number % 4 == 2)
        print(f"round {number}: {watched.engine.config}", json.dumps(shape))
        seen += Traffic(watched, Truth(folder), draw, greedy_only=False).run(20, tolerance=1e-8)
        number += 1
    assert_seen(seen, EVENTS)


def test_builtin_model(traffic_seconds: float, seed: int) -> None:
    end, seen, number, truth = time.monotonic() + traffic_seconds, Counter[str](), 0, Truth(BUILTIN)
    while time.monotonic() < end or (lacks(seen, BUILTIN_EVENTS) and number < MAX_ROUNDS):
        draw = random.Random(f"{seed} {number}")
        watched = Watched(draw_config(draw, number, None, "float32"), draw.choice([float("nan"), 1e3]))
        if draw.random() < 0.5:
            with_graphs(watched.engine, apart=draw.random() < 0.5)
        seen += Traffic(watched, truth, draw, greedy_only=True).run(12, tolerance=2e-3)
        number += 1
    assert_seen(seen, BUILTIN_EVENTS)
