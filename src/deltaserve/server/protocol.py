"""The requests of the API as they come over the wire: their fields, and what is refused or passed over by name.

Knows no engine and no tokenizer. Bodies are read by msgspec; every refusal names the field, its value and its limit.
"""

from __future__ import annotations

import gc
import logging
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import msgspec

from deltaserve.server.errors import ApiError, bad_request

logger = logging.getLogger(__name__)

MAX_WARNED_NAMES = 200
MAX_NAME_CHARS = 64


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both generating endpoints take. A field that is absent or null takes its default."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn. Its role and content are looked at in chat.py."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


# ---- fields that are known and not honoured ------------------------------------------------------------------------


def _one_of(*neutral: Any) -> Callable[[Any], bool]:
    """Equal, and not a boolean in place of a number or the other way round."""
    return lambda value: any(isinstance(value, bool) == isinstance(it, bool) and value == it for it in neutral)


_NEVER = _one_of()

_STRUCTURED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
_UNSUPPORTED_ANYWHERE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_STRUCTURED, _NEVER),
    "response_format": _one_of({"type": "text"}),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1),
    "allowed_token_ids": _NEVER,
    "bad_words": _one_of([]),
    "logits_processors": _one_of([]),
    "truncate_prompt_tokens": _NEVER,
    "prompt_logprobs": _NEVER,
    "prompt_embeds": _NEVER,
    "echo": _one_of(False),
}
UNSUPPORTED: dict[type[msgspec.Struct], dict[str, Callable[[Any], bool]]] = {
    CompletionRequest: {
        **_UNSUPPORTED_ANYWHERE,
        "suffix": _one_of(""),
        "best_of": _one_of(1),
    },
    ChatRequest: {
        **_UNSUPPORTED_ANYWHERE,
        "tools": _one_of([]),
        "tool_choice": _one_of("none", "auto"),
        "parallel_tool_calls": _one_of(True, False),
        "functions": _one_of([]),
        "function_call": _one_of("none", "auto"),
        "modalities": _one_of(["text"]),
        "audio": _NEVER,
        "prediction": _NEVER,
        "reasoning_effort": _NEVER,
        "verbosity": _NEVER,
        "web_search_options": _NEVER,
        "documents": _one_of([]),
        "best_of": _one_of(1),
    },
}
"""Fields of the API (and widespread ones beside it) that would change the answer if they were honoured.

Each with a test of the values that ask for nothing; null always does.
"""

INERT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "priority", "request_id"}
)
"""Fields that say something about the request and change nothing in its answer."""


class UnknownFields:
    """Warns once of each field that nobody knows."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, names: set[str]) -> None:
        cut = {name[:MAX_NAME_CHARS] for name in names}  # what is remembered is short as well
        for name in sorted(islice(cut - self._warned, MAX_WARNED_NAMES - len(self._warned))):
            self._warned.add(name)
            logger.warning("request field %r is not known and is ignored", name)


# ---- reading -------------------------------------------------------------------------------------------------------

Read = TypeVar("Read", bound=msgspec.Struct)


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body. Raises ApiError for what is not a JSON object."""
    try:
        with _uncollected():
            value = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("the body is nested too deeply to be read") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise bad_request(f"the body is not valid JSON: {_explain(body, fault)}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is {_kind(value)}; it must be a JSON object")
    return value


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector, which looks at millions of new lists again and again while they are made: four times as
    long, with every thread waiting. What JSON gives has no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse(kind: type[Read], fields: dict[str, Any], unknown: UnknownFields) -> Read:
    """Reads a request's fields. Raises ApiError naming the field that is wrong or not honoured."""
    known = set(kind.__struct_fields__)
    unsupported = UNSUPPORTED.get(kind, {})
    strangers = fields.keys() - known
    for name in sorted(strangers & unsupported.keys()):
        if fields[name] is not None and not unsupported[name](fields[name]):
            raise bad_request(
                f"{name} is {shorten(fields[name])}, and {name} is not supported; leave it out", name, "unsupported"
            )
    unknown.warn(strangers - unsupported.keys() - INERT)
    options = fields.get("stream_options")
    if isinstance(options, dict):
        unknown.warn({f"stream_options.{name}" for name in options.keys() - set(StreamOptions.__struct_fields__)})
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as fault:
        raise _name_the_field(str(fault), fields) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply to be read") from None


class _Brief(reprlib.Repr):
    """Looks at the first few parts of a value only, however large or deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist = 4, 4, 20
        self.maxstring = self.maxlong = self.maxother = 60


def shorten(value: Any, limit: int = 60) -> str:
    """A value for a message."""
    text = repr(value[:limit]) if isinstance(value, str) else _Brief().repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _explain(body: bytes, fault: Exception) -> str:
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        return "it may hold a lone surrogate (half of a \\uD83D\\uDE00 pair), which is no character"
    return str(fault)


def _name_the_field(message: str, fields: Mapping[str, Any]) -> ApiError:
    """msgspec's message in our words: 'Expected `int | null`, got `str` - at `$.seed`'."""
    missing = re.match(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?$", message)
    if missing:
        where = missing[2] or ""
        param = f"{where}.{missing[1]}" if where else missing[1]
        return bad_request(f"{param} is missing; the request needs it", param, "missing_field")
    complaint, _, path = message.partition(" - at ")
    param = path.replace("`", "").replace("$.", "").replace("key in ", "") or None
    expected = re.match(r"Expected `(.*?)`", complaint)
    wanted = expected[1].replace(" | null", "") if expected else complaint
    name = re.match(r"\w+", param or "")
    value = f" is {shorten(fields[name[0]])}" if name and name[0] in fields else ""
    return bad_request(f"{param or 'the request'}{value}; it must be of type {wanted}", param, "wrong_type")


def _kind(value: Any) -> str:
    match value:
        case list():
            return "a list"
        case str():
            return "a string"
        case None:
            return "null"
        case bool():
            return "a boolean"
    return "a number"
