"""Messages of the chat API to the text of a prompt: roles, parts and calls put into the shape that templates expect.

Knows the templates' habits (those of the Qwen family among them), no token id and no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from deltaserve.engine.validation import check_template_kwargs
from deltaserve.server.errors import ApiError, bad_request
from deltaserve.server.protocol import Message, shorten

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 8192
"""A template takes time for each, and holds up other requests meanwhile."""


class Renderer(Protocol):
    """A tokenizer that renders its checkpoint's chat template."""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Raises ValueError when the template refuses."""
        ...


def render(
    renderer: Renderer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt's text. A template that wants one system message at the beginning gets all of them there, as one.

    `continue_final_message` leaves the last message open, so that the answer goes on in it.
    Raises ApiError (400) for messages without meaning, and with the template's words for those that it refuses.
    """
    if not messages:
        raise bad_request("messages is empty; give at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages has {len(messages)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    kwargs = kwargs or {}
    try:
        check_template_kwargs(kwargs)
    except ValueError as fault:
        raise bad_request(str(fault), "chat_template_kwargs") from None
    if continue_final_message and messages[-1].role != "assistant":
        raise bad_request(
            f"continue_final_message needs a last message of the assistant, not of the {messages[-1].role}",
            "continue_final_message",
        )
    turns = [_turn(index, message) for index, message in enumerate(messages)]
    opening = not continue_final_message and add_generation_prompt
    mark = _mark_end(turns[-1]) if continue_final_message else ""

    def fill(turns: list[dict[str, Any]]) -> str:
        return renderer.render_chat(turns, add_generation_prompt=opening, chat_template=chat_template, **kwargs)

    try:
        text = fill(turns)
    except ValueError as refusal:
        gathered = _gather_system(turns)
        if gathered == turns:
            raise _refused(refusal) from None
        try:
            text = fill(gathered)
        except ValueError:
            raise _refused(refusal) from None
    return _leave_open(text, mark) if continue_final_message else text


def _refused(refusal: ValueError) -> ApiError:
    return bad_request(f"the chat template refuses these messages: {refusal}", "messages")


def _turn(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: a known role, content as one string, calls with arguments as objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise bad_request(f"{where}.role is {shorten(message.role)}; it must be one of {', '.join(ROLES)}", "messages")
    turn: dict[str, Any] = msgspec.to_builtins(message)
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = _text(where, message.content)
    if message.tool_calls:
        turn["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)]
    return turn


def _text(where: str, content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    raise bad_request(
        f"{where}.content is {shorten(content)}; it must be a string, a list of text parts or null", "messages"
    )


def _part(where: str, part: Any) -> str:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise bad_request(f"{where} is of type {shorten(kind)}; this model reads text parts only", "messages")
    raise bad_request(f'{where} is no text part; it must look like {{"type": "text", "text": "..."}}', "messages")


def _call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """Templates walk through a call's arguments, while the API carries them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} has no function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            arguments = decoded
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _gather_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one at the beginning."""
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else turns


def _mark_end(turn: dict[str, Any]) -> str:
    """Puts a mark that stands nowhere else behind the turn's text: its end is found by it after the template."""
    last, mark = turn["content"].strip(), secrets.token_hex(16)
    if not last:
        raise bad_request("the last message has no text to go on from", "continue_final_message")
    turn["content"] = last + mark
    return mark


def _leave_open(text: str, mark: str) -> str:
    """Cuts what the template puts behind the last message."""
    if mark not in text:
        raise bad_request("the chat template leaves out the last message's end", "continue_final_message")
    return text[: text.rindex(mark)]
