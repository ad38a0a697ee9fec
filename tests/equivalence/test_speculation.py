"""Speculation and prefix reuse, alone and together, change no token: random traffic against each request alone.

The drafter here is scripted, right for a random number of its drafts, on top of the real one, whose entries are made as
ever. Memory that nobody owns is NaN.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.draft import Guesser
from deltaserve.runner.inputs import Batch
from deltaserve.runner.sampling import Sampled, Sampler
from deltaserve.runner.staging import Ints
from deltaserve.scheduler.speculation import Speculation
from tests.equivalence.test_overlap import Late, let_outcomes_come_late
from tests.equivalence.truth import Answer, Truth
from tests.equivalence.watch import Watched
from tests.models.factory import tiny_config, write_checkpoint
from tests.serving import serving

VOCAB = 160
NUM_REQUESTS = 10
NAN = float("nan")
BUDGETS = (7, 24, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), shape, seed=21, mtp=True)


def requests() -> list[Request]:
    """Turns of a few conversations, so that some continue others, with every kind of sampling."""
    draw = random.Random(17)
    shared = draw.choices(range(VOCAB), k=150)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_tokens": 1},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {5: 2.0, 9: -4.0}},
    ]
    made = []
    for number in range(NUM_REQUESTS):
        length = draw.choice([1, 63, 64, 65, 100, 130, 140])
        cut = draw.choice([0, length, length // 2])
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 9, 30, 40]),
            seed=number,
            ignore_eos=number % 3 > 0,
            stop_token_ids=(3, 77) if number % 4 == 0 else (),
            logprobs=2 if number % 2 else None,
            **kinds[number % len(kinds)],
        )
        prompt = shared[:cut] + draw.choices(range(VOCAB), k=length - cut)
        made.append(Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, arrival=0.0))
    return made


def run_alone(folder: Path) -> dict[str, Answer]:
    engine = Engine(config(folder, 0, "off", 256, max_num_seqs=1))
    answers = {}
    for request in requests():
        answer = answers[request.request_id] = Answer(request)
        engine.add(request)
        while engine.has_work():
            for output in engine.step():
                answer.add(output)
    return answers


def config(folder: Path, guesses: int, prefix_cache: str, budget: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float64",
        state_dtype="float64",
        speculative_tokens=str(guesses),  # type: ignore[arg-type]
        prefix_cache=prefix_cache,  # type: ignore[arg-type]
        max_num_batched_tokens=budget,
        **{"max_num_seqs": 3, "num_blocks": 9, "num_slots": 3 * (1 + guesses) + 4, **settings},
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Answer]:
    answers = run_alone(folder)
    truth = Truth(folder)
    for answer in answers.values():
        truth.check(answer, [2], 576, 1e-8)
    return answers


class Scripted:
    """Drafts that are right up to a random place. Knows the answers by prompt and seed."""

    def __init__(self, inner: Guesser, recent: Tensor, answers: Sequence[Answer], draw: random.Random) -> None:
        self.inner, self.recent, self.draw = inner, recent, draw
        self.texts = {self._key(a.request.prompt_token_ids, a.request.params): a for a in answers}
        self.seated: dict[int, list[int]] = {}

    def begin(self, plan: Plan) -> None:
        self.inner.begin(plan)
        for seating in plan.seatings:
            answer = self.texts[self._key(list(seating.known)[: seating.num_prompt], seating.params)]
            self.seated[seating.seat] = answer.request.prompt_token_ids + answer.token_ids

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None) -> None:
        self.inner.propose(plan, batch, hidden_TD, sampled)
        numbers = batch.numbers
        given = [] if sampled is None else sampled.num_tokens.tolist()
        for row_number, num_given in zip(numbers.sampling.tolist(), given, strict=True):
            row = plan.rows[row_number]
            later = 0 if batch.later is None else int(batch.later[row_number])
            known = int(numbers.ends[row_number] - numbers.num_guesses[row_number]) + later + num_given - 1
            num_right = self.draw.randint(0, row.num_propose)
            text = self.seated[row.seat]
            for number in range(row.num_propose):
                place = known + 1 + number
                right = text[place] if place < len(text) else 0
                wrong = number >= num_right
                self.recent[row.seat, 1 + number] = (right + self.draw.randint(1, VOCAB - 1) * wrong) % VOCAB

    def learn(self, seats: Ints, num_more: Ints) -> None:
        self.inner.learn(seats, num_more)

    @staticmethod
    def _key(prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        return (params.seed or 0, *prompt)


def traffic(engine: Engine, answers: dict[str, Answer], draw: random.Random) -> Iterator[Answer]:
    """Arrivals, aborts and preemptions at any moment; what was finished."""
    waiting = list(answers.values())
    draw.shuffle(waiting)
    open_: dict[str, Answer] = {}
    while waiting or engine.has_work():
        while waiting and draw.random() < 0.4:
            request = waiting.pop().request
            engine.add(request)
            open_[request.request_id] = Answer(request)
        if open_ and draw.random() < 0.02:
            engine.abort(draw.choice(list(open_)), "disconnect")
        if open_ and draw.random() < 0.06:
            engine.scheduler.preempt(draw.choice(list(open_)))
        for output in engine.step():
            answer = open_[output.request_id]
            answer.add(output)
            if output.finish_reason is not None:
                yield answer
        engine.check()


@pytest.mark.parametrize("late", [None, "eager", "graphs"])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("prefix_cache", ["on", "off"])
@pytest.mark.parametrize("guesses", [0, 1, 2, 3, 4])
def test_all_cells_give_the_same_tokens(
    guesses: int, prefix_cache: str, overlap: str, late: Late, folder: Path, alone: dict[str, Answer], seed: int
) -> None:
    """`late`: outcomes come when they are asked for, as on a GPU, without graphs or with them."""
    draw = random.Random(seed)
    budget = BUDGETS[(guesses + 2 * (prefix_cache == "on") + (overlap == "on") + (late == "graphs")) % len(BUDGETS)]
    watched = Watched(config(folder, guesses, prefix_cache, budget, overlap=overlap), NAN, always(guesses))
    engine, runner = watched.engine, watched.engine.workers.runner
    assert runner is not None
    let_outcomes_come_late(engine, late)
    if runner.guesser is not None:
        runner.guesser = Scripted(runner.guesser, runner.inputs.recent, list(alone.values()), draw)
    num_finished, some = 0, dict(draw.sample(list(alone.items()), 7))
    for answer in traffic(engine, some, draw):
        right = alone[answer.request.request_id]
        assert answer.token_ids == right.token_ids, answer.request
        assert answer.finish_reason == right.finish_reason
        assert [entry.token_id for entry in answer.logprobs] == [entry.token_id for entry in right.logprobs]
        for told, expected in zip(answer.logprobs, right.logprobs, strict=True):
            assert abs(told.logprob - expected.logprob) < 1e-9
        num_finished += 1
    assert num_finished >= len(some) // 2
    stats = engine.stats()
    watched.assert_nothing_left()
    if prefix_cache == "on":
        assert watched.assert_kept_is_right(1e-8, at_most=4) > 0
    if guesses:
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert (watched.workers.num_later > 0) == (overlap == "on")


def always(guesses: int) -> Speculation:
    return Speculation(guesses, adaptive=False)


def test_the_layers_own_drafts_change_no_token_either(folder: Path, alone: dict[str, Answer], seed: int) -> None:
    draw = random.Random(seed)
    watched = Watched(config(folder, 3, "on", 40, overlap="on"), NAN, always(3))
    for answer in traffic(watched.engine, alone, draw):
        assert answer.token_ids == alone[answer.request.request_id].token_ids
    assert watched.engine.stats().draft_tokens > 0
    watched.assert_nothing_left()


def test_a_server_tells_drafts_in_the_usage(folder: Path) -> None:
    flags = ("--device", "cpu", "--speculative-tokens", "3", "--max-num-seqs", "2")
    body = json.dumps(
        {"prompt": "Mia has 3 apples and buys 4 more.", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    )
    with serving(*flags) as server:
        request = urllib.request.Request(
            f"{server.origin}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            usage = json.loads(answer.read())["usage"]
        server.wait_until_idle()
        numbers = server.metrics()
    details = usage["completion_tokens_details"]
    right, wrong = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert usage["completion_tokens"] == 40
    assert 0 < right < 40
    assert right == numbers["deltaserve_accepted_tokens_total"]
    assert right + wrong == numbers["deltaserve_draft_tokens_total"]
    assert numbers["deltaserve_draft_alarm"] == 0


def test_pretended_drafts_make_the_steps_that_were_asked_for() -> None:
    """Right ones always: four tokens a step. Only with random weights, and with a warning."""
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "speculative_tokens": "3"}
    wish: dict[str, Any] = {"speculative_synthetic_acceptance": "1.0"}
    with pytest.raises(ValueError, match="random weights only"):
        Engine(EngineConfig(**settings, **wish))
    with pytest.raises(ValueError, match="nothing is guessed"):
        Engine(EngineConfig(load_format="dummy", **settings | {"speculative_tokens": "auto"}, **wish))
    for wrong in ("2", "0.5,", "a", "-0.1"):
        with pytest.raises(ValueError, match="from 0 to 1"):
            EngineConfig(speculative_synthetic_acceptance=wrong)
    engine = Engine(EngineConfig(load_format="dummy", **settings, **wish), speculation=always(3))
    params = SamplingParams(max_tokens=41, ignore_eos=True, seed=1)
    engine.add(Request(request_id="one", prompt_token_ids=[1, 2, 3], params=params, arrival=0.0))
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert stats.tokens_a_step == {4: 10}
    assert stats.accepted_tokens == stats.draft_tokens == 30


class Restless(Speculation):
    """Spells without drafts and spells with some."""

    def __init__(self, max_drafts: int, draw: random.Random) -> None:
        super().__init__(max_drafts)
        self.draw, self.left, self.number, self.starts = draw, 0, 0, 0

    def choose(self, num_rows: int) -> int:
        if self.left == 0:
            before, self.number = self.number, self.draw.choice([0, 0, 1, self.max_drafts])
            self.left = self.draw.randint(1, 5)
            self.starts += before == 0 < self.number
        self.left -= 1
        return self.number


class Finite:
    """Drafts come from logits that hold no NaN: entries that were never made are not seen."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.count = sampler, 0

    def draft(self, logits_BV: Tensor, seats: Sequence[int], positions: Tensor, behind: int) -> Tensor:
        assert bool(logits_BV.isfinite().all())
        self.count += len(seats)
        return self.sampler.draft(logits_BV, seats, positions, behind)


@pytest.mark.parametrize("late", [None, "eager", "graphs"])
@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_drafting_that_stops_and_resumes(
    prefix_cache: str, late: Late, folder: Path, alone: dict[str, Answer], seed: int
) -> None:
    """No entries are made meanwhile; the memory where they would be is NaN."""
    draw = random.Random(seed)
    speculation = Restless(3, draw)
    watched = Watched(config(folder, 3, prefix_cache, 40, overlap="on"), NAN, speculation)
    runner = watched.engine.workers.runner
    assert runner is not None
    assert runner.look_ahead is not None
    let_outcomes_come_late(watched.engine, late)
    finite = Finite(runner.sampler)
    runner.look_ahead.sampler = finite  # type: ignore[assignment]
    for _ in range(2):
        for answer in traffic(watched.engine, alone, draw):
            assert answer.token_ids == alone[answer.request.request_id].token_ids
    watched.assert_nothing_left()
    if prefix_cache == "on":
        watched.assert_kept_is_right(1e-8, at_most=4)
    assert speculation.starts > 5
    assert finite.count > 100


def test_nothing_is_computed_for_drafts_that_are_not_in_use(folder: Path, alone: dict[str, Answer]) -> None:
    engine = Engine(config(folder, 3, "on", 40), fill=NAN, speculation=Never(3))
    runner = engine.workers.runner
    assert runner is not None

    def look_ahead(*_: object) -> Tensor:
        raise AssertionError("the MTP layer is asked")

    runner.model.look_ahead = look_ahead  # type: ignore[method-assign, assignment]
    for answer in traffic(engine, alone, random.Random(1)):
        assert answer.token_ids == alone[answer.request.request_id].token_ids


class Never(Speculation):
    def choose(self, num_rows: int) -> int:
        return 0
