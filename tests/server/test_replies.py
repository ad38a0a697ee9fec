"""Chunks are joined from bytes: each is valid JSON, says what the delta says, and nothing is sent for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaserve.engine.detokenizer import TokenText, TopToken
from deltaserve.server.generation import Delta, Usage
from deltaserve.server.logprobs import LOWEST
from deltaserve.server.replies import DONE, ChatStyle, CompletionStyle, Style, Wishes

NASTY = 'quote " backslash \\ newline \n null \x00 emoji 🍎 line \u2028 </script>'
TOKEN = TokenText(5, "a", b"a", -0.5, 1, 0, [TopToken(5, "a", b"a", -0.5), TopToken(6, "b", b"b", float("-inf"))])
STYLES: list[type[Style]] = [CompletionStyle, ChatStyle]


def delta(text: str = "", logprobs: list[TokenText] | None = None, finish: Any = None, index: int = 3) -> Delta:
    return Delta(index, text, [5], logprobs, finish, None)


def events(data: bytes) -> list[dict[str, Any]]:
    *lines, last = data.split(b"\n\n")
    assert last == b""
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_chunk_says_what_the_delta_says(kind: type[Style], include_usage: bool) -> None:
    style = kind("id-1", 'model "x"', Wishes(usage=include_usage))
    (chunk,) = events(style.chunk(delta(NASTY)))
    assert (chunk["id"], chunk["model"], chunk["object"]) == ("id-1", 'model "x"', style.chunk_object)
    assert ("usage" in chunk) == include_usage
    (choice,) = chunk["choices"]
    assert (choice["index"], text_of(choice), choice["finish_reason"], choice["logprobs"]) == (3, NASTY, None, None)


@pytest.mark.parametrize("kind", STYLES)
def test_nothing_is_sent_for_nothing(kind: type[Style]) -> None:
    assert kind("i", "m", Wishes()).chunk(delta()) == b""


@pytest.mark.parametrize("kind", STYLES)
def test_tokens_without_text_still_bring_their_logprobs(kind: type[Style]) -> None:
    (chunk,) = events(kind("i", "m", Wishes(logprobs=True)).chunk(delta(logprobs=[TOKEN])))
    assert text_of(chunk["choices"][0]) == ""
    assert chunk["choices"][0]["logprobs"] is not None


@pytest.mark.parametrize("kind", STYLES)
def test_token_ids_are_told_to_whoever_wants_them(kind: type[Style]) -> None:
    style = kind("i", "m", Wishes(token_ids=True))
    chunks = [chunk["choices"][0] for chunk in events(style.chunk(delta()) + style.chunk(delta("x", finish="stop")))]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [5, 5]
    whole = json.loads(style.reply([[delta(), delta("x", finish="stop")]], Usage(1)))
    assert whole["choices"][0]["token_ids"] == [5, 5]


@pytest.mark.parametrize("kind", STYLES)
def test_an_end_is_told_once(kind: type[Style]) -> None:
    chunks = events(kind("i", "m", Wishes(logprobs=True)).chunk(delta("x", [TOKEN], "stop")))
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == "x"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", STYLES)
def test_the_end_of_a_stream(kind: type[Style]) -> None:
    assert kind("i", "m", Wishes()).end(Usage(1, 2, 3)) == DONE
    data = kind("i", "m", Wishes(usage=True)).end(Usage(4, 2, 1))
    assert data.endswith(DONE)
    (chunk,) = events(data.removesuffix(DONE))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("kind", STYLES)
def test_drafts_are_told_where_there_were_some(kind: type[Style]) -> None:
    style = kind("i", "m", Wishes(usage=True))
    usage = Usage(4, 7, accepted_tokens=3, rejected_tokens=2)
    (chunk,) = events(style.end(usage).removesuffix(DONE))
    whole = json.loads(style.reply([[delta("x", finish="stop")]], usage))
    for told in (chunk["usage"], whole["usage"]):
        assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
        assert (told["completion_tokens"], told["total_tokens"]) == (7, 11)


def test_what_json_cannot_write_has_a_number() -> None:
    completion = json.loads(
        CompletionStyle("i", "m", Wishes(logprobs=True)).reply([[delta("a", [TOKEN], "stop")]], Usage(1))
    )
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": LOWEST}]
    chat = json.loads(ChatStyle("i", "m", Wishes(logprobs=True)).reply([[delta("a", [TOKEN], "stop")]], Usage(1)))
    assert [top["logprob"] for top in chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == [-0.5, LOWEST]


@pytest.mark.parametrize("kind", STYLES)
def test_deltas_that_come_together_are_one(kind: type[Style]) -> None:
    first, second = delta("a", [TOKEN]), Delta(3, "b", [6], [TOKEN], "length", None)
    both = first.followed_by(second)
    assert (both.text, both.token_ids, both.finish_reason) == ("ab", [5, 6], "length")
    assert both.logprobs == [TOKEN, TOKEN]
