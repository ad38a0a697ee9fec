"""Text as it comes: the same whatever the pieces, and in agreement with ids, logprobs and counts when it stops."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import deltaserve
from deltaserve.core.request import Output, SamplingParams, TokenLogprobs
from deltaserve.engine.detokenizer import Detokenizer, TextDelta, TextStream, describe_tokens
from deltaserve.engine.stop_strings import StopStrings
from deltaserve.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(deltaserve.__file__).parent / "builtin")
EOS = 2034

GOLDEN = [
    "Plain words, then 12345 and punctuation!?\n\n",
    "naïve café — “quotes” … Ünïcödé €uro",
    "日本語とEnglish混じりの文。終わり",
    "👩‍👩‍👧‍👦 family, 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag, 🇩🇪🇫🇷, ❤️‍🔥 heart",
    "aaaaabaaaabaaab the the then ther",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
]
TOKEN_OF_BYTE = {TOKENIZER.token_bytes(i): i for i in range(2048) if len(TOKENIZER.token_bytes(i)) == 1}


def tokens_of(raw: bytes) -> list[int]:
    """One token a byte: each of them is a piece of a character, if that has several bytes."""
    return [TOKEN_OF_BYTE[bytes([byte])] for byte in raw]


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 2, [token + 1, token], [-0.25, -0.5])


def bursts(
    ids: Sequence[int], sizes: Iterator[int] | int, *, logprobs: bool = False, reason: Any = "length"
) -> Iterator[Output]:
    """Outputs of some tokens each; the last one, with the reason, has the last tokens."""
    start = 0
    while True:
        size = sizes if isinstance(sizes, int) else next(sizes)
        piece = list(ids[start : start + size])
        start += size
        last = start >= len(ids)
        yield Output(
            request_id="r",
            token_ids=piece,
            logprobs=[score(token) for token in piece] if logprobs else None,
            finish_reason=reason if last else None,
            stop_token_id=piece[-1] if last and reason == "stop" else None,
        )
        if last:
            return


def follow(stream: TextStream, outputs: Iterator[Output]) -> tuple[str, list[TextDelta]]:
    deltas = []
    for output in outputs:
        deltas.append(stream.feed(output))
        if deltas[-1].finish_reason is not None:
            break
    assert stream.finished
    return "".join(delta.text for delta in deltas), deltas


def whole_characters(raw: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)


def naive_stop(ids: Sequence[int], params: SamplingParams, skip: bool = True) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, by looking at the whole text after every token."""
    stops = sorted(params.stop, key=len, reverse=True)
    raw, text = b"", ""
    for number, token in enumerate(ids, 1):
        before = len(text)
        raw += b"" if skip and TOKENIZER.is_special(token) else TOKENIZER.token_bytes(token)
        text = whole_characters(raw) if number < len(ids) else raw.decode(errors="replace")
        for end in range(before + 1, len(text) + 1):
            for stop in stops:
                if number >= params.min_tokens and text[:end].endswith(stop):
                    return text[: end if params.include_stop_str_in_output else end - len(stop)], number, stop
    return text, len(ids), None


# ---- whole characters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", GOLDEN)
@pytest.mark.parametrize("size", range(1, 9))
def test_pieces_give_the_text(text: str, size: int) -> None:
    for ids in (TOKENIZER.encode(text), tokens_of(text.encode())):
        got, deltas = follow(TextStream(TOKENIZER, SamplingParams()), bursts(ids, size))
        assert got == text
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert all("\ufffd" not in delta.text for delta in deltas)


@pytest.mark.parametrize("text", GOLDEN)
def test_cuts_at_every_position_give_the_text(text: str) -> None:
    """Tokens of both halves, cut between characters and inside them; and the text is never ahead of its bytes."""
    raw = text.encode()
    for cut in range(len(raw) + 1):
        detokenizer = Detokenizer(TOKENIZER)
        first = "".join(map(detokenizer.feed, tokens_of(raw[:cut])))
        assert first == whole_characters(raw[:cut])
        assert first + "".join(map(detokenizer.feed, tokens_of(raw[cut:]))) + detokenizer.finish() == text
    for cut in range(len(text) + 1):
        ids = TOKENIZER.encode(text[:cut]) + TOKENIZER.encode(text[cut:])
        assert follow(TextStream(TOKENIZER, SamplingParams()), bursts(ids, 1))[0] == TOKENIZER.decode(ids)


def test_any_tokens_give_what_decode_gives() -> None:
    """Random ids: bytes that are no characters become U+FFFD, each as soon as that is certain."""
    for _ in range(300):
        ids = [random.randrange(2048) for _ in range(random.randrange(1, 40))]
        if random.random() < 0.5:
            ids = tokens_of(bytes(random.choice(b"\x80\xbf\xc3\xe2\x82\xac\xf0\x9f\x98\x80\xedA\xff") for _ in ids))
        for skip in (True, False):
            stream = TextStream(TOKENIZER, SamplingParams(), skip_special_tokens=skip)
            text, _ = follow(stream, bursts(ids, random.randrange(1, 9)))
            assert text == TOKENIZER.decode(ids, skip)


def test_an_unfinished_character_is_delivered_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    smile = tokens_of("😀".encode())
    assert [detokenizer.feed(token) for token in smile[:3]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert Detokenizer(TOKENIZER).finish() == ""
    cut = Detokenizer(TOKENIZER)
    assert [cut.feed(token) for token in [*smile[:2], *tokens_of(b"A")]] == ["", "", "\ufffdA"]


def test_the_cost_of_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand tokens: each is decoded once, each character takes one step, and little is held back."""
    steps = 0
    plain = StopStrings.step

    def counted(self: StopStrings, state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return plain(self, state, char)

    monkeypatch.setattr(StopStrings, "step", counted)
    stops = ("a" * 500 + "!", "ab" * 100)
    stream = TextStream(TOKENIZER, SamplingParams(stop=stops))
    building, steps = steps, 0
    ids = TOKENIZER.encode("ab" * 60 + "a" * 499 + "b ") * 40
    text, deltas = follow(stream, bursts(ids, 1))
    assert text == TOKENIZER.decode(ids)
    assert steps == len(text)
    assert building < 2000
    assert max(len(delta.text) for delta in deltas) <= 501 + 20


# ---- stop strings --------------------------------------------------------------------------------------------------


def agree(text: str, deltas: list[TextDelta], stream: TextStream, ids: Sequence[int], want: Any) -> None:
    want_text, want_tokens, want_stop = want
    assert text == want_text
    assert [token for delta in deltas for token in delta.token_ids] == list(ids[:want_tokens])
    assert stream.num_tokens == want_tokens
    assert [token.token_id for delta in deltas for token in delta.logprobs or []] == list(ids[:want_tokens])
    assert deltas[-1].stop_reason == want_stop
    assert deltas[-1].finish_reason == ("length" if want_stop is None else "stop")


def random_stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Some that occur, some that nearly do."""
    stops = []
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randrange(1, 9)]
        stops.append(stop + rng.choice(["", "", "#"]))
    return tuple(stops)


@pytest.mark.parametrize("text", GOLDEN)
def test_stop_strings_agree_with_the_naive_search(text: str, seed: int) -> None:
    """Across tokens and bursts, any split: text, ids, logprobs and count agree."""
    rng = random.Random(seed)
    for _ in range(150):
        cut = rng.randrange(len(text) + 1)
        ids = rng.choice(
            [
                TOKENIZER.encode(text),
                tokens_of(text.encode()),
                TOKENIZER.encode(text[:cut]) + TOKENIZER.encode(text[cut:]),
            ]
        )
        params = SamplingParams(
            stop=random_stops(rng, text),
            include_stop_str_in_output=rng.random() < 0.5,
            min_tokens=rng.choice([0, 0, 1, 5, 12]),
        )
        want = naive_stop(ids, params)
        for sizes in (1, rng.randrange(2, 9), len(ids)):
            stream = TextStream(TOKENIZER, params)
            got, deltas = follow(stream, bursts(ids, sizes, logprobs=True))
            agree(got, deltas, stream, ids, want)
        stream = TextStream(TOKENIZER, params)
        mixed = iter(lambda: rng.randrange(1, 9), 0)
        got, deltas = follow(stream, bursts(ids, mixed, logprobs=True))
        agree(got, deltas, stream, ids, want)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("include", [False, True])
def test_what_follows_the_stop_string_is_discarded(size: int, include: bool) -> None:
    ids = tokens_of(b"one two STOP three four")
    params = SamplingParams(stop=("STOP",), include_stop_str_in_output=include)
    stream = TextStream(TOKENIZER, params)
    text, deltas = follow(stream, bursts(ids, size, logprobs=True))
    agree(text, deltas, stream, ids, ("one two STOP" if include else "one two ", 12, "STOP"))
    late = stream.feed(Output(request_id="r", token_ids=ids[12:], finish_reason="length"))
    assert late == TextDelta()
    assert stream.num_tokens == 12


def test_a_possible_beginning_is_held_back_and_then_given() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("abcd", "bx")))
    given = []
    for char in b"zabcabzbcd":
        given.append(stream.feed(Output(request_id="r", token_ids=tokens_of(bytes([char])))).text)
    #                  z    a   b   c   a      b   z      b   c     d
    assert given == ["z", "", "", "", "abc", "", "abz", "", "bc", "d"]
    stream.feed(Output(request_id="r", token_ids=tokens_of(b"ab")))
    end = stream.feed(Output(request_id="r", token_ids=tokens_of(b"c"), finish_reason="length"))
    assert (end.text, end.finish_reason, end.stop_reason) == ("abc", "length", None)


def test_the_first_to_end_wins_and_of_those_the_longest() -> None:
    for stops, text, want in [
        (("abc", "bc"), "zabcd", ("z", "abc")),
        (("abcdef", "cd"), "zabcdef", ("zab", "cd")),
        (("aab",), "aaab", ("a", "aab")),
        (("abab", "ba"), "aababab", ("aa", "ba")),
        (("x", "xx"), "axxx", ("a", "x")),
        (("é",), "caf\u00e9!", ("caf", "é")),
        (("\ufffd",), "", ("", None)),
    ]:
        stream = TextStream(TOKENIZER, SamplingParams(stop=stops))
        got, deltas = follow(stream, bursts(tokens_of(text.encode()), 3))
        assert (got, deltas[-1].stop_reason) == want


def test_a_stop_string_beats_the_end_in_its_own_burst() -> None:
    """Whether the engine ends the request by its length or by an end-of-text further on."""
    ids = [*tokens_of(b"ab."), EOS]
    for reason in ("length", "stop"):
        stream = TextStream(TOKENIZER, SamplingParams(stop=("b",)))
        text, deltas = follow(stream, bursts(ids, 8, reason=reason))
        assert (text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("a", "stop", "b")
        assert stream.num_tokens == 2


def test_an_unfinished_character_may_complete_a_stop_string() -> None:
    ids = tokens_of(b"ab" + "😀".encode()[:2])
    stream = TextStream(TOKENIZER, SamplingParams(stop=("b\ufffd",)))
    text, deltas = follow(stream, bursts(ids, 1))
    assert (text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("a", "stop", "b\ufffd")


def test_many_stop_strings_are_found() -> None:
    stops = tuple("".join(random.choice("abc") for _ in range(1024)) for _ in range(64))
    text = "abcab" * 50 + stops[40] + "rest"
    stream = TextStream(TOKENIZER, SamplingParams(stop=stops), stops=StopStrings(stops))
    got, deltas = follow(stream, bursts(tokens_of(text.encode()), 7))
    assert (got, deltas[-1].stop_reason) == ("abcab" * 50, stops[40])
    with pytest.raises(ValueError, match="2000 stop strings; at most 64"):
        SamplingParams(stop=("x",) * 2000).validate()


# ---- how answers end -----------------------------------------------------------------------------------------------


def end_of(params: SamplingParams, ids: list[int], skip: bool = True) -> tuple[str, Any, int]:
    stream = TextStream(TOKENIZER, params, skip_special_tokens=skip)
    text, deltas = follow(stream, bursts(ids, 2, reason="stop"))
    assert deltas[-1].finish_reason == "stop"
    return text, deltas[-1].stop_reason, stream.num_tokens


def test_stop_tokens() -> None:
    """Counted, but not shown unless asked for; the reason names one that the request asked for, and no end-of-text."""
    dot = tokens_of(b".")[0]
    ids = tokens_of(b"a.b.")
    assert end_of(SamplingParams(stop_token_ids=(dot,)), ids) == ("a.b", dot, 4)
    assert end_of(SamplingParams(stop_token_ids=(dot,), include_stop_str_in_output=True), ids) == ("a.b.", dot, 4)
    ids = [*tokens_of(b"ab"), EOS]
    assert end_of(SamplingParams(), ids) == ("ab", None, 3)
    assert end_of(SamplingParams(), ids, skip=False) == ("ab", None, 3)
    assert end_of(SamplingParams(include_stop_str_in_output=True), ids) == ("ab", None, 3)
    assert end_of(SamplingParams(include_stop_str_in_output=True), ids, skip=False) == ("ab<|im_end|>", None, 3)
    assert end_of(SamplingParams(stop_token_ids=(EOS,)), ids) == ("ab", EOS, 3)


def test_an_error_ends_an_answer() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("abc",)))
    assert stream.feed(Output(request_id="r", token_ids=tokens_of(b"zab"))).text == "z"
    end = stream.feed(Output(request_id="r", finish_reason="error", error="not finite"))
    assert (end.text, end.finish_reason, end.error, end.token_ids) == ("ab", "error", "not finite", [])


def test_without_a_tokenizer_ids_pass_through() -> None:
    stream = TextStream(None, SamplingParams())
    delta = stream.feed(Output(request_id="r", token_ids=[5, 6], logprobs=[score(5), score(6)]))
    assert (delta.text, delta.token_ids) == ("", [5, 6])
    assert [(token.text, token.bytes, token.offset) for token in delta.logprobs or []] == [("", b"", 0)] * 2
    with pytest.raises(ValueError, match="no tokenizer, so stop strings cannot be found"):
        TextStream(None, SamplingParams(stop=("x",)))


# ---- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_have_text_bytes_and_offsets() -> None:
    ids = [*tokens_of("aé".encode()), 2033, *TOKENIZER.encode(" the"), EOS]
    stream = TextStream(TOKENIZER, SamplingParams(), offset=10)
    _, deltas = follow(stream, bursts(ids, 2, logprobs=True, reason="stop"))
    tokens = [token for delta in deltas for token in delta.logprobs or []]
    assert [token.text for token in tokens] == ["a", "\ufffd", "\ufffd", "<|im_start|>", " the", "<|im_end|>"]
    assert b"".join(token.bytes for token in tokens).decode() == "aé<|im_start|> the<|im_end|>"
    assert [token.offset for token in tokens] == [10, 11, 11, 12, 12, 16]
    assert [(token.logprob, token.rank) for token in tokens] == [(-0.5, 2)] * 6
    assert [(top.token_id, top.logprob) for top in tokens[0].top] == [(ids[0] + 1, -0.25), (ids[0], -0.5)]
    assert tokens[0].top[1].text == "a"
    assert tokens[0].top[1].bytes == b"a"


@pytest.mark.parametrize("text", GOLDEN)
def test_prompts_are_described_like_answers(text: str) -> None:
    for ids in (TOKENIZER.encode(text), tokens_of(text.encode())):
        described = describe_tokens(TOKENIZER, ids, [None, *map(score, ids[1:])])
        assert (described[0].logprob, described[0].rank, described[0].top) == (None, None, [])
        stream = TextStream(TOKENIZER, SamplingParams())
        _, deltas = follow(stream, bursts(ids, 3, logprobs=True))
        answered = [token for delta in deltas for token in delta.logprobs or []]
        assert described[1:] == answered[1:]
        starts = [token.offset for token in described]
        assert starts == sorted(starts)
        assert all(
            token.bytes.decode() == text[token.offset :][: len(token.text)]
            for token in described
            if "\ufffd" not in token.text
        )
