"""A server under measurement, over the OpenAI API: what it says of itself, and one streamed answer as a record.

Tokens are counted by the server's usage. How many of them a chunk carries is known where chunks bring token ids;
elsewhere an answer's tokens are spread evenly over its chunks. Knows no load and no statistics.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from deltaserve.bench.wire import Answer, Client

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
EXTRAS: list[dict[str, Any]] = [{"ignore_eos": True, "return_token_ids": True}, {"ignore_eos": True}, {}]
"""Fields beyond the API, from all to none: the first set that a server does not refuse is sent with every request."""
REFUSALS = (400, 401, 403, 404, 413, 422)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    def words(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Times are `time.perf_counter()`."""

    due: float
    """When it was to be sent. Connecting and any delay of the client count as waiting for the server."""
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When news came, and how much: tokens where `is_counted`, else events with text."""
    is_counted: bool = True
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the server did not compute; None where it does not say."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    failure: str | None = None
    is_refused: bool = False
    """The server does not want such a request, whenever it is sent."""


class _Listener:
    """Turns the events of one stream into its record."""

    def __init__(self, record: Record, keep: bool) -> None:
        self._record, self._keep = record, keep
        self._usage: _Usage | None = None
        self._has_ended = False

    def __call__(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            self._has_ended = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as fault:
            record.failure = record.failure or f"an event cannot be read: {fault}"
            return
        if chunk.error is not None:
            record.failure = record.failure or f"error in the stream: {_message(chunk.error)}"
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            words, ids = choice.words(), choice.token_ids
            if ids is None and words:
                record.is_counted = False
            count = len(ids) if ids is not None else int(bool(words))
            if count:
                chunks = record.chunks
                if chunks and chunks[-1][0] == now:  # read at once, so they came at once
                    chunks[-1] = (now, chunks[-1][1] + count)
                else:
                    chunks.append((now, count))
            if self._keep:
                record.text += words
                record.token_ids += ids or []

    def end(self) -> None:
        """Counts, and says what is missing."""
        record, usage = self._record, self._usage
        if record.failure is not None:
            return
        if not self._has_ended:
            record.failure = "the stream ended without [DONE]"
        elif usage is None:
            record.failure = "the stream brought no usage"
        else:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens


class Target:
    """A server. `open` first; then `ask` as often and as much at once as wanted."""

    def __init__(self, url: str, model: str | None, api_key: str | None, api: Api, timeout: float) -> None:
        self._client = Client(url, api_key)
        self.url = self._client.origin
        self.about: dict[str, Any] = {"url": self.url}
        """What the server says of itself."""
        self.extras: dict[str, Any] = {}
        self._model, self._api, self._timeout = model, api, timeout

    async def open(self) -> None:
        """Asks the server who it is. Raises RuntimeError when it is not there or does not want to talk."""
        try:
            async with asyncio.timeout(min(self._timeout, 30.0)):
                answer = await self._client.get("/v1/models")
                version = await self._client.get("/version")
        except OSError as fault:
            reason = str(fault) or "no answer for too long"
            raise RuntimeError(f"no server answers at {self.url}: {reason}") from None
        if b"server" in answer.headers:
            self.about["server"] = answer.headers[b"server"].decode(errors="replace")
        if version.status == 200:
            self.about["version"] = _told(version).get("version")
        cards = [card for card in _told(answer).get("data") or [] if isinstance(card, dict)]
        if answer.status == 200 and cards:
            card = next((card for card in cards if card.get("id") == self._model), cards[0])
            self._model = self._model or card.get("id")
            self.about |= {name: card[name] for name in ("owned_by", "max_model_len") if name in card}
        elif answer.status != 404 or self._model is None:
            raise RuntimeError(f"{self.url}/v1/models answers {_failure(answer)}")
        self.about["model"] = self._model

    async def learn(self, body: dict[str, Any]) -> Record:
        """Sends a request that counts for nothing, and finds out which extra fields the server takes.

        Raises RuntimeError when the server refuses it whatever is left out: no load would fare better.
        """
        for extras in EXTRAS:
            self.extras = dict(extras)
            record = await self.ask(self.encode(body), time.perf_counter())
            if not record.is_refused:
                self.about["extra_fields"] = sorted(extras)
                return record
        raise RuntimeError(f"{self.url} refuses the first request: {record.failure}")

    def encode(self, body: dict[str, Any]) -> bytes:
        """A request as it goes over the wire; `body` has what is its own."""
        stream = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(stream | self.extras | body)

    async def ask(self, payload: bytes, due: float, keep: bool = False) -> Record:
        """Sends what `encode` made; every failure is a record too. With `keep` the answer itself is in it."""
        record = Record(due, time.perf_counter())
        listener = _Listener(record, keep)
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client.post(PATHS[self._api], payload, listener)
            if answer.status != 200:
                record.failure, record.is_refused = _failure(answer), answer.status in REFUSALS
            else:
                listener.end()
        except TimeoutError:
            record.failure = f"no end after {self._timeout:g} s"
        except OSError as fault:
            record.failure = str(fault) or type(fault).__name__
        record.ended = time.perf_counter()
        return record

    def close(self) -> None:
        self._client.close()


def _told(answer: Answer) -> dict[str, Any]:
    """The object that an answer's body is, or an empty one."""
    try:
        value = json.loads(answer.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _failure(answer: Answer) -> str:
    told = _told(answer)
    words = _message(told.get("error") or told.get("message") or told.get("detail") or "")
    return f"HTTP {answer.status}: {words}" if words else f"HTTP {answer.status}"


def _message(error: Any) -> str:
    """An error's own words, on one line."""
    words = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(words).split())[:200]
