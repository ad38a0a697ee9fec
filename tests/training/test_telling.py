"""Sums told from clauses: every wording holds all numbers that its solution needs, and the solution is right."""

import random
import re
from collections import Counter

import pytest

from tests.training.test_generator import check_sums, drawn_numbers, told_in
from training.data import corpus, diversity, telling
from training.data.problems import Problem, Template, held_numbers, read
from training.data.telling import tellings, told


def all_tellings() -> list[Template]:
    return [*tellings(), *{t.name: t for t in telling.wide()}.values()]


def some(template: Template, count: int) -> list[Problem]:
    rng = random.Random(template.name)
    return [p for p in (told(rng, template) for _ in range(count)) if p]


@pytest.mark.parametrize("template", all_tellings(), ids=lambda t: t.name)
def test_telling(template: Template) -> None:
    made = some(template, 40)
    assert len(made) >= 4, "a template whose numbers hardly ever fit is of no use"
    for p in made:
        assert not re.search(r"[{}|<>~=#@/_]|\+s\b|\w\+|  | [.,?]|\$ ", p.question), f"unfilled slot: {p.question!r}"
        assert p.question[0].isupper() or p.question[0].isdigit() or p.question[0] == "$"
        assert p.question[-1] in ".?"
        assert not re.search(r"[=+*/]|\d$", p.unit), f"a number for a unit: {p.lines}"
        check_sums(p)
        for name, number in drawn_numbers(template, p.key).items():
            assert told_in(p.question, number), f"{name} = {number} is not in {p.question!r}"


def test_names_are_unique() -> None:
    assert max(Counter(t.name for t in all_tellings()).values()) == 1
    listed = [t for name in telling.OF_WIDE_WORDS for t in read(name, telling.HERE)]
    assert [t.name for t in listed] == [t.name for t in {t.name: t for t in telling.wide()}.values()]


def test_orders_differ() -> None:
    """The question comes first, last and as a request; facts stand in one sentence and in several."""
    texts = [p.question for t in tellings()[:40] for p in some(t, 40)]
    assert sum(t.startswith(("How", "What", "Which")) for t in texts) > len(texts) / 30
    assert sum(" if " in t and t.endswith("?") for t in texts) > len(texts) / 30
    assert sum(t.endswith(".") for t in texts) > len(texts) / 100
    assert sum(len(re.findall(r"[.?!]( |$)", t)) == 1 for t in texts) > len(texts) / 20


def test_numbers_are_held_out() -> None:
    rng = random.Random(1)
    seen = [p.kind for p in (corpus.training_problem(rng) for _ in range(600)) if not held_numbers(p)]
    assert len(seen) == 600
    assert len(set(seen) & {t.name for t in telling.tellings()}) > 60
    assert len(set(seen) & {t.name for t in telling.wide()}) > 60


def test_careless_questions_keep_their_numbers() -> None:
    rng = random.Random(2)
    for _ in range(500):
        question = corpus.training_problem(rng).question
        assert re.findall(r"\d+", corpus.careless(rng, question)) == re.findall(r"\d+", question)


def test_skeletons() -> None:
    assert diversity.skeleton("Rosa has three apples, 12 are red.") == ["@", "has", "#", "*", ",", "#", "are", "*", "."]
    text = diversity.skeleton("Rosa has three apples.")
    assert diversity.covered([text], [text]) == (1.0, 1.0, 1.0)
    assert diversity.covered([text], [["a", "b", "c", "d"]]) == (0.0, 0.0, 0.0)


def test_a_name_comes_before_its_pronoun() -> None:
    """A story told once: nobody is called she before having been named."""
    texts = [p.question for t in tellings() if t.parts.get("1", [""])[0].startswith("{who} ") for p in some(t, 20)]
    assert len(texts) > 500
    assert sum(text.startswith(("She ", "He ")) for text in texts) < len(texts) / 200
