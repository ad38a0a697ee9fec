"""Bad input over HTTP: each is refused with value, limit and remedy in the API's shape, and disturbs nobody else."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest

from deltaserve.core.request import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from deltaserve.server.protocol import CompletionRequest, UnknownFields, parse
from tests.server.running import Running, error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"prompt=hello", "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": 1e400}', "not valid JSON"),
    (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
    (b'{"prompt": "\\ud83d"}', "surrogate"),
    (b'{"prompt": "\\udc00 b"}', "surrogate"),
    (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"x": ' + b'{"x": ' * 50_000 + b"1" + b"}" * 50_001, "nested too deeply"),
    (b"[1, 2]", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b"null", "must be a JSON object"),
]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 1},
        {"prompt": "a", "temperature": 1},
        {"prompt": "a", "response_format": 1},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]},
    ],
)
@pytest.mark.parametrize("depth", [100, *range(900, 1000, 7)])
def test_depth_is_no_fault_of_the_server(server: Running, fields: dict[str, Any], depth: int) -> None:
    """Some depths can be read and not be written again."""
    body = json.dumps(fields).replace("1", "[" * depth + "]" * depth).encode()
    answer = server.http.post(CHAT if "messages" in fields else COMPLETIONS, content=body)
    # A call's arguments may be as deep as the template can write them.
    assert answer.status_code in ((200, 400) if "tool_calls" in str(fields) else (400,)), answer.text


@pytest.mark.parametrize(("body", "words"), BODIES, ids=range(len(BODIES)))  # bodies are too long for names
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(server: Running, path: str, body: bytes, words: str) -> None:
    told = error(server.http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert words in told["message"]
    assert told["type"] == "invalid_request_error"


INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    # fields, the param that is named, words of the message
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": None}, "prompt", "null; it must be a string, a list of strings"),
    ({"prompt": {}}, "prompt", "{}; it must be a string, a list of strings"),
    ({"prompt": False}, "prompt", "False; it must be a string, a list of strings"),
    ({"prompt": 0}, "prompt", "0; it must be a string, a list of strings"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "it must be a string, a list of strings"),
    ({"prompt": ["a", 5]}, "prompt", "it must be"),
    ({"prompt": [1, [2]]}, "prompt", "it must be"),
    ({"prompt": [True]}, "prompt", "it must be"),
    ({"prompt": [1.5]}, "prompt", "it must be"),
    ({"prompt": [5, 2048]}, "prompt", "token id 2048; the vocabulary has ids 0 to 2047"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [10**30]}, "prompt", "token id 1000"),
    ({"prompt": "a", "seed": 10**400}, "seed", "more than 30 digits"),
    ({"prompt": "a", "n": -(10**400)}, "n", "more than 30 digits"),
    ({"prompt": "a", "top_k": 10**400}, "top_k", "more than 30 digits"),
    ({"prompt": [5] * 4096}, "prompt", "4096 tokens, but the context of 4096 tokens leaves room for 4095"),
    ({"prompt": [[5], [5] * 4096]}, "prompt", "shorten"),
    ({"temperature": -0.5}, "temperature", "-0.5; it must lie in"),
    ({"temperature": "hot"}, "temperature", "'hot'; it must be of type float"),
    ({"temperature": [1]}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "0.0; it must lie in"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
    ({"top_k": 10**30}, "top_k", "it must lie in"),
    ({"min_p": 2}, "min_p", "2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": 4097}, "max_tokens", "the context holds 4096 tokens"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5; it must be of type int"),
    *(({name: True}, name, "True; it must be of type int") for name in INTEGERS),
    *(({name: True}, name, "True; it must be of type float") for name in FLOATS),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "int"),
    ({"logit_bias": {"5": True}}, "logit_bias[...]", "float"),
    ({"best_of": True}, "best_of", "True, and best_of is not supported"),
    ({"length_penalty": True}, "length_penalty", "not supported"),
    ({"use_beam_search": 0}, "use_beam_search", "not supported"),
    ({"min_tokens": 20}, "min_tokens", "above max_tokens 16"),
    ({"n": 0}, "n", "0; it must lie in"),
    ({"n": 10**9}, "n", f"{10**9}; it must lie in [1, {MAX_N}]"),
    ({"seed": 2**63}, "seed", "it must lie in"),
    ({"seed": 1.5}, "seed", "int"),
    ({"logprobs": 21}, "logprobs", f"[0, {MAX_LOGPROBS}]"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"stop": ["a"] * 5000}, "stop", f"5000 stop strings; at most {MAX_STOP_STRINGS}"),
    ({"stop": ["a" * 2000]}, "stop", "at most 1024"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": 5}, "stop", "5; it must be of type"),
    ({"stop": [5]}, "stop[0]", "it must be of type str"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "99999; the vocabulary"),
    ({"stop_token_ids": list(range(2000))}, "stop_token_ids", "at most 1024"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "99999; the vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a'; its keys are token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[...]", "float"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "at most 1024"),
    ({"stream": "yes"}, "stream", "'yes'; it must be of type bool"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"echo": 1}, "echo", "bool"),
    # known and not honoured
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "3, and best_of is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"guided_json": {}}, "guided_json", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "words"), FIELDS, ids=[f"{p}-{i}" for i, (_, p, _) in enumerate(FIELDS)])
def test_fields_of_a_completion(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    told = error(server.post(COMPLETIONS, **{"prompt": "a", **fields}), 400)
    assert words in told["message"]
    assert told["param"] == param
    if "stream" not in param:
        streamed = error(server.post(COMPLETIONS, **{"prompt": "a", "stream": True, **fields}), 400)
        assert streamed == told, "a stream is refused with the same status and words"


CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hello"}, "messages", "must be of type array"),
    ({"messages": [{"content": "no role"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "'wizard'; it must be one of system, developer"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content is 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text parts"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages", "no text part"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "no function with a name"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ({"logprobs": 3}, "logprobs", "bool"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; it must lie in"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0, which gives nothing"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens", "max_completion_tokens is 5000; the context holds"),
    ({"max_completion_tokens": True}, "max_completion_tokens", "int"),
    ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "above max_completion_tokens 5"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must lie in"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "int"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "give one"),
    ({"continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "may not set self"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs", "may not set documents"),
    ({"messages": HELLO * 8193}, "messages", "8193 messages; at most 8192"),
    ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages", "the context of 4096 tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_FIELDS)
def test_fields_of_a_chat(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    told = error(server.post(CHAT, **{"messages": HELLO, **fields}), 400)
    assert words in told["message"]
    assert told["param"] == param


def test_a_prompt_beyond_the_context_has_the_code_that_clients_look_for(server: Running) -> None:
    assert error(server.post(COMPLETIONS, prompt=[5] * 5000), 400)["code"] == "context_length_exceeded"
    told = error(server.post(CHAT, messages=[{"role": "user", "content": "a " * 9000}]), 400)
    assert told["code"] == "context_length_exceeded"


def test_minus_one_is_another_word_for_all(server: Running) -> None:
    server.complete(prompt="a", top_k=-1)


def test_fields_that_ask_for_nothing_are_no_fault(server: Running) -> None:
    server.chat(
        messages=HELLO,
        max_tokens=1,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        suffix=None,
        modalities=["text"],
        parallel_tool_calls=True,
        user="ann",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        temperature=None,
        stop=None,
        n=None,
        logit_bias=None,
    )
    server.complete(prompt="a", best_of=1, suffix="", echo=False, logprobs=None)


def test_missing_fields_are_named(server: Running) -> None:
    assert error(server.post(COMPLETIONS), 400)["param"] == "prompt"
    assert error(server.post(CHAT), 400)["param"] == "messages"
    assert error(server.post("/detokenize"), 400)["param"] == "tokens"
    assert error(server.post("/tokenize"), 400)["param"] == "prompt"


def test_an_unknown_field_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse(CompletionRequest, {"prompt": "a", "flavour": 1, "colour": 2, "user": "x"}, unknown)
    assert [record.getMessage() for record in caplog.records] == [
        "request field 'colour' is not known and is ignored",
        "request field 'flavour' is not known and is ignored",
    ]
    caplog.clear()
    parse(CompletionRequest, {"prompt": "a", "stream_options": {"include_usage": True, "continuous": True}}, unknown)
    assert [record.args for record in caplog.records] == [("stream_options.continuous",)]
    caplog.clear()
    for number in range(1000):
        parse(CompletionRequest, {"prompt": "a", str(number) + "x" * 500: 1}, unknown)
    assert len(caplog.records) < 300, "what is remembered of strangers' names is bounded"
    assert all(len(record.getMessage()) < 200 for record in caplog.records)
    assert max(map(len, unknown._warned)) < 100


def test_an_unknown_field_is_no_fault(server: Running) -> None:
    server.complete(prompt="a", flavour="salt")


def test_the_model_is_named_right_or_refused(server: Running) -> None:
    server.complete(prompt="a", model="scripted")
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        told = error(server.post(path, model="gpt", **fields), 404)
        assert (told["param"], told["code"]) == ("model", "model_not_found")
        assert "'scripted'" in told["message"]
    assert error(server.http.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/health", 405),
    ],
)
def test_wrong_paths_and_methods(server: Running, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    told = error(response, status)
    assert path in told["message"]
    if status == 405:
        assert response.headers["allow"] in told["message"]


def test_more_sequences_than_can_be_taken(server: Running) -> None:
    told = error(server.post(COMPLETIONS, prompt=["a"] * 100_000, n=100), 400)
    assert "100000 prompts times n 100 are 10000000 sequences; at most 1088" in told["message"]
    assert told["param"] == "prompt"


def test_what_the_engine_refuses_is_the_requests_fault(server: Running) -> None:
    """The API's own check lets this pass: the prompt only leaves no room for an answer in the engine."""
    told = error(server.post(COMPLETIONS, prompt=[5] * 4096, max_tokens=0, echo=True, logprobs=1), 400)
    assert "the engine has no room for 4096 tokens" in told["message"]
    told = error(server.post(COMPLETIONS, prompt=[5] * 4096, max_tokens=0, echo=True, logprobs=1, stream=True), 400)
    assert "the engine has no room for 4096 tokens" in told["message"]


def test_an_answer_that_fails_ends_alone(slow: Running) -> None:
    """Seed 9003 makes the scripted engine end a request as if its logits were not finite."""
    told = error(slow.post(COMPLETIONS, prompt="a", seed=9003), 500)
    assert "logits are not finite" in told["message"]
    assert told["type"] == "server_error"
    told = error(slow.post(COMPLETIONS, prompt="a", seed=9003, stream=True), 500)
    assert "logits are not finite" in told["message"]
    assert slow.complete(prompt="still here", max_tokens=2)["choices"]


def test_an_answer_that_fails_late_ends_its_stream_with_an_error(slow: Running) -> None:
    response = slow.post(COMPLETIONS, prompt="Mia buys 12 apples.", seed=9005, stream=True, n=2)
    assert response.status_code == 200
    *chunks, last, nothing = response.text.split("\n\n")
    assert len(chunks) >= 3
    assert nothing == ""
    assert "[DONE]" not in response.text
    assert "logits are not finite" in json.loads(last.removeprefix("data: "))["error"]["message"]
    slow.wait_until_idle()


def test_a_body_that_breaks_off_is_nobodys_error(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    assert server.complete(prompt="a", max_tokens=1)["choices"]
    assert not caplog.records


def test_bytes_that_are_no_http_disturb_nobody(server: Running) -> None:
    for garbage in (b"\x00\xff\x00\xff\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            peer.sendall(garbage)
    assert server.complete(prompt="a", max_tokens=1)["choices"]
