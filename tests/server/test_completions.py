"""POST /v1/completions: the forms of a prompt, n, echo, logprobs, stops, streams, usage. The engine repeats prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.engine import scripted
from tests.server.running import EOS, TOKENIZER, Running, error, running

TEXT = "Mia buys 12 apples. "
IDS = TOKENIZER.encode(TEXT)
PATH = "/v1/completions"


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def test_shape(server: Running) -> None:
    body = server.complete(model="scripted", prompt=TEXT, max_tokens=len(IDS))
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "scripted"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": TEXT,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"] == {
        "prompt_tokens": len(IDS),
        "completion_tokens": len(IDS),
        "total_tokens": 2 * len(IDS),
        "prompt_tokens_details": {"cached_tokens": len(IDS) // 2},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (TEXT, [TEXT]),
        ([TEXT, "two"], [TEXT, "two"]),
        (IDS, [TEXT]),
        ([IDS, TOKENIZER.encode("of another length")], [TEXT, "of another length"]),
    ],
    ids=["string", "strings", "ids", "lists of ids"],
)
def test_forms_of_a_prompt(server: Running, prompt: Any, texts: list[str]) -> None:
    body = server.complete(prompt=prompt, max_tokens=30)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    for choice, text in zip(body["choices"], texts, strict=True):
        assert choice["text"].startswith(text)
    assert body["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode(text)) for text in texts)
    assert body["usage"]["completion_tokens"] == 30 * len(texts)


def test_the_default_length_is_the_apis(server: Running) -> None:
    assert server.complete(prompt=TEXT)["usage"]["completion_tokens"] == 16


def test_n_answers_of_several_prompts_in_order(server: Running) -> None:
    body = server.complete(prompt=[TEXT, "two "], n=3, max_tokens=2)
    first, second = TOKENIZER.decode(IDS[:2]), TOKENIZER.decode(TOKENIZER.encode("two ")[:2])
    assert [choice["text"] for choice in body["choices"]] == [first] * 3 + [second] * 3
    prompt_tokens = len(IDS) + len(TOKENIZER.encode("two "))
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["completion_tokens"] == 12
    cached = len(IDS) // 2 + len(TOKENIZER.encode("two ")) // 2
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached, "of each prompt once"


def test_a_stream_gives_the_same(server: Running) -> None:
    asked = {"prompt": [TEXT, "zwölf Äpfel 🍎 "], "max_tokens": 40, "n": 2, "logprobs": 2, "echo": True}
    body = server.complete(**asked)
    chunks = server.events(PATH, **asked, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    for choice in body["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine][-1] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in mine[:-1])
        for name, values in choice["logprobs"].items():
            assert [value for c in mine if c["logprobs"] for value in c["logprobs"][name]] == values


def test_a_stream_never_splits_a_character(server: Running) -> None:
    text = "🍎🍏日本語é"
    chunks = server.events(PATH, prompt=text, max_tokens=len(TOKENIZER.encode(text)))
    assert text_of(chunks) == text
    assert all("�" not in choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert len(TOKENIZER.encode(text)) > len(text), "every token is a character: this proves nothing"


def test_a_stream_without_usage_has_none(server: Running) -> None:
    assert all("usage" not in chunk for chunk in server.events(PATH, prompt=TEXT, max_tokens=3))


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
def test_echo_with_logprobs_has_an_entry_for_each_token(server: Running, max_tokens: int, prompt: Any) -> None:
    (choice,) = server.complete(prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True)["choices"]
    logprobs = choice["logprobs"]
    count = len(IDS) + max_tokens
    assert {name: len(values) for name, values in logprobs.items()} == {
        "tokens": count,
        "token_logprobs": count,
        "top_logprobs": count,
        "text_offset": count,
    }
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for token, value, top in list(
        zip(*(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value == max(top.values()), "the same number in both lists"
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["text"].startswith(TEXT)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_the_end_of_text_token_has_its_entry(server: Running) -> None:
    """A client cuts the last entry off: it must be there, also when the generated token has no text."""
    (choice,) = server.complete(prompt=[EOS, 5, 6], max_tokens=1, logprobs=1, echo=True)["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["text"] == TOKENIZER.decode([EOS, 5, 6], skip_special_tokens=False)


def test_echo_alone(server: Running) -> None:
    (choice,) = server.complete(prompt=TEXT, max_tokens=0, echo=True)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (TEXT, None, "length")
    (choice,) = server.complete(prompt=TEXT, max_tokens=2, echo=True)["choices"]
    assert choice["text"] == TEXT + TOKENIZER.decode(IDS[:2])


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_of_the_answer(server: Running, num_top: int) -> None:
    (choice,) = server.complete(prompt=TEXT, max_tokens=3, logprobs=num_top)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert all(len(top) == max(1, num_top) for top in choice["logprobs"]["top_logprobs"])


def test_tokens_that_are_no_text_keep_apart(server: Running) -> None:
    (choice,) = server.complete(prompt="🍎🍎", max_tokens=2, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("bytes:\\x")
    assert len(set(choice["logprobs"]["tokens"])) == 2


def test_a_stop_string_ends_text_tokens_and_usage(server: Running) -> None:
    whole = server.complete(prompt=TEXT, max_tokens=60, logprobs=0)["choices"][0]
    body = server.complete(prompt=TEXT, max_tokens=60, logprobs=0, stop=["12 ap", "zzz"])
    (choice,) = body["choices"]
    assert choice["text"] == "Mia buys "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "12 ap")
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == body["usage"]["completion_tokens"] < 60
    assert whole["logprobs"]["tokens"][: len(tokens)] == tokens
    kept = server.complete(prompt=TEXT, max_tokens=60, stop="12 ap", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "Mia buys 12 ap"
    assert text_of(server.events(PATH, prompt=TEXT, max_tokens=60, stop="12 ap")) == "Mia buys "


def test_stop_token_ids(server: Running) -> None:
    (choice,) = server.complete(prompt=IDS, max_tokens=60, stop_token_ids=[IDS[2]])["choices"]
    assert choice["text"] == TOKENIZER.decode(IDS[:2])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", IDS[2])


def test_end_of_text_and_ignoring_it(server: Running) -> None:
    prompt = [*IDS, EOS]
    stopped = server.complete(prompt=prompt, max_tokens=100)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == TEXT
    ignored = server.complete(prompt=prompt, max_tokens=100, ignore_eos=True)
    assert ignored["usage"]["completion_tokens"] == 100
    shown = server.complete(prompt=prompt, max_tokens=100, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" in shown["choices"][0]["text"]


def test_the_context_bounds_an_answer(server: Running) -> None:
    body = server.complete(prompt=IDS, max_tokens=4096)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 4096


def test_token_ids_on_request(server: Running) -> None:
    (choice,) = server.complete(prompt=IDS, max_tokens=3, return_token_ids=True)["choices"]
    assert choice["token_ids"] == IDS[:3]
    chunks = server.events(PATH, prompt=IDS, max_tokens=3, return_token_ids=True)
    assert [token for chunk in chunks for c in chunk["choices"] for token in c["token_ids"]] == IDS[:3]


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with running("fast") as server:
        backend = dataclasses.replace(server.service.backend, tokenizer=None)
        server.service.backend = backend
        (choice,) = server.complete(prompt=IDS, max_tokens=3, logprobs=0)["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", IDS[:3])
        for path, fields in (
            (PATH, {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "text"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            assert "no tokenizer" in error(server.post(path, **fields), 400)["message"]
        told = error(server.post(PATH, prompt=IDS, stop="a"), 400)
        assert "no tokenizer" in told["message"]
        assert server.http.get("/tokenizer_info").status_code == 400


def test_drafts_are_told_in_the_usage(server: Running) -> None:
    """Tokens come as 1, 3, 3, 1: two steps of three drafts, two of them right. The other answer has none."""
    asked: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "return_token_ids": True, "seed": scripted.BURSTS}
    body = server.complete(**asked, n=2)
    assert [choice["token_ids"] for choice in body["choices"]] == [[5, 6, 7, 5, 6, 7, 5, 6]] * 2
    assert body["usage"]["completion_tokens"] == 16
    details = body["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    chunks = server.events(PATH, **asked, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens_details"] == details


def test_drafts_behind_a_stop_string_were_in_vain(server: Running) -> None:
    """The first of a step's three tokens ends the answer: the second draft was right, and is no token of it."""
    ids = TOKENIZER.encode("Mia buys 12 apples.")
    second = TOKENIZER.decode(ids[1:2]).strip()
    body = server.complete(prompt=ids, max_tokens=8, seed=scripted.BURSTS, stop=second)
    assert body["usage"]["completion_tokens"] == 2
    details = body["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2}
