"""The pages are true: links lead somewhere, files and commands that they name exist, examples print what they show.

The example that needs the openai package is run with the outside clients, in tests/clients/test_readme.py.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import flags_page
from tests.markdown import PAGES, README, ROOT, Example, examples, inline_code, links
from tests.serving import serving

PACKAGE = ROOT / "src" / "deltaserve"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
VOLATILE = {"id", "created"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{target}: no such heading"


@every_page
def test_files_named_exist(page: Path) -> None:
    for code in inline_code(page.read_text()):
        if re.fullmatch(r"[\w.-]+/([\w.-]+/?)*|[\w-]+\.(py|md|toml|mjs|jsonl)", code):
            homes = (ROOT, PACKAGE, page.parent)
            known = any((home / code).exists() for home in homes) or any(PACKAGE.rglob(code))
            assert known or code in CREATED, f"{code} does not exist"


CREATED = {".venv/", "dist/", "config.json", "api.py"}
"""Named as things that a command makes or a checkpoint brings."""


@every_page
def test_make_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^ {4}|`|\d )make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets, f"make has no {named - targets}"


def test_readme_opens_with_the_two_commands() -> None:
    top = README.read_text().split("\n## ")[0]
    assert re.findall(r"^    (make \S+)", top, re.MULTILINE) == ["make serve", "make test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_layout_is_the_tree() -> None:
    section = ARCHITECTURE.read_text().split("## 4. Layout")[1].split("\n## ")[0]
    drawn = set(re.findall(r"^ {6}([\w.]+)", section, re.MULTILINE))
    there = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__") and path.name != "py.typed"}
    assert drawn == there


def test_log_is_dated_newest_first() -> None:
    dates = re.findall(r"^## (.*)$", (ROOT / "docs" / "LOG.md").read_text(), re.MULTILINE)
    assert dates
    assert all(re.match(r"\d{4}-\d{2}-\d{2}( |$)", date) for date in dates)
    assert dates == sorted(dates, key=lambda date: date[:10], reverse=True)


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(links(index.read_text()))


def test_flags_are_those_of_the_configs() -> None:
    assert flags_page.PAGE.read_text() == flags_page.text(), "run make docs"


def test_changelog_holds_this_version() -> None:
    import deltaserve

    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", deltaserve.__version__)


# ---- examples ------------------------------------------------------------------------------------------------------


def readme(language: str, word: str) -> list[Example]:
    return [
        example for example in examples(README.read_text()) if example.language == language and word in example.code
    ]


def test_curl_prints_what_the_readme_shows() -> None:
    (curl,) = readme("sh", "curl")
    assert curl.output is not None
    with serving() as server:
        command = curl.code.replace("http://127.0.0.1:8000", server.origin)
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    answer, shown = json.loads(run.stdout), json.loads(curl.output)
    assert set(answer) == set(shown)
    assert {key: answer[key] for key in set(answer) - VOLATILE} == {key: shown[key] for key in set(shown) - VOLATILE}


def test_python_prints_what_the_readme_shows() -> None:
    (example,) = readme("python", "LLM()")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", example.code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == example.output


def commands() -> list[str]:
    """Every `deltaserve ...` line of the README."""
    lines = itertools.chain.from_iterable(example.code.splitlines() for example in readme("sh", "deltaserve "))
    return [line.split("#")[0].strip() for line in lines if "bin/deltaserve " in line]


def test_the_readme_names_every_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for name in ("serve", "generate", "chat", "inspect", "compare"):
        assert re.search(rf"\b{name}\b", run.stdout), f"deltaserve --help does not list {name}"
        assert any(f"deltaserve {name}" in line for line in commands()), f"the README does not show {name}"


@pytest.mark.parametrize("line", commands())
def test_flags_of_the_readme_exist(line: str) -> None:
    _, name, *words = line.split()
    run = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli", name, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for word in words:
        if word.startswith("--"):
            assert word in run.stdout, f"deltaserve {name} has no {word}"
