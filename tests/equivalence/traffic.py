"""Random traffic on one watched engine: arrivals, aborts and preemptions at any moment, every kind of request."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from deltaserve.core.request import Request, SamplingParams
from tests.equivalence.truth import Answer, Truth
from tests.equivalence.watch import Watched


class Traffic:
    """One engine's day. All that happens follows from `draw`."""

    def __init__(self, watched: Watched, truth: Truth, draw: random.Random, *, greedy_only: bool) -> None:
        self.watched, self.engine, self.truth, self.draw = watched, watched.engine, truth, draw
        self.greedy_only = greedy_only
        self.open: dict[str, Answer] = {}
        self.finished: list[Answer] = []
        self.seen: Counter[str] = Counter()
        self.shared = draw.choices(range(truth.vocab_size), k=400)
        """Many prompts begin with some of these tokens."""

    def run(self, num_requests: int, tolerance: float) -> Counter[str]:
        """Returns how often each kind of event was seen."""
        draw, engine = self.draw, self.engine
        self._open_the_day()
        arrivals, num_arrived, steps = draw.choice([0.05, 0.3, 1.0]), 0, 0
        while num_arrived < num_requests or engine.has_work():
            while num_arrived < num_requests and draw.random() < arrivals:
                self._arrive(f"r{num_arrived}")
                num_arrived += 1
            self._interfere()
            if engine.has_work():
                before = engine.stats()
                self._step()
                after = engine.stats()
                moved = (
                    after.prefilled_tokens + after.generated_tokens > before.prefilled_tokens + before.generated_tokens
                )
                # Where steps overlap, all rows of a step may have ended or been sent back since it was planned.
                assert moved or after.finished != before.finished or engine.config.overlap == "on", (
                    "a step without progress"
                )
            steps += 1
            assert steps < 100 * num_requests + 10_000, "the traffic does not end"
        assert not self.open, f"{list(self.open)} have no end"
        self.watched.assert_nothing_left()
        if engine.config.prefix_cache == "on":
            self.seen["states kept"] += self.watched.assert_kept_is_right(tolerance, at_most=6)
        stop_ids = sorted(engine.generation_defaults.eos_token_ids)
        for answer in self.finished:
            self.truth.check(answer, stop_ids, engine.max_model_len, tolerance)
            self.seen[f"finished: {answer.finish_reason}"] += 1
        self.seen["preempted"] += engine.stats().preemptions - self.seen["sent back"]
        self.seen["tokens from the cache"] += engine.stats().cached_tokens
        self.seen["mixed steps"] += self.watched.workers.num_mixed
        self.seen["chunks before the last"] += self.watched.workers.num_chunks
        self.seen["planned ahead"] += self.watched.workers.num_ahead
        return self.seen

    def _open_the_day(self) -> None:
        """Undisturbed: requests that come in easily, but whose answers need three blocks each; then a second turn."""
        longest, vocab = self.engine.max_model_len, range(self.truth.vocab_size)
        prompts = [
            self.draw.choices(vocab, k=min(60, longest - 1)) for _ in range(self.engine.blueprint.memory.max_num_seqs)
        ]
        for turn in range(2):
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, seed=number)
                name = f"turn {turn} of {number}"
                self._add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0))
            while self.engine.has_work():
                self._step()
            said = self.finished[-1]
            prompts = [(said.request.prompt_token_ids + said.token_ids + [0])[: longest - 1]]

    def _arrive(self, name: str) -> None:
        draw, longest = self.draw, self.engine.max_model_len
        num_prompt = min(draw.choice([1, 2, 3, 20, 63, 64, 65, 130, draw.randint(1, 150)]), longest - 1)
        request = Request(
            request_id=name,
            prompt_token_ids=self._prompt(num_prompt),
            params=self._params(),
            arrival=0.0,
            cache_salt=draw.choice([None, None, None, "tenant"]),
        )
        self._add(request)
        if draw.random() < 0.1:
            self._abort(name)

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self.open[request.request_id] = Answer(request)

    def _abort(self, name: str) -> None:
        phase = "after its first token" if self.open.pop(name).token_ids else "before its first token"
        assert self.engine.abort(name, "disconnect")
        assert not self.engine.abort(name, "disconnect"), "aborted twice"
        self.seen[f"aborted {phase}"] += 1
        self.engine.check()

    def _prompt(self, length: int) -> list[int]:
        """What is shared with others, or what was said before, then something new."""
        draw = self.draw
        said = self.shared
        if self.finished and draw.random() < 0.3:
            answer = draw.choice(self.finished)
            said = answer.request.prompt_token_ids + answer.token_ids
            length = min(len(said) + draw.choice([1, 20, 70]), self.engine.max_model_len - 1)
        said = said[: draw.choice([0, length, length, draw.randint(0, length)])]
        return said + draw.choices(range(self.truth.vocab_size), k=length - len(said))

    def _params(self) -> SamplingParams:
        draw, vocab = self.draw, range(self.truth.vocab_size)
        max_tokens = draw.choice([1, 2, 10, 40, 70, None if draw.random() < 0.1 else 3])
        prompt_logprobs = draw.choice([None, None, None, 0, 3])
        if prompt_logprobs is not None and draw.random() < 0.3:
            max_tokens = 0
        common: dict[str, Any] = {
            "max_tokens": max_tokens,
            "seed": draw.getrandbits(60),
            "ignore_eos": draw.random() < 0.7,
            "stop_token_ids": tuple(draw.choices(vocab, k=draw.choice([0, 0, 2, 30]))),
            "logprobs": draw.choice([None, None, 0, 4]),
            "prompt_logprobs": prompt_logprobs,
        }
        if self.greedy_only or draw.random() < 0.5:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=draw.choice([0.3, 0.8, 1.5]),
            top_k=draw.choice([0, 0, 1, 5, 40]),
            top_p=draw.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=draw.choice([0.0, 0.0, 0.1]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            presence_penalty=draw.choice([0.0, 0.0, 0.7]),
            frequency_penalty=draw.choice([0.0, 0.0, -0.4]),
            logit_bias=draw.choice([{}, {}, {draw.choice(vocab): 5.0, draw.choice(vocab): -50.0}]),
            min_tokens=draw.choice([0, 0, 1]) if max_tokens != 0 else 0,
            **common,
        )

    def _interfere(self) -> None:
        draw, engine = self.draw, self.engine
        if self.open and draw.random() < 0.03:
            self._abort(draw.choice(list(self.open)))
        if self.open and draw.random() < 0.06:
            self.seen["sent back"] += engine.scheduler.preempt(draw.choice(list(self.open)))
            engine.check()

    def _step(self) -> None:
        for output in self.engine.step():
            answer = self.open[output.request_id]
            answer.add(output)
            if output.finish_reason is not None:
                self.finished.append(self.open.pop(output.request_id))
        self.watched.look()
