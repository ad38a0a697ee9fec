"""Tokens and their logprobs in the two shapes of the API. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deltaserve.engine.detokenizer import TokenText, TopToken

LOWEST = -9999.0
"""JSON has no infinity; the API writes a token that cannot come like this."""


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. A prompt's first token has neither a logprob nor rivals: null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenWithTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenWithTop]
    refusal: None = None


def completion_logprobs(tokens: Sequence[TokenText]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_name(token) for token in tokens],
        token_logprobs=[None if token.logprob is None else max(token.logprob, LOWEST) for token in tokens],
        top_logprobs=[None if token.logprob is None else _rivals(token, token.logprob) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Sequence[TokenText]) -> list[ChatTokenWithTop]:
    return [
        ChatTokenWithTop(
            token=token.text,
            logprob=LOWEST if token.logprob is None else max(token.logprob, LOWEST),
            bytes=list(token.bytes),
            top_logprobs=[ChatToken(top.text, max(top.logprob, LOWEST), list(top.bytes)) for top in token.top],
        )
        for token in tokens
    ]


def _rivals(token: TokenText, logprob: float) -> dict[str, float]:
    """The likeliest tokens and the token itself, by name. Two that share a name keep the likelier's number."""
    rivals: dict[str, float] = {}
    for top in token.top:
        rivals.setdefault(_name(top), max(top.logprob, LOWEST))
    rivals.setdefault(_name(token), max(logprob, LOWEST))
    return rivals


def _name(token: TokenText | TopToken) -> str:
    """A token's text, or its bytes in the API's notation where they are no text."""
    try:
        token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text
