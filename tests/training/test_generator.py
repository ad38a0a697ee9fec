"""The generated corpus: seeded, correct in its sums, and free of what is held out."""

import hashlib
import random
import re

import pytest

from training.data import corpus, heldout, problems
from training.data.chain import chain
from training.data.chat import ANSWER_WEIGHT
from training.data.distraction import distracted
from training.data.problems import (
    Problem,
    Template,
    chains,
    from_template,
    held_numbers,
    held_structure,
    problem,
    templates,
    tidy,
)
from training.data.sums import Step, in_words
from training.data.toolchat import tool_chat

SPOKEN = {2: "twice double half", 3: "triple third", 4: "quarter", 5: "fifth", 6: "sixth", 10: "tenth", 12: "dozen"}
REMAINDERS = ("leftover", "boxes_full", "boxes_rest")
"""Their steps use the quotient and the remainder, which nobody tells."""
# The documents of seed 7 begin like this; a change here is a new corpus, which the shipped weights have not seen.
DIGEST = "a2c9fd4af32eb425"


def digest(seed: int, documents: int) -> str:
    rng, total = random.Random(seed), hashlib.sha256()
    for i in range(documents):
        total.update("".join(text + str(weight) for text, weight in corpus.document(rng, long=i % 3 == 0)).encode())
    return total.hexdigest()[:16]


def check_sums(p: Problem) -> None:
    """Every written equation holds, and the last one gives the answer."""
    chains = re.findall(r"\d[\d +*/-]*(?:= [\d +*/-]*\d)+", " ".join(p.lines))
    assert chains, f"no equation in {p.lines}"
    for sides in chains:
        assert len({eval(side) for side in sides.split("=")}) == 1, f"{sides} in {p.question!r}"
    assert p.solution().endswith(f"\n#### {p.answer}")
    assert str(p.steps[-1].result) in p.lines[-1]


def test_same_seed_same_documents() -> None:
    assert digest(7, 200) == DIGEST
    assert digest(8, 20) != digest(7, 20)


def drawn_numbers(template: Template, key: str) -> dict[str, int]:
    """The drawn numbers that the steps use, without those that follow from others."""
    free = {name for name, rule in template.draws if re.match(r"(num|int|pick|below) ", rule)}
    terms = {term for line in template.work if line[0] == ">" for term in (line.split()[3], line.split()[5])}
    parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in key.split("|")[1].split(",")]
    return {m[1]: int(m[2]) for m in parts if m and m[1] in free & terms}


def told_in(text: str, number: int) -> bool:
    lower = text.lower().replace(",", "")
    spoken = [in_words(number)] if number < 1000 else []
    return str(number) in re.findall(r"\d+", lower) or any(
        w in lower for w in [*spoken, *SPOKEN.get(number, "").split(), *(["dozen"] if number <= 5 else [])]
    )


@pytest.mark.parametrize("template", [*templates(), *problems.wide()], ids=lambda t: t.name)
def test_template(template: Template) -> None:
    rng = random.Random(template.name)
    made = [p for p in (from_template(rng, template) for _ in range(30)) if p]
    assert len(made) >= 2, "a template whose numbers hardly ever fit is of no use"
    for p in made:
        assert not re.search(r"[{}|%]|\+s\b|\w\+", p.question.replace("%", "", 1)), f"unfilled slot: {p.question!r}"
        assert p.question[0].isupper() or p.question[0].isdigit() or p.question[0] == "$"
        check_sums(p)
        for name, number in drawn_numbers(template, p.key).items():
            assert template.name in REMAINDERS or told_in(p.question, number), (
                f"{name} = {number} is not in {p.question!r}"
            )


def test_numbers_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wordy question writes numbers above twelve in words; its solution keeps the digits."""
    monkeypatch.setattr(problems, "WORDY", 1.0)
    rng, tens = random.Random(2), re.compile(r"\b(twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)\b")
    made = [p for t in templates() for p in [from_template(rng, t) for _ in range(12)] if p]
    assert len([p for p in made if tens.search(p.question.lower())]) > len(made) / 3
    assert not any(tens.search(p.solution().lower()) for p in made)


def test_chains() -> None:
    rng = random.Random(3)
    for template in chains():
        for _ in range(20):
            p = chain(rng, template)
            assert p is not None
            check_sums(p)
            assert "{" not in p.question


def test_thinking_repeats_what_is_asked() -> None:
    """The question or the request, wherever it stands."""

    def first_line(question: str) -> str:
        return Problem("k", question, ("1 + 1 = 2.",), (Step(1, "+", 1),), "", "k").thinking()[0].splitlines()[0]

    assert first_line("I have a hat. How many is that? It is blue.") == "The question is: How many is that?"
    assert first_line("Work out the total. I have 1 hat and 1 cap.") == "The question is: Work out the total."
    assert first_line("Say I have 1 hat. And 1 cap.") == "The question is: And 1 cap."


def test_articles_and_multiples() -> None:
    assert tidy("a 8-page book, a 18-page one, a 80-page one") == "An 8-page book, an 18-page one, an 80-page one?"
    assert tidy("a 180-page book and a uncle, double as old.") == "A 180-page book and an uncle, twice as old."


def test_sentences_that_do_not_matter_have_articles() -> None:
    rng = random.Random(0)
    assert not [text for text in (distracted(rng, "1.", 1.0) for _ in range(2000)) if re.search(r"\ba [aeio]", text)]


def test_training_holds_out_numbers_and_structures() -> None:
    rng = random.Random(4)
    for _ in range(400):
        p = corpus.training_problem(rng)
        assert not held_numbers(p)
        assert not held_structure(p)
        assert corpus.normal(p.question) not in corpus.forbidden()
    assert held_numbers(problem(rng, "numbers"))
    assert held_structure(problem(rng, "structures"))


def test_training_holds_out_other_families_by_text() -> None:
    rng = random.Random(5)
    for _ in range(300):
        assert not corpus.held(corpus.small_turn(rng).user)
    held = [t.user for t in (tool_chat(rng) for _ in range(400)) if corpus.held(t.user)]
    assert held, "one in 24 requests is held out"
    documents = ["".join(text for text, _ in corpus.tool_document(rng)) for _ in range(200)]
    assert not any(f"user\n{user}<|im_end|>" in text for user in held for text in documents)


def test_no_evaluation_prompt_is_drawn_for_training() -> None:
    families = ("sums", "arithmetic", "text", "JSON", "lookup", "about", "what it")
    items = [i for i in heldout.items(12, long=False) if i.family.startswith(families) and i.messages]
    asked = {i.messages[-1]["content"] for i in items}
    assert len(asked) > 60
    rng = random.Random(6)
    for _ in range(300):
        for text, weight in corpus.document(rng):
            user = text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")
            assert weight == ANSWER_WEIGHT or user not in asked, f"trained on {user!r}"


def test_hand_written_sums_are_in_no_template_s_words() -> None:
    """No hand-written test sum equals a generated one with the numbers taken out."""

    def skeleton(text: str) -> str:
        return re.sub(r"\d+", "#", corpus.normal(text))

    written = {skeleton(row["question"]) for row in heldout.written_by_hand("hand_written")}
    assert len(written) == 100
    names = [name for _, name in heldout.HAND_WRITTEN if name != "hand_written"]
    others = [row["question"] for name in names for row in heldout.written_by_hand(name)]
    assert len(others) == 444
    assert not written & {skeleton(question) for question in others}
    assert {corpus.normal(question) for question in others} <= corpus.forbidden()
    rng = random.Random(9)
    assert not written & {skeleton(problem(rng).question) for _ in range(1500)}


def test_expected_answers_count_as_right_and_others_as_wrong() -> None:
    for item in heldout.items(8, long=False):
        if item.family.startswith("hand-written") or "prototype" in item.family:
            continue
        assert heldout.correct(item, item.want, ended=True), item
        assert not heldout.correct(item, "I like 12 trains.", ended=True)
        assert item.family == "sums, five shots" or not heldout.correct(item, item.want, ended=False)
