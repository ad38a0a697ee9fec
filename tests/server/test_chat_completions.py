"""POST /v1/chat/completions: shape, content, roles, streams, logprobs. The engine repeats the rendered prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running import EOS, TOKENIZER, Running

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


def rendered(messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    return TOKENIZER.encode(TOKENIZER.render_chat(messages, **kwargs), add_special_tokens=False)


def test_shape(server: Running) -> None:
    body = server.chat(messages=HELLO, max_tokens=100)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "user\nHello there", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["prompt_tokens"] == len(rendered(HELLO))
    assert body["usage"]["completion_tokens"] == rendered(HELLO).index(EOS) + 1


def test_without_a_limit_the_context_is_the_limit(server: Running) -> None:
    body = server.chat(messages=HELLO, ignore_eos=True)
    assert body["usage"]["total_tokens"] == 4096
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(server: Running, name: str) -> None:
    body = server.chat(messages=HELLO, **{name: 2})
    assert body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_gives_the_same(server: Running) -> None:
    asked = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 50}
    body = server.chat(**asked)
    chunks = server.events(PATH, **asked, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["usage"] == body["usage"]
    for index, choice in enumerate(body["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}
        told = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]


def test_logprobs(server: Running) -> None:
    (choice,) = server.chat(messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2)["choices"]
    entries = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in entries] == [entry["token"] for entry in entries]
    assert entries[0]["token"] == "<|im_start|>"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
    (plain,) = server.chat(messages=HELLO, max_tokens=3, logprobs=True)["choices"]
    assert plain["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    "content",
    [
        "Hello there",
        [{"type": "text", "text": "Hello there"}],
        [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}],
        ["Hello", " there"],
    ],
)
def test_content_as_text_or_parts(server: Running, content: Any) -> None:
    body = server.chat(messages=[{"role": "user", "content": content}], max_tokens=50)
    assert body["choices"][0]["message"]["content"] == "user\nHello there"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, *HELLO],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HELLO],
        [*HELLO, {"role": "system", "content": "a"}, {"role": "user", "content": "c"}],
        [{"role": "tool", "content": "42", "tool_call_id": "x"}],
        [*HELLO, {"role": "assistant", "content": "Hi"}],
        [*HELLO, {"role": "assistant", "content": None}],
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        [{"role": "user", "content": "Hi", "name": "Ann", "unknown": 1}],
    ],
)
def test_message_lists_of_agents(server: Running, messages: list[dict[str, Any]]) -> None:
    assert server.chat(messages=messages, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_template_arguments_and_openings(server: Running) -> None:
    def count(**fields: Any) -> int:
        tokens: int = server.chat(messages=HELLO, max_tokens=1, **fields)["usage"]["prompt_tokens"]
        return tokens

    assert count(chat_template_kwargs={"enable_thinking": True}) == len(rendered(HELLO, enable_thinking=True))
    assert count(add_generation_prompt=False) == len(rendered(HELLO, add_generation_prompt=False)) < count()


def test_an_open_last_message_is_gone_on_with(server: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    body = server.post("/tokenize", messages=messages, continue_final_message=True).json()
    assert TOKENIZER.decode(body["tokens"], False).endswith("<|im_start|>assistant\nWell, I")
    assert server.chat(messages=messages, continue_final_message=True, max_tokens=1)["choices"]
