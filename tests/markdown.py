"""Reads the project's pages: links, inline code, and the examples with what they print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "recipes").glob("*.md"),
    ROOT / "tests/clients/data/README.md",
]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A fenced block of a page, and the output block that follows it, if one does."""

    language: str
    code: str
    output: str | None


def links(text: str) -> Iterator[str]:
    """Targets of links that lead to a file of the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def inline_code(text: str) -> Iterator[str]:
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def examples(text: str) -> list[Example]:
    """The page's `sh` and `python` blocks, in order; a `json` or `text` block is the output of the one before it."""
    found: list[Example] = []
    for language, code in FENCE.findall(text):
        if language in ("json", "text"):
            found[-1] = Example(found[-1].language, found[-1].code, code)
        else:
            found.append(Example(language, code, None))
    return found
