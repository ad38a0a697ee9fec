"""One HTTP request's answers: prompts times n sequences, submitted together, turned into text as their tokens come.

Knows no wire format: the completions and chat endpoints put these deltas into their shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaserve.core.request import FinishReason, Output, Request, SamplingParams
from deltaserve.engine.client import EngineClient
from deltaserve.engine.detokenizer import TextDelta, TextStream, TokenText, describe_tokens
from deltaserve.engine.metrics import Metrics
from deltaserve.engine.stop_strings import StopStrings
from deltaserve.engine.stream import Stream
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.engine.validation import validate
from deltaserve.server.errors import ApiError
from deltaserve.server.params import name_the_field


@dataclass(frozen=True)
class Prompt:
    """What one answer goes on from."""

    token_ids: list[int]
    echo: str | None = None
    """The prompt's text, where the answer repeats it."""


@dataclass
class Usage:
    """Tokens for the bill: each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that became tokens of an answer."""
    rejected_tokens: int = 0
    """Drafts that were verified in vain."""


@dataclass(frozen=True)
class Delta:
    """News of one answer. `index` is its place in the response."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenText] | None
    """Of the prompt's tokens, when those are echoed, and of `token_ids`."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None

    def followed_by(self, later: Delta) -> Delta:
        """Both as one."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        text, token_ids = self.text + later.text, self.token_ids + later.token_ids
        return Delta(self.index, text, token_ids, logprobs, later.finish_reason, later.stop_reason)


@dataclass
class _Answer:
    """One sequence on its way."""

    prompt: Prompt
    stream: TextStream
    began: bool = False
    last: float | None = None
    """When its latest tokens came, seconds of the monotonic clock; None before the first."""


@dataclass(frozen=True)
class Backend:
    """What every generation needs."""

    client: EngineClient
    tokenizer: Tokenizer | None
    metrics: Metrics


class Generation:
    """Submitted by the constructor; `close` always, at the latest when the client has gone.

    Raises (from the constructor) ApiError for a request that cannot be computed, OverloadedError, EngineStoppedError.
    """

    def __init__(
        self,
        backend: Backend,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        skip_special_tokens: bool,
        cache_salt: str | None,
        began: float,
    ) -> None:
        """`began`: when the HTTP request came, seconds of the monotonic clock."""
        self._backend, self._skip_special_tokens = backend, skip_special_tokens
        self._params = params
        self._began = began
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        try:
            stops = StopStrings(params.stop)
            self._answers = [
                _Answer(prompt, self._open_text(prompt, stops)) for prompt in prompts for _ in range(params.n)
            ]
            requests = self._requests(request_id, cache_salt)
            for request in requests[:: params.n]:
                validate(request, backend.client.info.vocab_size, backend.client.info.max_model_len)
        except ValueError as fault:
            raise name_the_field(fault) from None
        self._num_open = len(requests)
        self._stream: Stream = backend.client.submit(requests)
        backend.metrics.count_prompt(self.usage.prompt_tokens)

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    async def next(self) -> list[Delta]:
        """News, one delta for each answer that has some; empty when every answer has ended.

        Raises ApiError for an answer that fails, and what `Stream.next` raises.
        """
        while self._num_open:
            outputs = await self._stream.next()
            now = time.monotonic()
            news: dict[int, Delta] = {}
            for index, output in outputs:
                delta = self._advance(index, output, now)
                if delta is not None:
                    news[index] = news[index].followed_by(delta) if index in news else delta
            if news:
                return list(news.values())
        return []

    async def collect(self, take: Callable[[Delta], None]) -> None:
        """Hands out all deltas to the end."""
        while deltas := await self.next():
            for delta in deltas:
                take(delta)

    def close(self, reason: str = "disconnect") -> None:
        """Ends what still runs. Harmless when repeated."""
        self._stream.close(reason)

    def _open_text(self, prompt: Prompt, stops: StopStrings) -> TextStream:
        return TextStream(
            self._backend.tokenizer,
            self._params,
            skip_special_tokens=self._skip_special_tokens,
            offset=len(prompt.echo or ""),
            stops=stops,
        )

    def _requests(self, request_id: str, cache_salt: str | None) -> list[Request]:
        arrival, n = time.time(), self._params.n
        variants = [self._params.of_answer(number) for number in range(n)]
        return [
            Request(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=answer.prompt.token_ids,
                params=variants[index % n],
                arrival=arrival,
                cache_salt=cache_salt,
            )
            for index, answer in enumerate(self._answers)
        ]

    def _advance(self, index: int, output: Output, now: float) -> Delta | None:
        answer = self._answers[index]
        if answer.stream.finished:
            return None
        if output.finish_reason == "error":
            raise ApiError(500, f"the answer ended early: {output.error}", code="generation_failed")
        text = answer.stream.feed(output)
        self._measure(index, output, text, now)
        delta = Delta(index, text.text, text.token_ids, text.logprobs, text.finish_reason, text.stop_reason)
        if not answer.began:
            answer.began = True
            delta = self._with_prompt(answer.prompt, delta, output)
        if text.finish_reason is not None:
            self._num_open -= 1
            if output.finish_reason is None:
                self._stream.cancel(index, "stop")
        return delta

    def _measure(self, index: int, output: Output, text: TextDelta, now: float) -> None:
        answer, metrics, usage = self._answers[index], self._backend.metrics, self.usage
        if not answer.began and index % self._params.n == 0:
            usage.cached_tokens += output.num_cached_tokens
        if text.token_ids:
            if answer.last is None:
                metrics.observe_first(now - self._began)
            else:
                metrics.observe_gap(now - answer.last, len(text.token_ids))
            answer.last = now
        num_accepted = min(output.num_accepted_tokens, len(text.token_ids))  # a stop string may come before the others
        usage.accepted_tokens += num_accepted
        usage.rejected_tokens += output.num_draft_tokens - num_accepted
        usage.completion_tokens += len(text.token_ids)
        if text.finish_reason is not None:
            metrics.observe_end(now - self._began)

    def _with_prompt(self, prompt: Prompt, delta: Delta, output: Output) -> Delta:
        """The first delta of an answer that repeats its prompt."""
        if prompt.echo is None:
            return delta
        logprobs = delta.logprobs
        if output.prompt_logprobs is not None and self._params.logprobs is not None:
            told = describe_tokens(self._backend.tokenizer, prompt.token_ids, output.prompt_logprobs, False)
            logprobs = told + (logprobs or [])
        return Delta(
            delta.index, prompt.echo + delta.text, delta.token_ids, logprobs, delta.finish_reason, delta.stop_reason
        )
