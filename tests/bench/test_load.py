"""Which requests a load sends, and when."""

from __future__ import annotations

import pytest

from deltaserve.bench.load import WORDS, Load, Prompts, arrivals, read_loads


def test_loads() -> None:
    assert read_loads("1,8", "0.5,inf") == [Load(clients=1), Load(clients=8), Load(rate=0.5), Load(rate=float("inf"))]
    assert [load.name for load in read_loads("8", "2,inf")] == ["clients 8", "rate 2", "rate inf"]
    assert read_loads(None, None) == []


@pytest.mark.parametrize(
    ("clients", "rates"), [("0", None), ("1.5", None), ("inf", None), ("a", None), (None, "0"), (None, "nan")]
)
def test_loads_without_meaning(clients: str | None, rates: str | None) -> None:
    with pytest.raises(ValueError, match="with commas between them"):
        read_loads(clients, rates)


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(50.0, 20_000, seed=1)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)  # as long as they vary
    assert times == arrivals(50.0, 20_000, seed=1)
    assert times != arrivals(50.0, 20_000, seed=2)
    assert arrivals(float("inf"), 3, seed=1) == [0.0, 0.0, 0.0]


def test_prompts_follow_from_the_seed_and_their_name() -> None:
    prompts = Prompts("tokens", "completions", 1000, seed=1)
    ids = prompts.ids(500, "a")
    assert len(ids) == 500
    assert set(ids) <= set(range(1000))
    assert ids == Prompts("tokens", "completions", 1000, seed=1).ids(500, "a")
    assert ids not in (prompts.ids(500, "b"), Prompts("tokens", "completions", 1000, seed=2).ids(500, "a"))
    assert prompts.body(3, "a") == {"prompt": prompts.ids(3, "a")}


def test_prompts_of_words() -> None:
    prompts = Prompts("words", "completions", 1000, seed=1)
    text = prompts.body(50, "a")["prompt"]
    assert len(text.split()) == 50
    assert set(text.split()) <= set(WORDS)
    (message,) = Prompts("tokens", "chat", 1000, seed=1).body(50, "a")["messages"]
    assert message == {"role": "user", "content": text}


def test_the_words_differ() -> None:
    assert len(set(WORDS)) == len(WORDS) > 64
