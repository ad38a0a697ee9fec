"""The openai package for Python against the running server: both APIs, streaming and not, errors, aborted streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import API_KEY
from tests.serving import Server

openai = pytest.importorskip("openai", reason="needs the openai package: make test-clients")

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("idle")]

QUESTION = "Question: Tom has 17 apples. He buys 25 more. How many apples does Tom have?\nAnswer:"
CHAT = [{"role": "user", "content": "Ada has 12 pens and gives away 5 of them. How many pens does Ada have left?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    (only,) = client.models.list().data
    name: str = only.id
    return name


def test_completion_is_transformers_answer(client: Any, model: str, continue_text: Callable[[str, int], str]) -> None:
    expected = continue_text(QUESTION, 48)
    answer = client.completions.create(model=model, prompt=QUESTION, max_tokens=48, temperature=0)
    assert answer.choices[0].text == expected
    assert answer.usage.completion_tokens <= 48
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")

    pieces = client.completions.create(model=model, prompt=QUESTION, max_tokens=48, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected


def test_chat_is_transformers_answer(
    client: Any,
    model: str,
    continue_text: Callable[[str, int], str],
    render: Callable[[list[dict[str, str]]], str],
) -> None:
    expected = continue_text(render(CHAT), 64)
    answer = client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=64, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream_equals_the_whole(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": CHAT, "max_tokens": 64, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    pieces = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == whole.choices[0].finish_reason
    assert pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage


def test_several_prompts_and_answers_in_order(client: Any, model: str) -> None:
    prompts = ["Question: What is 2 + 3?\nAnswer:", "Question: What is 40 + 2?\nAnswer:"]
    ask: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0}
    together = client.completions.create(prompt=prompts, n=2, **ask).choices
    assert [choice.index for choice in together] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, **ask).choices[0].text
        assert [choice.text for choice in together[2 * number : 2 * number + 2]] == [alone, alone]


def test_seed_repeats_a_sample(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "prompt": "Once", "max_tokens": 24, "temperature": 1.5}
    texts = [client.completions.create(**ask, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_of_prompt_and_answer(client: Any, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=QUESTION, max_tokens=3, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert answer.text.startswith(QUESTION)
    assert "".join(answer.logprobs.tokens) == answer.text
    assert answer.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in answer.logprobs.token_logprobs[1:])

    chat = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    for entry in chat.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the most likely token"


def test_stop_string_ends_the_text(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "prompt": QUESTION, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    word = whole.split()[3]
    cut = client.completions.create(**ask, stop=word).choices[0]
    assert cut.text == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("error", "change"),
    [
        ("BadRequestError", {"temperature": -1.0}),
        ("BadRequestError", {"max_tokens": 10**6}),
        ("BadRequestError", {"prompt": "word " * 9000}),
        ("NotFoundError", {"model": "nobody/knows-this"}),
    ],
)
def test_errors_are_typed(client: Any, model: str, error: str, change: dict[str, Any]) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.completions.create(**({"model": model, "prompt": "Hi", "max_tokens": 1} | change))
    assert caught.value.body["message"]


def test_a_wrong_key_is_refused(server: Server, model: str) -> None:
    stranger = openai.OpenAI(base_url=server.base_url, api_key="sk-wrong", max_retries=0, timeout=60)
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=model, prompt="Hi", max_tokens=1)


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_aborted_stream_gives_everything_back(client: Any, model: str, server: Server, is_chat: bool) -> None:
    ask: dict[str, Any] = {"model": model, "max_tokens": 3000, "extra_body": {"ignore_eos": True}, "stream": True}
    if is_chat:
        stream = client.chat.completions.create(messages=CHAT, **ask)
    else:
        stream = client.completions.create(prompt=QUESTION, **ask)
    for _, _ in zip(range(3), stream, strict=False):
        assert server.in_use()["requests_running"] >= 1
    stream.close()
    server.wait_until_idle(seconds=5)
    assert client.completions.create(model=model, prompt=QUESTION, max_tokens=4, temperature=0).choices[0].text
