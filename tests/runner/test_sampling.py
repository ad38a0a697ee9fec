"""The sampler against a naive one that draws token by token in float64, and against itself in other company."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from deltaserve.core.plan import RowResult, Seating
from deltaserve.core.request import SamplingParams, TokenLogprobs
from deltaserve.ops.sampling import api
from deltaserve.runner.sampling import Drafts, NonFiniteLogitsError, Sampler

CPU = torch.device("cpu")
Floats = npt.NDArray[np.float64]
VOCAB = 512


def logits_after(tokens: Sequence[int], vocab: int = VOCAB) -> Floats:
    """A language model: the logits are a function of the last three tokens."""
    return np.random.default_rng([7, *tokens[-3:]]).standard_normal(vocab) * 2.5


# ---- the naive sampler ---------------------------------------------------------------------------------------------


def splitmix(state: int) -> int:
    mixed = state & (2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def noise(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix(seed + golden)
    return (splitmix(key + golden * (position + 1)) >> 11) / 2**53


def naive_token(tokens: list[int], num_prompt: int, params: SamplingParams, logits: Floats) -> int:
    cumulative = np.cumsum(naive_weights(tokens, num_prompt, params, logits))
    return int((cumulative <= noise(params.seed or 0, len(tokens)) * cumulative[-1]).sum())


def naive_weights(tokens: list[int], num_prompt: int, params: SamplingParams, logits: Floats) -> Floats:
    logits = logits.copy()
    output = tokens[num_prompt:]
    for token in set(tokens):
        by = params.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[[token for token in params.stop_token_ids if token < len(logits)]] = -1e300
    if params.temperature == 0:
        return np.asarray(np.arange(len(logits)) == logits.argmax(), dtype=np.float64)
    weights = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        weights[logits < np.sort(logits)[-min(params.top_k, len(logits))]] = 0
    order = np.argsort(-logits, kind="stable")
    likelier = np.cumsum(weights[order]) - weights[order]
    if params.top_p < 1:
        weights[order[likelier >= params.top_p * weights.sum()]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return np.asarray(weights)


# ---- driving the sampler -------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """A request that is being answered, alone or with others."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    seat: int = -1

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def sit(self, sampler: Sampler, seat: int) -> None:
        self.seat = seat
        tokens, params = list(self.tokens), self.params
        sampler.seat(Seating(seat=seat, token_ids=tokens, num_prompt=len(self.prompt), params=params))

    def hear(self, result: RowResult) -> None:
        assert result.error is None
        self.tokens += result.token_ids
        self.logprobs += result.logprobs or []


def step(
    sampler: Sampler, talks: Sequence[Talk], dtype: torch.dtype, vocab: int = VOCAB, device: torch.device = CPU
) -> None:
    logits = np.stack([logits_after(talk.tokens, vocab) for talk in talks])
    positions = [len(talk.tokens) for talk in talks]
    sampled = sampler.sample(torch.from_numpy(logits).to(device, dtype), [talk.seat for talk in talks], positions)
    for talk, result in zip(talks, sampled.results(), strict=True):
        talk.hear(result)


def random_params(rng: random.Random, vocab: int = VOCAB) -> SamplingParams:
    """Each feature is on in some, all of them together in a few."""

    def maybe(draw: Callable[[], Any], default: Any) -> Any:
        return draw() if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        top_k=maybe(lambda: rng.choice([1, 5, 40, vocab, vocab + 7]), 0),
        top_p=maybe(lambda: rng.uniform(0.3, 1.0), 1.0),
        min_p=maybe(lambda: rng.uniform(0.0, 0.3), 0.0),
        repetition_penalty=maybe(lambda: rng.uniform(0.6, 1.6), 1.0),
        presence_penalty=maybe(lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(lambda: rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(lambda: {rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(20)}, {}),
        min_tokens=maybe(lambda: rng.randrange(1, 12), 0),
        stop_token_ids=tuple(rng.randrange(vocab + 3) for _ in range(rng.choice([0, 3, 60]))),
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=maybe(lambda: rng.randrange(6), None),
    )


def random_talks(rng: random.Random, count: int, vocab: int = VOCAB) -> list[Talk]:
    return [
        Talk([rng.randrange(vocab) for _ in range(rng.randrange(1, 9))], random_params(rng, vocab))
        for _ in range(count)
    ]


# ---- tests ---------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_naive_sampler(seed: int) -> None:
    rng = random.Random(seed)
    talks = random_talks(rng, 64)
    sampler = Sampler(64, VOCAB, CPU, torch.float64)
    for seat, talk in enumerate(talks):
        talk.sit(sampler, seat)
    for _ in range(15):
        step(sampler, talks, torch.float64)
    for talk in talks:
        want = list(talk.prompt)
        for _ in range(15):
            want.append(naive_token(want, len(talk.prompt), talk.params, logits_after(want)))
        assert talk.tokens == want, talk.params


@pytest.mark.parametrize(("vocab", "count", "steps"), [(VOCAB, 64, 8), (151936, 6, 3)])
def test_tokens_do_not_depend_on_batch_mates(seed: int, vocab: int, count: int, steps: int) -> None:
    """Alone, and in batches of 2 to 64 that change their members, their order and their seats."""
    rng = random.Random(seed)
    together = random_talks(rng, count, vocab)
    alone = [Talk(talk.prompt, talk.params) for talk in together]
    for talk in alone:
        sampler = Sampler(1, vocab, CPU)
        talk.sit(sampler, 0)
        for _ in range(steps):
            step(sampler, [talk], torch.float32, vocab)

    sampler = Sampler(count, vocab, CPU)
    seats = rng.sample(range(count), count)
    for talk, seat in zip(together, seats, strict=True):
        talk.sit(sampler, seat)
    while behind := [talk for talk in together if len(talk.output) < steps]:
        batch = rng.sample(behind, min(len(behind), rng.choice([2, 3, 7, 33, 64])))
        step(sampler, batch, torch.float32, vocab)
    for talk, lone in zip(together, alone, strict=True):
        assert talk.tokens == lone.tokens, talk.params
        assert talk.logprobs == lone.logprobs


def mixed_params() -> list[SamplingParams]:
    """Every stage, in one step."""
    return [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, seed=1, logprobs=3),
        SamplingParams(
            presence_penalty=1.0, logit_bias={4: 1.0}, min_tokens=3, stop_token_ids=(7,), repetition_penalty=1.2, seed=3
        ),
    ]


def test_a_copy_begun_early_changes_nothing() -> None:
    logits, heard = torch.randn(3, VOCAB), []
    for begins in (False, True):
        sampler = Sampler(3, VOCAB, CPU)
        for seat, params in enumerate(mixed_params()):
            sampler.seat(Seating(seat=seat, token_ids=[1, 2], num_prompt=1, params=params))
        sampled = sampler.sample(logits, [0, 1, 2], [2, 2, 2])
        if begins:
            sampled.start_copy()
            sampled.start_copy()
        heard.append(sampled.results())
        assert sampled.results() == heard[-1]
    assert heard[0] == heard[1]


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"temperature": 0.8}, {"repetition_penalty": 1.001}], ids=str)
def test_narrow_logits_are_widened_where_they_must_be(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty of a fifth of what bfloat16 can tell apart decides between equals; quotients are never of bfloat16.
    Greedy choice and logprobs need no wider ones."""
    logits, heard = torch.full((3, VOCAB), 200.0).bfloat16(), []
    draw, drawn = api.sample, list[torch.dtype]()

    def sample(target_RV: Tensor, *args: Any) -> Tensor:
        drawn.append(target_RV.dtype)
        return draw(target_RV, *args)

    monkeypatch.setattr(api, "sample", sample)
    for given in (logits, logits.float()):
        sampler, params = Sampler(3, VOCAB, CPU), SamplingParams(**{"temperature": 0.0, "seed": 1, **asked})
        for seat in range(3):
            sampler.seat(Seating(seat=seat, token_ids=[0, 1], num_prompt=1, params=params))
        drafts = sampler.draft(given, [0, 1, 2], [2, 2, 2], behind=1).tolist()
        heard.append((sampler.sample(given, [0, 1, 2], [2, 2, 2]).results(), drafts))
    assert heard[0] == heard[1]
    assert drawn == [torch.float32] * (4 if "temperature" in asked else 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu_before_the_tokens_are_read() -> None:
    device = torch.device("cuda")
    sampler = Sampler(3, VOCAB, device)
    logits, guessed = torch.randn(5, VOCAB, device=device), torch.tensor([1, 2], device=device)

    def run() -> list[RowResult]:
        for seat, params in enumerate(mixed_params()):
            sampler.seat(Seating(seat=seat, token_ids=[1, 2], num_prompt=1, params=params))
        sampled = sampler.sample(logits, [0, 1, 2], [2, 2, 2], Drafts((1, 0, 1), guessed))
        sampled.start_copy()
        torch.cuda.set_sync_debug_mode("default")
        return sampled.results()

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run() == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_gpu_says_the_same(seed: int) -> None:
    rng = random.Random(seed)
    talks = random_talks(rng, 64)
    heard = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(64, VOCAB, device, torch.float64)
        copies = [Talk(talk.prompt, talk.params) for talk in talks]
        for seat, talk in enumerate(copies):
            talk.sit(sampler, seat)
        for _ in range(8):
            step(sampler, copies, torch.float64, device=device)
        heard.append([talk.tokens for talk in copies])
    assert heard[0] == heard[1]


def test_preemption_changes_nothing(seed: int) -> None:
    """A request that loses its seat and takes another, its output so far now known tokens, goes on as it would have."""
    rng = random.Random(seed)
    stays = random_talks(rng, 24)
    moves = [Talk(talk.prompt, talk.params) for talk in stays]
    still, moving = Sampler(24, VOCAB, CPU), Sampler(24, VOCAB, CPU)
    for seat, (talk, other) in enumerate(zip(stays, moves, strict=True)):
        talk.sit(still, seat)
        other.sit(moving, seat)
    for _ in range(12):
        step(still, stays, torch.float32)
        step(moving, moves, torch.float32)
        left = rng.sample(moves, 6)
        for talk, seat in zip(left, rng.sample([talk.seat for talk in left], 6), strict=True):
            talk.sit(moving, seat)
    assert [talk.tokens for talk in moves] == [talk.tokens for talk in stays]


def test_drafts_change_nothing_but_the_number_of_steps(seed: int) -> None:
    """Any guesses, right or wrong, any number of them: the same tokens, and one that is right saves a step."""
    rng = random.Random(seed)
    plain = random_talks(rng, 24)
    guessed = [Talk(talk.prompt, talk.params) for talk in plain]
    one, many = Sampler(24, VOCAB, CPU), Sampler(24, VOCAB, CPU)
    for seat, (talk, other) in enumerate(zip(plain, guessed, strict=True)):
        talk.sit(one, seat)
        other.sit(many, seat)
    for _ in range(24):
        step(one, plain, torch.float32)
    while behind := [number for number, talk in enumerate(guessed) if len(talk.output) < 12]:
        rows, counts, drafts, saved = [], [], [], []
        for number in behind:
            talk, truth = guessed[number], plain[number].output[len(guessed[number].output) :]
            right = rng.randrange(5)
            guess = truth[:right] + [(truth[right] + 1) % VOCAB, 3][: rng.randrange(3)]
            rows += [logits_after(talk.tokens + guess[:j]) for j in range(len(guess) + 1)]
            counts.append(len(guess))
            drafts += guess
            saved.append(min(right, len(guess)))
        talks = [guessed[number] for number in behind]
        sampled = many.sample(
            torch.from_numpy(np.stack(rows)).float(),
            [talk.seat for talk in talks],
            torch.tensor([len(talk.tokens) for talk in talks]),
            Drafts(tuple(counts), torch.tensor(drafts, dtype=torch.int64)),
        )
        assert sampled.num_tokens.tolist() == [number + 1 for number in saved]
        for talk, result in zip(talks, sampled.results(), strict=True):
            talk.hear(result)
    for talk, other in zip(plain, guessed, strict=True):
        assert other.tokens == talk.tokens[: len(other.tokens)], talk.params
        assert other.logprobs == talk.logprobs[: len(other.logprobs)]
        assert talk.params.logprobs is None or len(other.logprobs) == len(other.output)


SMALL, REQUESTS, ROUNDS = 10, 1000, 21
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {3: 1.5, 5: -2.0}},
    {"min_tokens": 2, "stop_token_ids": (1, 4), "top_k": 7, "top_p": 0.9},
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_drafts_keep_the_distribution(kind: int) -> None:
    """The pairs of the first two tokens of 21,000 requests, each with two drafts of another model, against the exact
    probabilities: chi-square."""
    draw, params = np.random.default_rng(kind), SamplingParams(**KINDS[kind])
    prompt, target = [0, 2], draw.standard_normal((SMALL, SMALL)) * 1.5
    other = target + draw.standard_normal((SMALL, SMALL))
    seen, num_right = np.zeros((SMALL, SMALL)), 0
    for turn in range(ROUNDS):
        pairs, right = two_tokens(prompt, params, target, other, range(turn * REQUESTS, (turn + 1) * REQUESTS))
        np.add.at(seen, (pairs[:, 0], pairs[:, 1]), 1)
        num_right += right
    exact = np.zeros((SMALL, SMALL))
    for first, chance in enumerate(normed(naive_weights(prompt, 2, params, target[prompt[-1]]))):
        exact[first] = chance * normed(naive_weights([*prompt, first], 2, params, target[first]))
    expected = exact * seen.sum()
    assert not seen[exact == 0].any()
    common = expected >= 8
    cells = [*zip(seen[common], expected[common], strict=True), (seen[~common].sum(), expected[~common].sum())]
    found = sum((have - want) ** 2 / want for have, want in cells if want)
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root is nearly normal; four deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert found < limit, f"chi-square {found:.1f} with {freedom} degrees of freedom, at most {limit:.1f}"
    assert 0.2 < num_right / seen.sum() < 0.95, "drafts are always right or always wrong"


def normed(weights: Floats) -> Floats:
    return np.asarray(weights / weights.sum())


def two_tokens(
    prompt: list[int], params: SamplingParams, target: Floats, other: Floats, seeds: range
) -> tuple[npt.NDArray[np.int64], int]:
    """The first two tokens [requests, 2] of requests with these seeds, and how many first drafts were right."""
    sampler, seats = Sampler(len(seeds), SMALL, CPU, torch.float64), list(range(len(seeds)))
    for seat, seed in enumerate(seeds):
        own = msgspec.structs.replace(params, seed=seed)
        sampler.seat(Seating(seat=seat, token_ids=prompt, num_prompt=len(prompt), params=own))
    last, drafts = torch.full((len(seats),), prompt[-1]), list[Tensor]()
    for place in range(2):
        logits = torch.from_numpy(other[(drafts[-1] if drafts else last).numpy()])
        drafts.append(sampler.draft(logits, seats, [len(prompt) + place] * len(seats)))
    before = torch.stack([last, *drafts], 1).flatten()
    guesses = Drafts((2,) * len(seats), torch.stack(drafts, 1).flatten())
    starts = [len(prompt)] * len(seats)
    sampled = sampler.sample(torch.from_numpy(target[before.numpy()]), seats, starts, guesses)
    tokens = [result.token_ids for result in sampled.results()]
    short = [seat for seat in seats if len(tokens[seat]) == 1]
    logits = torch.from_numpy(target[[tokens[seat][0] for seat in short]])
    rest = sampler.sample(logits, short, [len(prompt) + 1] * len(short)).results()
    for seat, result in zip(short, rest, strict=True):
        tokens[seat] = tokens[seat] + result.token_ids
    return np.array([pair[:2] for pair in tokens]), len(seats) - len(short)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pretended_drafts_are_right_as_often_as_asked(temperature: float) -> None:
    count, vocab = 4000, 50
    sampler, seats = Sampler(count, vocab, CPU), list(range(count))
    sampler.pretend([0.9, 0.5])
    for seat in seats:
        params = SamplingParams(temperature=temperature, seed=seat)
        sampler.seat(Seating(seat=seat, token_ids=[1], num_prompt=1, params=params))
    drafts = torch.randint(vocab, (3 * count,))
    sampled = sampler.sample(torch.randn(4 * count, vocab), seats, [1] * count, Drafts((3,) * count, drafts))
    given = sampled.num_tokens
    shares = [float((given > place + 1).sum() / (given > place).sum()) for place in range(3)]
    assert np.allclose(shares, [0.9, 0.5, 0.5], atol=0.04)
    for row, drafted in zip(sampled.results(), drafts.view(-1, 3).tolist(), strict=True):
        num_right = len(row.token_ids) - 1
        assert row.token_ids[:-1] == drafted[:num_right]
        assert num_right == 3 or row.token_ids[-1] != drafted[num_right]


def test_non_finite_logits_behind_a_wrong_draft_do_no_harm() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    for seat in range(2):
        sampler.seat(Seating(seat=seat, token_ids=[1], num_prompt=1, params=SamplingParams(temperature=0.0, seed=0)))
    logits_RV = torch.zeros(4, VOCAB)
    logits_RV[:, 5] = 1.0
    logits_RV[[1, 3]] = math.nan
    drafts = Drafts((1, 1), torch.tensor([6, 5]))
    wrong, right = sampler.sample(logits_RV, [0, 1], [1, 1], drafts).results()
    assert wrong == RowResult(token_ids=[5])
    assert right.error is not None
    assert "not finite" in right.error


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_end_their_own_request(seed: int, value: float) -> None:
    rng = random.Random(seed)
    talks = random_talks(rng, 16)
    logits_RV = torch.from_numpy(np.stack([logits_after(talk.tokens) for talk in talks])).float()

    def results(bad: list[int]) -> list[RowResult]:
        sampler = Sampler(16, VOCAB, CPU)
        for seat, talk in enumerate(talks):
            talk.sit(sampler, seat)
        spoilt_RV = logits_RV.clone()
        spoilt_RV[bad, rng.randrange(VOCAB)] = value
        return sampler.sample(spoilt_RV, range(16), [len(talk.tokens) for talk in talks]).results()

    sound, bad = results([]), [0, 3, 15]
    for row, result in enumerate(results(bad)):
        if row in bad:
            assert result.token_ids == []
            assert result.error is not None
        else:
            assert result == sound[row]


def test_all_logits_nan_in_every_way_of_choosing(seed: int) -> None:
    rng = random.Random(seed)
    for talk in random_talks(rng, 40):
        sampler = Sampler(1, VOCAB, CPU)
        talk.sit(sampler, 0)
        (result,) = sampler.sample(torch.full((1, VOCAB), math.nan), [0], [len(talk.tokens)]).results()
        assert result.error is not None, talk.params


def test_answers_of_one_request_differ_and_repeat() -> None:
    params = SamplingParams(n=8, seed=2**63 - 3)
    children = [params.of_answer(number) for number in range(8)]
    assert children[0] == msgspec.structs.replace(params, n=1)
    assert len({child.seed for child in children}) == 8

    def texts(order: Sequence[int]) -> dict[int, list[int]]:
        sampler = Sampler(8, VOCAB, CPU)
        talks = {number: Talk([1, 2, 3], children[number]) for number in order}
        for seat, talk in enumerate(talks.values()):
            talk.sit(sampler, seat)
        for _ in range(10):
            step(sampler, list(talks.values()), torch.float32)
        return {number: talk.output for number, talk in talks.items()}

    first = texts(range(8))
    assert texts([5, 1, 7, 0, 6, 2, 4, 3]) == first
    assert len({tuple(text) for text in first.values()}) == 8
    # No stream is another one shifted.
    assert len({text[j] for text in first.values() for j in range(10)}) > 30


def test_min_tokens_bans_every_stop_id_until_then() -> None:
    stops = (3, 9, 100000)
    logits_1V = torch.zeros(1, VOCAB)
    logits_1V[0, [3, 9]] = torch.tensor([50.0, 40.0])
    for temperature in (0.0, 1.0):
        sampler = Sampler(1, VOCAB, CPU)
        params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=stops, seed=1)
        sampler.seat(Seating(seat=0, token_ids=[1, 2, 5, 5], num_prompt=2, params=params))
        tokens = [sampler.sample(logits_1V, [0], [n]).results()[0].token_ids[0] for n in range(2, 8)]
        assert not {3, 9} & set(tokens[:4])
        assert tokens[4:] == [3, 3]
        on_device = [sampler.sample(logits_1V, [0], torch.tensor([n])).results()[0].token_ids[0] for n in range(2, 8)]
        assert on_device == tokens


def test_a_row_in_which_all_is_banned_still_gives_a_token() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    params = SamplingParams(min_tokens=4, stop_token_ids=tuple(range(VOCAB)), top_p=0.5, seed=1)
    sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=params))
    (result,) = sampler.sample(torch.randn(1, VOCAB), [0], [1]).results()
    assert result.error is None
    assert 0 <= result.token_ids[0] < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logit_bias_of_a_hundred_decides(temperature: float) -> None:
    sampler = Sampler(2, VOCAB, CPU)
    wanted = SamplingParams(temperature=temperature, logit_bias={7: 100.0}, seed=1)
    barred = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(VOCAB - 1), -100.0), seed=1)
    for seat, params in enumerate((wanted, barred)):
        sampler.seat(Seating(seat=seat, token_ids=[1], num_prompt=1, params=params))
    for position in range(1, 30):
        results = sampler.sample(torch.randn(2, VOCAB) * 3, [0, 1], [position, position]).results()
        assert [result.token_ids for result in results] == [[7], [VOCAB - 1]]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Whatever penalties, bias, temperature and cuts do to the choice; each row with its own number of them."""
    sampler = Sampler(4, VOCAB, CPU)
    asked = [None, 0, 3, 20]
    for seat, count in enumerate(asked):
        params = SamplingParams(
            temperature=0.2, top_k=2, logit_bias={11: 100.0}, presence_penalty=2.0, logprobs=count, seed=seat
        )
        sampler.seat(Seating(seat=seat, token_ids=[1, 2, 11], num_prompt=1, params=params))
    logits_RV = torch.randn(4, VOCAB) * 3
    before_RV = logits_RV.clone()
    want_RV = logits_RV.double().log_softmax(1)
    results = sampler.sample(logits_RV, range(4), [3] * 4).results()
    assert torch.equal(logits_RV, before_RV), "the logits were written to"
    assert results[0].logprobs is None
    for row, count in list(enumerate(asked))[1:]:
        (scores,) = results[row].logprobs or []
        assert scores.token_id == results[row].token_ids[0] == 11
        assert scores.logprob == pytest.approx(float(want_RV[row, 11]), abs=1e-5)
        assert scores.rank == int((want_RV[row] > want_RV[row, 11]).sum()) + 1
        assert scores.top_ids == want_RV[row].argsort(descending=True)[:count].tolist()
        assert len(scores.top_logprobs) == count


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(1, VOCAB, CPU)
    logits_NV = torch.randn(50, VOCAB) * 3
    token_ids = torch.randint(0, VOCAB, (50,)).tolist()
    whole = sampler.prompt_logprobs(logits_NV, token_ids, 4)
    monkeypatch.setattr("deltaserve.runner.sampling._PIECE", 7 * VOCAB)
    assert sampler.prompt_logprobs(logits_NV, token_ids, 4) == whole
    want_NV = logits_NV.double().log_softmax(1)
    for row, scores in enumerate(whole):
        assert scores.token_id == token_ids[row]
        assert scores.logprob == pytest.approx(float(want_NV[row, token_ids[row]]), abs=1e-5)
        assert len(scores.top_ids) == len(scores.top_logprobs) == 4
        if scores.rank <= 4:
            assert scores.top_ids[scores.rank - 1] == scores.token_id
            assert scores.top_logprobs[scores.rank - 1] == scores.logprob
    assert sampler.prompt_logprobs(logits_NV[:0], [], 4) == []
    logits_NV[49, 1] = math.nan
    with pytest.raises(NonFiniteLogitsError):
        sampler.prompt_logprobs(logits_NV, token_ids, 4)


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    sampler = Sampler(1, 12, CPU)
    sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=SamplingParams(logprobs=20, seed=1)))
    (result,) = sampler.sample(torch.randn(1, 12), [0], [1]).results()
    assert sorted((result.logprobs or [])[0].top_ids) == list(range(12))
    assert len(sampler.prompt_logprobs(torch.randn(1, 12), [3], 20)[0].top_ids) == 12


def test_counts_are_kept_for_those_who_need_them_only() -> None:
    sampler = Sampler(8, VOCAB, CPU)
    counts = sampler._params.counts
    assert counts.num_rows == 0

    def seat(number: int, **params: Any) -> None:
        params = {"seed": 0, **params}
        sampler.seat(Seating(seat=number, token_ids=[1, 2], num_prompt=1, params=SamplingParams(**params)))

    seat(0)
    assert counts.num_rows == 0
    seat(0, presence_penalty=0.1)
    seat(1, repetition_penalty=1.1)
    seat(5, frequency_penalty=-0.1)
    assert counts.num_rows == 3
    seat(1, presence_penalty=0.2)
    assert counts.num_rows == 3
    seat(5)
    seat(0)
    assert counts.num_rows == 1


def test_a_new_tenant_inherits_nothing() -> None:
    """Counts, bias and bans of whoever sat there before are gone; those in other seats are still right."""
    sampler = Sampler(2, VOCAB, CPU)
    heavy = SamplingParams(
        temperature=0.0, frequency_penalty=2.0, repetition_penalty=2.0, logit_bias={4: 50.0}, min_tokens=9,
        stop_token_ids=(8,), seed=0,
    )  # fmt: skip
    light = SamplingParams(temperature=0.0, presence_penalty=0.5, seed=0)
    sampler.seat(Seating(seat=0, token_ids=[5, 5, 8], num_prompt=1, params=heavy))
    sampler.seat(Seating(seat=1, token_ids=[6, 7, 7], num_prompt=2, params=light))
    logits_2V = torch.zeros(2, VOCAB)
    logits_2V[:, [4, 5, 7, 8]] = torch.tensor([0.5, 3.0, 3.3, 2.0])
    assert [r.token_ids for r in sampler.sample(logits_2V, [0, 1], [3, 3]).results()] == [[4], [5]]
    sampler.seat(Seating(seat=0, token_ids=[9], num_prompt=1, params=light))
    assert [r.token_ids for r in sampler.sample(logits_2V, [1, 0], [4, 1]).results()] == [[7], [7]]
    # Seat 1 has now said 7 and 5 as well: presence takes the same from both.
    assert sampler._params.counts.of(torch.tensor([1]))[0].sum() == 3


def test_stages_that_no_row_needs_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def watch(name: str) -> None:
        original = getattr(api, name)

        def watched(*args: Tensor) -> Tensor:
            ran.append(name)
            result: Tensor = original(*args)
            return result

        monkeypatch.setattr(api, name, watched)

    for name in ("penalize", "greedy", "weigh", "cut_top", "cut_min", "uniform", "draw", "token_logprobs"):
        watch(name)

    def stages(*all_params: SamplingParams) -> list[str]:
        sampler = Sampler(len(all_params), VOCAB, CPU)
        for seat, params in enumerate(all_params):
            sampler.seat(Seating(seat=seat, token_ids=[1], num_prompt=1, params=params))
        ran.clear()
        seats = range(len(all_params))
        sampler.sample(torch.randn(len(all_params), VOCAB), seats, [1] * len(all_params)).results()
        return list(ran)

    # As torch computes: a kernel that also looks whether logits are finite makes one stage of two.
    monkeypatch.setattr(api, "greedy_checked", lambda x: (api.greedy(x), api.is_finite(x)))
    greedy = SamplingParams(temperature=0.0, seed=0)
    assert stages(greedy, greedy) == ["greedy"]
    assert stages(SamplingParams(seed=0, top_k=VOCAB)) == ["weigh", "uniform", "draw"]
    assert stages(greedy, SamplingParams(seed=0)) == ["greedy", "weigh", "uniform", "draw"]
    assert stages(SamplingParams(seed=0, top_k=3), SamplingParams(seed=0)) == ["weigh", "cut_top", "uniform", "draw"]
    assert stages(SamplingParams(seed=0, min_p=0.1)) == ["weigh", "cut_min", "uniform", "draw"]
    assert stages(msgspec.structs.replace(greedy, presence_penalty=1.0, logprobs=0)) == [
        "penalize",
        "greedy",
        "token_logprobs",
    ]


def test_wrong_shapes_are_our_own_fault() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    with pytest.raises(AssertionError, match="no seed"):
        sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=SamplingParams()))
    sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=SamplingParams(seed=1)))
    with pytest.raises(AssertionError, match="for 1 rows"):
        sampler.sample(torch.zeros(2, VOCAB), [0], [1])
    with pytest.raises(AssertionError, match="positions"):
        sampler.sample(torch.zeros(1, VOCAB), [0], [1, 2])
    with pytest.raises(AssertionError, match="drafts"):
        sampler.sample(torch.zeros(2, VOCAB), [0], [1], Drafts((1,), torch.tensor([1, 2])))
