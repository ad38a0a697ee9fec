"""The fields of a request to SamplingParams. Knows neither text nor tokens."""

from __future__ import annotations

import re
from typing import Any

from deltaserve.core.request import MAX_LOGPROBS, SamplingParams
from deltaserve.server.errors import ApiError, bad_request
from deltaserve.server.protocol import ChatRequest, CompletionRequest, SamplingFields, shorten

CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code that clients look for when a prompt is too long."""
COMPLETION_MAX_TOKENS = 16
"""The API's default for completions; a chat's answer may fill the context."""

_SAME = [
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name not in ("stop", "stop_token_ids", "logit_bias")
]
"""Fields that mean the same on both sides."""


def completion_params(ask: CompletionRequest, defaults: dict[str, Any], max_model_len: int) -> SamplingParams:
    """Raises ApiError naming the field. `defaults` are the checkpoint's; the request overrides them."""
    values = _common(ask, {"max_tokens": COMPLETION_MAX_TOKENS, **defaults}, max_model_len)
    values["logprobs"] = ask.logprobs
    if ask.echo:
        # Without tokens to make, the echo alone is asked for: the least that the engine computes for it.
        values["prompt_logprobs"] = 0 if ask.logprobs is None and values["max_tokens"] == 0 else ask.logprobs
    return _checked(values, max_model_len)


def chat_params(ask: ChatRequest, defaults: dict[str, Any], max_model_len: int) -> SamplingParams:
    """Raises ApiError naming the field."""
    values = _common(ask, defaults, max_model_len)
    if ask.max_completion_tokens is not None:
        if ask.max_tokens not in (None, ask.max_completion_tokens):
            raise bad_request(
                f"max_completion_tokens is {ask.max_completion_tokens} and max_tokens is {ask.max_tokens}; give one",
                "max_completion_tokens",
            )
        values["max_tokens"] = ask.max_completion_tokens
    if ask.top_logprobs is not None and not ask.logprobs:
        raise bad_request(f"top_logprobs is {ask.top_logprobs}, which needs logprobs: true", "top_logprobs")
    if ask.top_logprobs is not None and not 0 <= ask.top_logprobs <= MAX_LOGPROBS:
        raise bad_request(
            f"top_logprobs is {ask.top_logprobs}; it must lie in [0, {MAX_LOGPROBS}]", "top_logprobs", "out_of_range"
        )
    if ask.logprobs:
        values["logprobs"] = ask.top_logprobs or 0
    try:
        return _checked(values, max_model_len)
    except ApiError as fault:
        if ask.max_completion_tokens is not None and ask.max_tokens is None:
            raise _renamed(fault, "max_tokens", "max_completion_tokens") from None
        raise


def _common(ask: SamplingFields, defaults: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    values = dict(defaults)
    if "max_tokens" in values:
        values["max_tokens"] = min(values["max_tokens"], max_model_len)
    for name in _SAME:
        value = getattr(ask, name)
        if value is not None:
            values[name] = value
    if values.get("top_k") == -1:  # what other servers take for "all"
        values["top_k"] = 0
    if ask.stop is not None:
        values["stop"] = (ask.stop,) if isinstance(ask.stop, str) else tuple(ask.stop)
    if ask.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(ask.stop_token_ids)
    if ask.logit_bias is not None:
        values["logit_bias"] = {_token_id(name): bias for name, bias in ask.logit_bias.items()}
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options is given, which needs stream: true", "stream_options")
    return values


def _token_id(name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", name):
        raise bad_request(f"logit_bias has the key {shorten(name)}; its keys are token ids", "logit_bias")
    return int(name)


def _checked(values: dict[str, Any], max_model_len: int) -> SamplingParams:
    params = SamplingParams(**values)
    try:
        params.validate()
    except ValueError as fault:
        raise name_the_field(fault) from None
    if params.max_tokens is not None and params.max_tokens > max_model_len:
        raise bad_request(
            f"max_tokens is {params.max_tokens}; the context holds {max_model_len} tokens, prompt and answer together",
            "max_tokens",
            CONTEXT_EXCEEDED,
        )
    return params


def _renamed(fault: ApiError, name: str, sent: str) -> ApiError:
    """The complaint under the name that the client has sent."""
    message = re.sub(rf"\b{name}\b", sent, fault.message)
    return ApiError(fault.status, message, sent if fault.param == name else fault.param, fault.code)


def name_the_field(fault: ValueError) -> ApiError:
    """A complaint about parameters, with the field that it speaks of as `param`."""
    words = re.findall(r"\w+", str(fault))
    fields = {*SamplingParams.__struct_fields__, "prompt", "cache_salt"}
    param = next((word for word in words if word in fields), None)
    if param == "prompt" and "context of" in str(fault):
        return bad_request(str(fault), param, CONTEXT_EXCEEDED)
    return bad_request(str(fault), param, "out_of_range" if param else None)
