"""docs/api.md names the fields that there are: those that are honoured, refused and passed over; reading them."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import msgspec
import pytest

from deltaserve.server.protocol import INERT, UNSUPPORTED, ChatRequest, CompletionRequest, SamplingFields, read_json

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def fields_of_table(title: str) -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("Fields of both endpoints", set(SamplingFields.__struct_fields__)),
        (
            "Fields of completions",
            set(CompletionRequest.__struct_fields__) - set(SamplingFields.__struct_fields__),
        ),
        ("Fields of chats", set(ChatRequest.__struct_fields__) - set(SamplingFields.__struct_fields__)),
    ],
)
def test_fields_that_are_honoured(title: str, fields: set[str]) -> None:
    told = fields_of_table(title)
    assert set(told) == fields
    assert len(told) == len(fields)


def test_fields_that_are_not() -> None:
    refused, inert = section("What is refused").split("These say something")
    known: set[str] = set()
    for kind, fields in UNSUPPORTED.items():
        known |= fields.keys() - set(kind.__struct_fields__)
    assert set(re.findall(r"`(\w+)`", refused)) == known - {"echo"}
    assert set(re.findall(r"`(\w+)`", inert)) == INERT


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_field_may_be_null(kind: type[msgspec.Struct]) -> None:
    required = {"prompt": "a", "messages": []}
    nulls = {name: required.get(name) for name in kind.__struct_fields__}
    msgspec.convert(nulls, kind)


def test_nothing_is_collected_while_a_body_is_read() -> None:
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        rows = read_json(b'{"prompt": [' + b"[1]," * 50_000 + b"[1]]}")
    finally:
        gc.callbacks.remove(note)
    assert len(rows["prompt"]) == 50_001
    assert phases.count("start") <= 1, "one when it is over"
    assert gc.isenabled()
