"""That the judge of answers allows what rounding may decide, and nothing else."""

from __future__ import annotations

import random

import pytest

from deltaserve.core.request import Output, Request, SamplingParams, TokenLogprobs
from tests.engine.scripted import BUILTIN
from tests.equivalence import truth as judge
from tests.equivalence.truth import Answer, Truth
from tests.models.reference import Choice

LENGTH = 40


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(BUILTIN)


def answer_of(truth: Truth, turned: tuple[Choice, ...]) -> tuple[Answer, dict[Choice, float]]:
    """One greedy token with four logprobs, as an engine would say it that decides `turned` the other way."""
    prompt = random.Random(0).choices(range(truth.vocab_size), k=LENGTH)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=4, seed=1)
    logprobs_V = truth.reference.logits(prompt, turned)[-1].log_softmax(-1)
    best = logprobs_V.sort(descending=True, stable=True)
    ids, values = best.indices[:4].tolist(), best.values[:4].tolist()
    answer = Answer(Request(request_id="r", prompt_token_ids=prompt, params=params, arrival=0.0))
    told = TokenLogprobs(token_id=ids[0], logprob=values[0], rank=1, top_ids=ids, top_logprobs=values)
    answer.add(Output(request_id="r", token_ids=[ids[0]], logprobs=[told], finish_reason="length"))
    return answer, dict(truth.reference.gaps)


def test_a_tie_may_be_decided_either_way(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, gaps = answer_of(truth, ())
    truth.check(straight, [], 2 * LENGTH, 1e-4)
    choice = min((choice for choice in gaps if choice[1] > LENGTH // 2), key=gaps.__getitem__)
    turned, _ = answer_of(truth, (choice,))
    monkeypatch.setattr(judge, "TIE", gaps[choice] * 1.001)
    truth.check(turned, [], 2 * LENGTH, 1e-4)
    with pytest.raises(AssertionError):
        truth.check(turned, [], 2 * LENGTH, 1e-8)  # nothing rounds in float64
    monkeypatch.setattr(judge, "TIE", gaps[choice])
    with pytest.raises(AssertionError):
        truth.check(turned, [], 2 * LENGTH, 1e-4)


def test_what_no_way_explains_is_wrong(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, gaps = answer_of(truth, ())
    monkeypatch.setattr(judge, "TIE", min(gaps.values()) * 1.001)
    answer.logprobs[0].top_logprobs[2] += 0.05
    with pytest.raises(AssertionError, match="not right in any of 1 ways"):
        truth.check(answer, [], 2 * LENGTH, 1e-4)
