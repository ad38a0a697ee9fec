"""The answers of the API: whole responses, and the chunks of streams as bytes ready to be sent.

Knows the wire format and nothing of where deltas come from. A stream's chunk is joined from pieces that were encoded
when the stream began: only the text of the delta is encoded for each one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

import deltaserve
from deltaserve.server.generation import Delta, Usage
from deltaserve.server.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs

FINGERPRINT = f"deltaserve-{deltaserve.__version__}"
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Where there were drafts."""


class CompletionChoice(msgspec.Struct):
    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    role: str = "assistant"
    content: str = ""
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True)
class Wishes:
    """What a client wants to be told besides the text."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    """At the end of a stream; a whole response always tells it."""


class Reply(msgspec.Struct, kw_only=True):
    """A whole response of either endpoint."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: UsageReply
    system_fingerprint: str = FINGERPRINT


def usage_reply(usage: Usage) -> UsageReply:
    details = CompletionDetails(usage.accepted_tokens, usage.rejected_tokens)
    return UsageReply(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptDetails(usage.cached_tokens),
        details if usage.accepted_tokens or usage.rejected_tokens else UNSET,
    )


class Style(ABC):
    """How one endpoint writes one response, whole or in chunks. Made for each request."""

    whole_object: str
    chunk_object: str
    """What the API calls the two."""

    def __init__(self, response_id: str, model: str, wishes: Wishes) -> None:
        self.response_id, self.model, self.created = response_id, model, int(time.time())
        self._wishes = wishes
        about = {
            "id": response_id,
            "object": self.chunk_object,
            "created": self.created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + encode(about)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if wishes.usage else b"]}\n\n"

    @abstractmethod
    def begin(self, num_answers: int) -> bytes:
        """Chunks before the first delta."""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """A delta's chunks; none when it brings nothing that a client could see."""

    @abstractmethod
    def whole(self, deltas: Sequence[Sequence[Delta]]) -> list[Any]:
        """The choices of a whole response, from each answer's deltas."""

    def end(self, usage: Usage) -> bytes:
        """Chunks after the last delta."""
        if not self._wishes.usage:
            return DONE
        return self._head + b'],"usage":' + encode(usage_reply(usage)) + b"}\n\n" + DONE

    def reply(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        return encode(
            Reply(
                id=self.response_id,
                object=self.whole_object,
                created=self.created,
                model=self.model,
                choices=self.whole(deltas),
                usage=usage_reply(usage),
            )
        )

    def _shows(self, delta: Delta, logprobs: object) -> bool:
        """Whether a chunk that is no end would tell anything."""
        return bool(delta.text) or logprobs is not None or (self._wishes.token_ids and bool(delta.token_ids))

    def _chunk(self, index: int, news: bytes, logprobs: bytes, token_ids: list[int], end: Delta | None = None) -> bytes:
        """`news` are the members that the endpoints write differently; `end` is the delta that ends the answer."""
        ids = b',"token_ids":' + encode(token_ids) if self._wishes.token_ids else b""
        if end is None:
            ending = b',"finish_reason":null}'
        else:
            stop = encode(end.stop_reason)
            ending = b',"finish_reason":' + encode(end.finish_reason) + b',"stop_reason":' + stop + b"}"
        return b'%b{"index":%d,%b,"logprobs":%b%b%b%b' % (self._head, index, news, logprobs, ids, ending, self._tail)

    def _token_ids(self, deltas: Sequence[Delta]) -> list[int] | UnsetType:
        return [token for delta in deltas for token in delta.token_ids] if self._wishes.token_ids else UNSET


class CompletionStyle(Style):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def begin(self, num_answers: int) -> bytes:
        return b""

    def chunk(self, delta: Delta) -> bytes:
        logprobs = self._logprobs([delta]) if delta.logprobs else None
        end = delta if delta.finish_reason is not None else None
        if end is None and not self._shows(delta, logprobs):
            return b""
        return self._chunk(delta.index, b'"text":' + encode(delta.text), encode(logprobs), delta.token_ids, end)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> list[Any]:
        return [
            CompletionChoice(
                index=index,
                text="".join([delta.text for delta in answer]),
                logprobs=self._logprobs(answer),
                finish_reason=answer[-1].finish_reason,
                stop_reason=answer[-1].stop_reason,
                token_ids=self._token_ids(answer),
            )
            for index, answer in enumerate(deltas)
        ]

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if not self._wishes.logprobs:
            return None
        return completion_logprobs([token for delta in deltas for token in delta.logprobs or ()])


class ChatStyle(Style):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def begin(self, num_answers: int) -> bytes:
        news = b'"delta":{"role":"assistant","content":""}'
        return b"".join([self._chunk(index, news, b"null", []) for index in range(num_answers)])

    def chunk(self, delta: Delta) -> bytes:
        logprobs = self._logprobs([delta]) if delta.logprobs else None
        chunks = b""
        if self._shows(delta, logprobs):
            news = b'"delta":{"content":' + encode(delta.text) + b"}"
            chunks = self._chunk(delta.index, news, encode(logprobs), delta.token_ids)
        if delta.finish_reason is not None:
            chunks += self._chunk(delta.index, b'"delta":{}', b"null", [], delta)
        return chunks

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> list[Any]:
        return [
            ChatChoice(
                index=index,
                message=ChatMessage(content="".join([delta.text for delta in answer])),
                logprobs=self._logprobs(answer),
                finish_reason=answer[-1].finish_reason,
                stop_reason=answer[-1].stop_reason,
                token_ids=self._token_ids(answer),
            )
            for index, answer in enumerate(deltas)
        ]

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        if not self._wishes.logprobs:
            return None
        return ChatLogprobs(chat_logprobs([token for delta in deltas for token in delta.logprobs or ()]))
