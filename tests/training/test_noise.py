"""Noise leaves a sum as it is: the numbers stay, and question and solution speak of the same things."""

import random
import re

from tests.training.test_generator import check_sums
from training.data import corpus, noise
from training.data.problems import Problem, problem


def drawn(count: int) -> list[Problem]:
    rng = random.Random(4)
    return [problem(rng) for _ in range(count)]


def test_other_things_in_the_same_sum() -> None:
    rng, changed = random.Random(5), 0
    for p in drawn(400):
        q = noise.renamed(rng, p)
        assert (q.key, q.steps, q.structure, q.answer) == (p.key, p.steps, p.structure, p.answer)
        assert [re.findall(r"\d+", line) for line in q.lines] == [re.findall(r"\d+", line) for line in p.lines]
        assert re.findall(r"\d+", q.question) == re.findall(r"\d+", p.question)
        check_sums(q)
        if q is not p:
            changed += q.question != p.question
            assert not [
                w for w in re.findall(r"\b[a-z]+\b", q.question) if w in noise.things() and w in p.question.split()
            ]
    assert changed > 150


def test_a_unit_is_renamed_with_its_thing() -> None:
    rng = random.Random(6)
    p = next(p for p in drawn(2000) if p.unit in noise.things() and len(p.lines) == len(p.steps))
    q = noise.renamed(rng, p)
    assert q.unit != p.unit
    assert q.unit in q.question
    assert q.unit in q.lines[-1]
    assert p.unit not in re.findall(r"[a-z]+", q.question + q.solution())


def test_articles_fit_the_new_thing() -> None:
    rng = random.Random(7)
    text = Problem("x", "I have a marble and an apple. How many?", ("Adding 1 gives 1 + 1 = 2.",), (), "", "x|a1")
    seen = {noise.renamed(rng, Problem(**{**vars(text), "steps": (None,)})).question for _ in range(60)}
    assert len(seen) > 50
    assert all(
        re.fullmatch(
            r"I have (a [^aeiou][a-z ]*|an [aeiou][a-z ]*) and (a [^aeiou][a-z ]*|an [aeiou][a-z ]*)\. How many\?", t
        )
        for t in seen
    )


def test_chatter_keeps_the_numbers() -> None:
    rng, changed = random.Random(8), 0
    for p in drawn(1500):
        text = noise.chatty(rng, p.question)
        numbers = re.findall(r"\d+", text)
        own = re.findall(r"\d+", p.question)
        assert own == numbers or (own == numbers[1:] and text.startswith(("1) ", "Exercise 4: "))), text
        changed += text != p.question
    assert 150 < changed < 600


def test_training_sums_are_renamed_now_and_then() -> None:
    rng = random.Random(9)
    rare = {w for p in (corpus.training_problem(rng) for _ in range(300)) for w in re.findall(r"[a-z]+", p.question)}
    assert len(rare) > 900


def test_other_words_of_the_same_meaning() -> None:
    rng = random.Random(10)
    seen = {noise.reworded(rng, "Kim bought 4 hats in total.", share=1.0) for _ in range(200)}
    assert len(seen) > 20
    assert all(text.startswith("Kim ") and " 4 hats " in text and "Kim bought" not in text for text in seen)
    assert noise.reworded(rng, "Then 3 left.", share=1.0)[0].isupper()
    for p in drawn(400):
        text = noise.reworded(rng, p.question, share=1.0)
        added = re.findall(r"\d+", text.replace("2 times", "").replace("3 times", ""))
        own = re.findall(r"\d+", p.question.replace("2 times", "").replace("3 times", ""))
        assert added == own, (p.question, text)


def test_replacements_are_phrases() -> None:
    assert len(noise.same()) > 150
    for phrase, others in noise.same().items():
        assert phrase == phrase.strip(), phrase
        assert others, phrase
        assert all(other and other == other.strip() for other in others), phrase
