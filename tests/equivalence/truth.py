"""What a request must say, computed alone: whole sequences through the float64 reference, token by token through a
sampler of its own. Shares neither cache nor scheduler, runner nor model with the engine."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.core.plan import Seating
from deltaserve.core.request import Output, Request, TokenLogprobs
from deltaserve.runner.sampling import Sampler
from tests.models.reference import Choice, Reference

TIE = 3e-5
"""Scores of experts that are closer may change places in float32: their errors are some 1e-5."""
FLOAT32 = 1e-4
"""The least tolerance that speaks of an engine in float32."""
MOST_WAYS = 32


class Answer:
    """All outputs of one request, joined."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: str | None = None

    def add(self, output: Output) -> None:
        assert self.finish_reason is None, f"{self.request.request_id} goes on after its end"
        assert output.error is None, output.error
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs are told twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason


class Truth:
    """One checkpoint's right answers."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.reference = Reference(config, load_file(folder / "model.safetensors"))
        self.vocab_size: int = config["vocab_size"]

    def check(self, answer: Answer, stop_ids: Sequence[int], max_len: int, tolerance: float) -> None:
        """The answer's tokens, end and logprobs.

        `tolerance`: how far behind the best logit a greedy token may lie, and how far a logprob from the truth, which
        is told in float32 at best. For an engine in float64 it only covers the order of sums; a drawn token must then
        be the very one. In float32 rounding may decide between experts whose scores are a tie, either way.
        """
        token_ids = answer.request.prompt_token_ids + answer.token_ids
        logits_TV = self.reference.logits(token_ids)
        ties = [choice for choice, gap in self.reference.gaps.items() if gap < TIE]
        try:
            self._check(answer, stop_ids, max_len, tolerance, logits_TV)
        except AssertionError:
            if tolerance < FLOAT32 or not ties:
                raise
            self._check_turned(answer, stop_ids, max_len, tolerance, ties)

    def _check_turned(
        self, answer: Answer, stop_ids: Sequence[int], max_len: int, tolerance: float, ties: Sequence[Choice]
    ) -> None:
        """As if rounding had decided some of `ties` the other way: one way must be the answer's, whole."""
        token_ids = answer.request.prompt_token_ids + answer.token_ids
        ways = [turned for size in (1, 2, 3) for turned in itertools.combinations(ties, size)][:MOST_WAYS]
        for turned in ways:
            logits_TV = self.reference.logits(token_ids, turned)
            with contextlib.suppress(AssertionError):
                return self._check(answer, stop_ids, max_len, tolerance, logits_TV)
        raise AssertionError(f"{answer.request}: not right in any of {len(ways)} ways of deciding {ties}")

    def _check(
        self, answer: Answer, stop_ids: Sequence[int], max_len: int, tolerance: float, logits_TV: Tensor
    ) -> None:
        request, tokens = answer.request, answer.token_ids
        stops = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else stop_ids)}
        self._check_tokens(answer, stops, logits_TV, tolerance)
        self._check_end(answer, stops, max_len)
        first = len(request.prompt_token_ids) - 1
        near = max(tolerance, 1e-5)
        if request.params.logprobs is not None:
            check_logprobs(answer.logprobs, tokens, logits_TV[first:-1], request.params.logprobs, near)
        if request.params.prompt_logprobs is not None:
            told = answer.prompt_logprobs
            assert told is not None, "prompt logprobs are missing"
            assert told[0] is None
            rest = [entry for entry in told[1:] if entry is not None]
            prompt = request.prompt_token_ids
            check_logprobs(rest, prompt[1:], logits_TV[:first], request.params.prompt_logprobs, near)

    def _check_tokens(self, answer: Answer, stops: set[int], logits_TV: Tensor, tolerance: float) -> None:
        request, prompt = answer.request, answer.request.prompt_token_ids
        sampler = Sampler(1, self.vocab_size, torch.device("cpu"), torch.float64)
        params = msgspec.structs.replace(request.params, stop_token_ids=tuple(sorted(stops)))
        sampler.seat(Seating(seat=0, token_ids=prompt, num_prompt=len(prompt), params=params))
        for number, token in enumerate(answer.token_ids):
            position = len(prompt) + number
            row_1V = logits_TV[position - 1 : position]
            right = sampler.sample(row_1V, [0], [position]).results()[0].token_ids
            if right != [token]:
                assert request.params.temperature == 0, f"{request}: token {number} is {token}, not {right}"
                behind = float(row_1V[0].max() - row_1V[0, token])
                assert behind < tolerance, f"{request}: token {number} is {token}, {behind} behind {right}"

    def _check_end(self, answer: Answer, stops: set[int], max_len: int) -> None:
        params, tokens = answer.request.params, answer.token_ids
        room = max_len - len(answer.request.prompt_token_ids)
        longest = room if params.max_tokens is None else min(room, params.max_tokens)
        assert not stops & set(tokens[:-1]), "goes on after a stop token"
        if tokens and tokens[-1] in stops:
            assert answer.finish_reason == "stop"
        else:
            assert answer.finish_reason == "length"
            assert len(tokens) == longest


def check_logprobs(
    told: Sequence[TokenLogprobs], tokens: Sequence[int], logits_NV: Tensor, num_top: int, tolerance: float
) -> None:
    assert [entry.token_id for entry in told] == list(tokens)
    logprobs_NV = logits_NV.log_softmax(-1)
    for entry, right_V in zip(told, logprobs_NV, strict=True):
        assert abs(entry.logprob - float(right_V[entry.token_id])) < tolerance
        assert len(entry.top_ids) == num_top
        best = right_V.sort(descending=True).values[:num_top]
        torch.testing.assert_close(torch.tensor(entry.top_logprobs, dtype=best.dtype), best, rtol=0, atol=tolerance)
        torch.testing.assert_close(right_V[entry.top_ids], best, rtol=0, atol=tolerance)
