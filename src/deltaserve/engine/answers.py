"""What `LLM` gives back. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.core.request import FinishReason
from deltaserve.engine.detokenizer import TextDelta, TokenText


@dataclass
class Completion:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] | None = None
    """One per token of `token_ids`, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for end-of-text."""
    error: str | None = None
    """Why finish_reason is "error"."""

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


@dataclass
class Generation:
    """The answers to one prompt."""

    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    """`params.n` of them, by index."""
    prompt_logprobs: list[TokenText] | None = None
    """One per prompt token, when asked for; the first has no logprob."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for the first answer."""
