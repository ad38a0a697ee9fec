"""What a user asks for and what comes back, as plain messages. Knows no tensor, no text and no queue."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "error"]

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends.

    The order of operations on a token's logits: repetition penalty, frequency and presence penalties, logit bias, the
    ban of `min_tokens`; then the temperature; then top-k, top-p of what top-k left, min-p; then one draw from what is
    left, with noise that is a function of the seed and the token's position alone. Tokens with equal logits fare alike:
    all are kept or all are cut, and at temperature 0 the lowest id is taken. Logprobs are those of the raw logits.

    Raises (from `validate`): ValueError naming the value, the limit and the way out.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Drops tokens whose probability is below min_p times the largest."""
    repetition_penalty: float = 1.0
    """Over prompt and output: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that is in the output; the prompt does not count."""
    frequency_penalty: float = 0.0
    """Taken off as often as the token is in the output; the prompt does not count."""
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """No end-of-text and no stop token id among the first so many output tokens; a stop string ends the request only
    once so many are there."""
    max_tokens: int | None = None
    """None: up to the context. 0: the prompt's logprobs only."""
    seed: int | None = None
    """None: the engine draws one. Equal seeds give equal tokens, whoever shares the batch."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """None: none. k: each token's logprob and those of the k most likely tokens."""
    prompt_logprobs: int | None = None

    def validate(self) -> None:
        """Check all that can be judged without a model. Raises ValueError."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("n", self.n, 1, MAX_N)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which gives nothing; ask for at least 1, or for prompt logprobs (echo)")
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _within(name, count, 0, MAX_LOGPROBS)
        self._validate_lists()

    def of_answer(self, number: int) -> SamplingParams:
        """What the request of answer `number` of `n` gets: its own seed, so that answers differ and can be repeated.

        The first answer is that of n = 1. Noise is hashed from the seed: neighbouring seeds have nothing in common.
        """
        seed = None if self.seed is None else (self.seed + number + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)

    def _validate_lists(self) -> None:
        _at_most("stop strings", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            if not text:
                raise ValueError("a stop string is empty; remove it")
            _at_most("characters of a stop string", len(text), MAX_STOP_STRING_CHARS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _at_most("entries of logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -100.0, 100.0)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute. `n` answers are n requests: by here `params.n` no longer matters."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    """time.time() at the API, seconds."""
    cache_salt: str | None = None
    """Requests share the memory of equal prefixes only with those of the same salt."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability (natural log, raw logits) of one token, and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]
    """Descending; the same float as `logprob` where the token is among them."""


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step adds to one request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token (the first is None), complete, once, with the first token or the end."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request; it is the last of `token_ids`."""
    error: str | None = None
    """Why finish_reason is "error"."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, told with the first output."""
    num_draft_tokens: int = 0
    """Drafts that were verified in this step."""
    num_accepted_tokens: int = 0
    """Those of them that were right. They are among `token_ids`, unless the request ended before them."""


def _within(name: str, value: float, low: float, high: float, above_low: bool = False) -> None:
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value}; it must be a number")
    if not low <= value <= high or (above_low and value == low):  # NaN lies nowhere
        bracket = "(" if above_low else "["
        told = str(value) if isinstance(value, float) or abs(value) < 10**30 else "a number of more than 30 digits"
        raise ValueError(f"{name} is {told}; it must lie in {bracket}{low}, {high}]")


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"{count} {name}; at most {limit} are allowed")
