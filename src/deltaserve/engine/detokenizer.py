"""Token ids to text as they come: whole characters only, stop strings found. Knows no queue and no protocol."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deltaserve.core.request import FinishReason, Output, SamplingParams, TokenLogprobs
from deltaserve.engine.tokenizer import Tokenizer


class TopToken(msgspec.Struct, frozen=True):
    token_id: int
    text: str
    bytes: bytes
    logprob: float


class TokenText(msgspec.Struct, frozen=True):
    """One token, its text and its logprobs."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float | None
    """None for the first token of a prompt."""
    rank: int | None
    offset: int
    """Where the token's text begins, in characters."""
    top: list[TopToken]


class TextDelta(msgspec.Struct, kw_only=True):
    """What one Output adds to one answer."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenText] | None = None
    """One per token of `token_ids`, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the one of `params.stop_token_ids`, that ended the answer; None for end-of-text."""
    error: str | None = None


def describe_tokens(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    skip_special_tokens: bool = True,
) -> list[TokenText]:
    """Text, bytes and offsets of a prompt's tokens beside their logprobs."""
    raise NotImplementedError


class TextStream:
    """The text of one answer. Without a tokenizer only token ids pass through, and stop strings are refused."""

    num_tokens: int
    """Tokens of the answer so far: those delivered, for usage."""
    finished: bool

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, *, skip_special_tokens: bool = True, offset: int = 0
    ) -> None:
        """`offset`: characters of text before the answer (an echoed prompt), counted into `TokenText.offset`."""
        raise NotImplementedError

    def feed(self, output: Output) -> TextDelta:
        """Whoever sees `delta.finish_reason` without `output.finish_reason` aborts the request with reason "stop"."""
        raise NotImplementedError
