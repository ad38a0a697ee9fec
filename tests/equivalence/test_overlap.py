"""Overlap changes no token: on equals off, also where outcomes come late, as they do on a GPU.

On a CPU the runner computes at launch. As on a GPU, with graphs or without, its outcomes come when they are asked for,
and the newest tokens go from step to step on the device; here they do so on the CPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.scheduler.speculation import Speculation
from tests.equivalence.watch import Watched
from tests.models.factory import tiny_config, write_checkpoint
from tests.runner.test_graphs import with_graphs

VOCAB = 160
Late = Literal["eager", "graphs"] | None
NAN = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), shape, seed=8, mtp=True)


def requests() -> list[Request]:
    """Two to four answers to each prompt, prompts that share a beginning, every way to end and to sample."""
    draw = random.Random(5)
    shared = draw.choices(range(VOCAB), k=140)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_tokens": 2},
        {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"temperature": 0.8, "min_p": 0.05, "logit_bias": {5: 2.0, 9: -4.0}, "prompt_logprobs": 1},
    ]
    made = []
    for number in range(9):
        cut = draw.choice([0, 63, 64, 65, 130])
        prompt = shared[:cut] + draw.choices(range(VOCAB), k=draw.choice([1, 20, 64]))
        params = SamplingParams(
            max_tokens=draw.choice([2, 9, 40, 70]),
            seed=number,
            ignore_eos=number % 2 > 0,
            stop_token_ids=tuple(draw.choices(range(VOCAB), k=20)) if number % 3 == 0 else (),
            **kinds[number % len(kinds)],
        )
        for answer in range(draw.choice([1, 2, 4])):
            name = f"{number}.{answer}"
            made.append(Request(request_id=name, prompt_token_ids=prompt, params=params.of_answer(answer), arrival=0.0))
    return made


def configure(folder: Path, overlap: str, guesses: int = 0, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float64",
        state_dtype="float64",
        overlap=overlap,  # type: ignore[arg-type]
        speculative_tokens=str(guesses),  # type: ignore[arg-type]
        **{"max_num_seqs": 4, "max_num_batched_tokens": 40, "num_blocks": 14, "num_slots": 12, **settings},
    )


def make(folder: Path, overlap: str, *, late: Late = None, guesses: int = 0, **settings: Any) -> Watched:
    watched = Watched(configure(folder, overlap, guesses, **settings), NAN, Speculation(guesses, adaptive=False))
    let_outcomes_come_late(watched.engine, late)
    return watched


def let_outcomes_come_late(engine: Engine, late: Late) -> None:
    assert engine.workers.runner is not None
    if late == "eager":
        engine.workers.runner.inputs.runs_ahead = True
    elif late == "graphs":
        with_graphs(engine)


def answers(watched: Watched, draw: random.Random | None) -> dict[str, list[Any]]:
    """What each request said and how it ended. With `draw` requests come, go and are sent back at any moment."""
    engine, said, coming = watched.engine, dict[str, list[Any]](), requests()
    if draw is not None:
        draw.shuffle(coming)
    while coming or engine.has_work():
        while coming and (draw is None or draw.random() < 0.3):
            request = coming.pop()
            said[request.request_id] = [[], [], None, None]
            engine.add(request)
        if draw is not None:
            disturb(engine, said, draw)
        for output in engine.step():
            take(said, output)
        watched.look()
    watched.assert_nothing_left()
    return said


def disturb(engine: Engine, said: dict[str, list[Any]], draw: random.Random) -> None:
    running = [name for name, told in said.items() if told[2] is None and not engine.waits(name)]
    if running and draw.random() < 0.06:
        assert engine.scheduler.preempt(draw.choice(running))
    if running and draw.random() < 0.01:
        name = draw.choice(running)
        assert engine.abort(name, "disconnect")
        del said[name]


def take(said: dict[str, list[Any]], output: Output) -> None:
    told = said[output.request_id]
    assert told[2] is None, "an output behind the last one"
    told[0] += output.token_ids
    told[1] += [(entry.token_id, entry.rank, entry.top_ids) for entry in output.logprobs or []]
    told[2] = output.finish_reason or told[2]
    told[3] = output.stop_token_id


@pytest.fixture(scope="module")
def off(folder: Path) -> dict[str, list[Any]]:
    watched = make(folder, "off")
    said = answers(watched, None)
    assert watched.workers.num_ahead == 0
    assert {told[2] for told in said.values()} == {"stop", "length"}
    return said


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
@pytest.mark.parametrize(
    ("late", "guesses"), [(None, 0), ("eager", 0), ("graphs", 0), (None, 2), ("eager", 2), ("graphs", 2)]
)
def test_on_equals_off(late: Late, guesses: int, prefix_cache: str, folder: Path, off: dict[str, list[Any]]) -> None:
    settings = {"num_slots": 4 * (1 + guesses) + 8, "prefix_cache": prefix_cache}
    watched = make(folder, "on", late=late, guesses=guesses, **settings)
    assert answers(watched, None) == off
    assert watched.workers.num_ahead > 50
    assert watched.workers.num_open > 50 or not guesses
    if prefix_cache == "on":
        assert watched.assert_kept_is_right(1e-8, at_most=4) > 0
        assert watched.engine.stats().cached_tokens > 0


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize(
    ("late", "settings"),
    [
        (None, {}),
        ("graphs", {}),
        ("graphs", {"num_blocks": 5}),
        ("eager", {"num_slots": 4}),
        ("graphs", {"max_num_seqs": 1}),
    ],
)
def test_whatever_comes_and_goes(
    late: Late, settings: dict[str, int], guesses: int, folder: Path, off: dict[str, list[Any]], seed: int
) -> None:
    slots = settings.get("num_slots", 12) * (1 + guesses)
    watched = make(folder, "on", late=late, guesses=guesses, **settings | {"num_slots": slots})
    said = answers(watched, random.Random(seed))
    assert said == {name: off[name] for name in said}
    assert len(said) > len(off) // 2
    assert watched.workers.num_ahead > 20
    assert watched.engine.stats().preemptions > 0


def test_overlap_costs_no_prefill(folder: Path) -> None:
    """Answers to one prompt wait for the first of them, and what is stored is found, as without overlap."""
    costs = []
    for overlap in ("off", "on"):
        watched = make(folder, overlap, num_blocks=60, num_slots=40)
        answers(watched, None)
        stats = watched.engine.stats()
        costs.append((stats.prefilled_tokens, stats.cached_tokens, stats.preemptions))
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("late", "steps"), [(None, 1), ("eager", 2), ("graphs", 2)])
def test_auto_overlaps_where_outcomes_come_late(late: Late, steps: int, folder: Path) -> None:
    engine = Engine(configure(folder, "auto"))
    let_outcomes_come_late(engine, late)
    engine.add(requests()[0])
    engine.step()
    assert engine.stats().steps == steps
