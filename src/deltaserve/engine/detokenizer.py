"""Token ids to text as they come: whole characters only, stop strings found. Knows no queue and no protocol."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from deltaserve.core.request import FinishReason, Output, SamplingParams, TokenLogprobs
from deltaserve.engine.stop_strings import StopStrings
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
    """Of the token alone: bytes that are no whole character are U+FFFD. Special tokens are written out."""
    bytes: bytes
    logprob: float | None
    """None for the first token of a prompt."""
    rank: int | None
    """1 for the most likely token."""
    offset: int
    """Where the token's characters begin in the text, or would begin if it has none there."""
    top: list[TopToken]


class TextDelta(msgspec.Struct, kw_only=True):
    """What one Output adds to one answer. Over an answer, the token ids, the logprobs and `num_tokens` agree."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenText] | None = None
    """One per token of `token_ids`, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the one of `params.stop_token_ids`, that ended the answer; None for end-of-text."""
    error: str | None = None


class Detokenizer:
    """Bytes of tokens to whole characters; the cost of a token does not depend on how many came before."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes. Bytes that no later byte can mend come as U+FFFD."""
        if self._tokenizer is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD for a character that stays incomplete."""
        return self._decoder.decode(b"", final=True)


def describe_tokens(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    skip_special_tokens: bool = True,
) -> list[TokenText]:
    """A prompt's tokens with their logprobs; offsets are those in the text that `Tokenizer.decode` gives."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    described = []
    offset = 0
    for token_id, scores in zip(token_ids, logprobs, strict=True):
        described.append(_describe(tokenizer, token_id, scores, offset))
        offset += len(detokenizer.feed(token_id))
    return described


class TextStream:
    """The text of one answer.

    The answer ends with the token that completes a stop string: what came after it, even in the same burst, is not part
    of the text, the token ids or the logprobs, and is not counted. Of stop strings that end at the same character the
    longest counts. A stop string that is complete before `min_tokens` tokens are there does not end the answer.
    Text that may yet become a stop string is held back; token ids and logprobs are not.
    The text of a stop token belongs to the answer only with `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        skip_special_tokens: bool = True,
        offset: int = 0,
        stops: StopStrings | None = None,
    ) -> None:
        """`offset`: characters of text before the answer (an echoed prompt), counted into `TokenText.offset`.

        `stops` are those of `params.stop`, built once for many streams. Without a tokenizer token ids pass through
        without text; raises ValueError when there are stop strings then.
        """
        if tokenizer is None and params.stop:
            raise ValueError("the model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        self.num_tokens = 0
        """Tokens of the answer so far, for usage."""
        self.finished = False
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = stops or StopStrings(params.stop)
        self._state = 0
        self._held = ""
        self._offset = offset

    def feed(self, output: Output) -> TextDelta:
        """What comes after the end is an empty delta.

        Whoever sees `delta.finish_reason` without `output.finish_reason` aborts the request with reason "stop".
        """
        if self.finished:
            return TextDelta()
        delta = TextDelta(error=output.error, logprobs=None if output.logprobs is None else [])
        for number, token_id in enumerate(output.token_ids):
            is_stop = output.stop_token_id is not None and number == len(output.token_ids) - 1
            self.num_tokens += 1
            delta.token_ids.append(token_id)
            if output.logprobs is not None and delta.logprobs is not None:
                delta.logprobs.append(_describe(self._tokenizer, token_id, output.logprobs[number], self._offset))
            hidden = is_stop and not self._params.include_stop_str_in_output
            if self._append("" if hidden else self._detokenizer.feed(token_id), delta):
                return delta
        if output.finish_reason is not None and not self._append(self._detokenizer.finish(), delta):
            delta.text += self._held
            delta.finish_reason = output.finish_reason
            if output.stop_token_id in self._params.stop_token_ids:
                delta.stop_reason = output.stop_token_id
            self.finished = True
        return delta

    def _append(self, text: str, delta: TextDelta) -> bool:
        """Move text into the delta, except for what is held back. True when a stop string ends the answer."""
        self._offset += len(text)
        if not self._params.stop:
            delta.text += text
            return False
        first = len(self._held)
        self._held += text
        may_end = self.num_tokens >= self._params.min_tokens
        for end, char in enumerate(text, first + 1):
            self._state = self._stops.step(self._state, char)
            length = self._stops.found[self._state]
            if length and may_end:
                delta.stop_reason = self._held[end - length : end]
                delta.text += self._held[: end if self._params.include_stop_str_in_output else end - length]
                delta.finish_reason = "stop"
                self.finished = True
                return True
        sure = len(self._held) - self._stops.depth[self._state]
        delta.text += self._held[:sure]
        self._held = self._held[sure:]
        return False


def _describe(tokenizer: Tokenizer | None, token_id: int, scores: TokenLogprobs | None, offset: int) -> TokenText:
    text, raw = _text_of(tokenizer, token_id)
    if scores is None:
        return TokenText(token_id, text, raw, None, None, offset, [])
    likely = zip(scores.top_ids, scores.top_logprobs, strict=True)
    top = [TopToken(other, *_text_of(tokenizer, other), logprob) for other, logprob in likely]
    return TokenText(token_id, text, raw, scores.logprob, scores.rank, offset, top)


def _text_of(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, bytes]:
    raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    return raw.decode(errors="replace"), raw
