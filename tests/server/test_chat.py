"""Messages to a prompt, without a server: templates that are strict, and the shape that messages are put into."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deltaserve.engine.chat_template import ChatTemplate
from deltaserve.server.chat import render
from deltaserve.server.errors import ApiError
from deltaserve.server.protocol import Message
from tests.server.running import TOKENIZER

STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content }}
{%- endfor %}
{%- if not (messages | selectattr('role', 'equalto', 'user') | list) %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
"""What several checkpoints' templates insist on."""


class Template:
    """A renderer of one template that remembers what it was given."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.given: list[dict[str, Any]] = []

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        self.given = messages
        variables = {"add_generation_prompt": add_generation_prompt, **kwargs}
        return ChatTemplate(chat_template or self.source).render(messages, tools, variables)


def messages(*turns: dict[str, Any]) -> list[Message]:
    return msgspec.convert(list(turns), list[Message])


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "turns",
    [
        [say("system", "a"), say("system", "b"), say("user", "c")],
        [say("system", "a"), say("user", "c"), say("system", "b")],
        [say("user", "c"), say("developer", "a"), say("developer", "b")],
    ],
)
def test_a_strict_template_gets_one_system_message_first(turns: list[dict[str, Any]]) -> None:
    assert render(Template(STRICT), messages(*turns)) == "[system]a\n\nb[user]c[assistant]"


def test_messages_that_a_template_takes_stay_where_they_are() -> None:
    turns = [say("system", "a"), say("user", "b"), say("system", "c")]
    text = render(TOKENIZER, messages(*turns))
    assert text.index("a<|im_end|>") < text.index("b<|im_end|>") < text.index("c<|im_end|>")


def test_what_a_template_refuses_in_any_order_is_told_in_its_words() -> None:
    with pytest.raises(ApiError, match="No user query found in messages") as caught:
        render(Template(STRICT), messages(say("tool", "42")))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(ApiError, match="System message must be at the beginning"):
        render(Template(STRICT), messages(say("assistant", "x"), say("system", "a")))


@pytest.mark.parametrize("arguments", ['{"a": [1, "b"]}', {"a": [1, "b"]}])
def test_arguments_of_calls_are_objects(arguments: Any) -> None:
    template = Template("{{ messages[0].tool_calls[0].function.arguments.items() | list }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    render(template, messages({"role": "assistant", "content": None, "tool_calls": [call]}))
    assert template.given[0]["content"] == ""
    assert template.given[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1, "b"]}}


@pytest.mark.parametrize(("arguments", "kept"), [("not json", "not json"), ("[1]", "[1]"), (None, {})])
def test_arguments_that_are_no_object_stay(arguments: Any, kept: Any) -> None:
    template = Template("x")
    call = {"function": {"name": "f", "arguments": arguments}}
    render(template, messages({"role": "assistant", "tool_calls": [call]}))
    assert template.given[0]["tool_calls"][0]["function"]["arguments"] == kept


def test_fields_that_templates_read_come_through() -> None:
    template = Template("x")
    turn = {"role": "assistant", "content": "a", "name": "n", "reasoning_content": "r", "tool_call_id": "i"}
    render(template, messages(turn))
    assert template.given == [turn]


def test_a_template_of_the_operators_replaces_the_checkpoints() -> None:
    text = render(
        TOKENIZER,
        messages(say("user", "hi")),
        chat_template="<{{ messages[0].content }}{{ mood }}>",
        kwargs={"mood": "!"},
    )
    assert text == "<hi!>"


def test_an_open_last_message_ends_the_text() -> None:
    turns = messages(say("user", "hi"), say("assistant", "Well,  "))
    text = render(TOKENIZER, turns, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nWell,")
    for last in ("|", "end", "<", "i", "im_end", "assistant", "<think>x</think>So"):
        open_text = render(TOKENIZER, messages(say("user", "hi"), say("assistant", last)), continue_final_message=True)
        assert open_text.endswith("<|im_start|>assistant\n" + last.removeprefix("<think>x</think>"))
    with pytest.raises(ApiError, match="no text to go on from"):
        render(TOKENIZER, messages(say("user", "hi"), say("assistant", "")), continue_final_message=True)
