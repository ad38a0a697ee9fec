"""Noise that leaves a worded sum as it is: other things in the places of things, chatter, haste.

It stands between templates and documents: no wording of a template says which words matter, so those that never do are
made to vary by themselves.
"""

import random
import re
from dataclasses import replace
from functools import cache

from training.data.cast import HERE, invented, plural, words
from training.data.problems import Problem

RENAMED, REWORDED = 0.15, 0.45
HELLO = [
    "Hi! ", "Hello, ", "hey, ", "Hi there. ", "Ok, ", "So, ", "Now then: ", "Well, ", "Good morning! ", "Listen: ",
    "Here's one: ", "Another one: ", "Next question: ", "My homework: ", "Quick question: ", "Please help: ",
    "Can you help me? ", "Math problem: ", "1) ", "a) ", "Exercise 4: ", "Puzzle: ",
]  # fmt: skip
BYE = [
    " Thanks!", " Thank you.", " thx", " Please.", " I'm stuck.", " Any idea?", " Help!", " (it's for school)",
    " :)", " Just curious.", " My teacher wants to know.", " Explain, please.", " What do you think?", " Tell me!",
]  # fmt: skip
ADVERBS = [
    "luckily", "sadly", "as usual", "oddly enough", "by the way", "in fact", "of course", "for some reason",
    "as it happens", "to be honest", "as planned", "thankfully", "well", "you see", "apparently", "in short",
    "believe it or not", "as you know", "surprisingly", "once more",
]  # fmt: skip
PLAIN_STARTS = re.compile(r"(?:^|(?<=[.!] ))(The|A|An|There|It|In|On|At|He|She|They|We|Each|Every|One|My|Our|His|Her) ")
ARTICLES = re.compile(r"\b(?:the|a|an) (?!dozen|third|quarter|fifth|tenth|sixth|half)")


@cache
def things() -> dict[str, tuple[str, bool]]:
    """What may be renamed: the singular and plural forms of things, and whether a form is the plural."""
    singular = {word for name in ("things", "foods", "e_things") for word in words(name)}
    plain = {word for word in singular if word.isalpha() and word not in words("not_things")}
    return {word: (word, False) for word in plain} | {plural(word): (word, True) for word in plain}


def other(rng: random.Random, taken: set[str]) -> str:
    """A word for a thing: mostly a rarer one, often one that nobody has heard."""
    while True:
        word = invented(rng) if rng.random() < 0.4 else rng.choice(words("e_things"))
        if word not in taken:
            return word


def renamed(rng: random.Random, problem: Problem) -> Problem:
    """The same sum about other things, in its question and its worked lines."""
    texts = [problem.question, *problem.lines]
    known = {word for text in texts for word in re.findall(r"[a-z]+", text) if word in things()}
    if not known or len(problem.lines) != len(problem.steps):
        return problem
    names: dict[str, str] = {}
    for base in sorted({things()[word][0] for word in known}):
        names[base] = other(rng, {*names.values(), *known})
    forms = {
        word: plural(names[base]) if many else names[base] for word, (base, many) in things().items() if base in names
    }

    def swapped(text: str) -> str:
        return re.sub(r"\b(an? )?([a-z]+)\b", lambda m: _noun(m, forms), text)

    question, *lines = [swapped(text) for text in texts]
    return replace(problem, question=question, lines=tuple(lines), unit=swapped(problem.unit))


def _noun(match: re.Match[str], forms: dict[str, str]) -> str:
    article, word = match[1], match[2]
    if word not in forms:
        return match[0]
    if article:
        article = "an " if forms[word][0] in "aeiou" else "a "
    return (article or "") + forms[word]


@cache
def same() -> dict[str, list[str]]:
    """What each phrase of ``words/same.txt`` may be replaced by: a line lists equals, or phrases => replacements."""
    out: dict[str, list[str]] = {}
    for line in (HERE / "words" / "same.txt").read_text(encoding="utf-8").splitlines():
        phrases, _, others = line.partition(" => ")
        for phrase in phrases.split("|"):
            out[phrase.lower()] = (others or phrases).split("|")
    return out


@cache
def phrases() -> re.Pattern[str]:
    longest_first = sorted(same(), key=len, reverse=True)
    return re.compile(r"(?<![\w'-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w'-])", re.IGNORECASE)


def reworded(rng: random.Random, text: str, share: float = 0.35) -> str:
    """The text with some of its phrases in other words of the same meaning."""

    def other_words(match: re.Match[str]) -> str:
        if rng.random() >= share:
            return match[0]
        phrase = match[0]
        chosen = rng.choice(same()[phrase.lower()])
        return chosen[0].upper() + chosen[1:] if phrase[0].isupper() else chosen

    return phrases().sub(other_words, text)


def varied(rng: random.Random, problem: Problem) -> Problem:
    """The sum as it is, or about other things, or in other words."""
    if rng.random() < RENAMED:
        problem = renamed(rng, problem)
    if rng.random() < REWORDED:
        problem = replace(problem, question=reworded(rng, problem.question))
    return problem


def chatty(rng: random.Random, text: str) -> str:
    """The user's text with a greeting, thanks, an adverb or without articles, sometimes."""
    x = rng.random()
    if x < 0.04:
        starts = list(PLAIN_STARTS.finditer(text))
        if starts:
            at = rng.choice(starts).start(1)
            text = text[:at] + rng.choice(ADVERBS).capitalize() + ", " + text[at].lower() + text[at + 1 :]
    elif x < 0.06:
        text = ARTICLES.sub("", text)
    elif x < 0.07:
        text = text.replace(", and ", ", ").replace(" and ", " & ")
    elif x < 0.08:
        text = re.sub(r"(?<=[a-z]), (?=[a-z])", " ", text)
    elif x < 0.09:
        text = text.replace(". ", ".\n")
    elif x < 0.095:
        text = text.upper()
    if rng.random() < 0.06:
        text = rng.choice(HELLO) + text
    return text + rng.choice(BYE) if rng.random() < 0.04 else text
