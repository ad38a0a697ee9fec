"""Small talk: about itself, a few facts, and plainly saying what it cannot do."""

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from training.data.cast import (
    DAYS,
    MONTHS,
    any_city,
    any_name,
    any_noun,
    invented,
    plural,
    table,
    words,
)
from training.data.chat import Turn
from training.data.grammar import expand, sentences
from training.data.sums import in_words

CAN = "I am a very small model: I can do small sums, count, copy, sort, fill in JSON and call tools."
BARE = re.compile(r"(?:(?<=\|)|(?<=\{)(?!\w+\}))(x2?|w2|[nmcfuwt])(?=[|}])")
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer the user.",
    "You are a small language model.",
    "You solve math problems.",
    "Be short and correct.",
    "You are a friendly assistant.",
    "Think carefully and answer.",
    "You are a bot that helps with numbers.",
    "Be brief.",
    "Answer in English.",
    "You are helpful.",
    "Please be polite.",
    "You are deltaserve-tiny.",
    "Follow the instructions of the user.",
    "You are an assistant with tools.",
]


@cache
def replies(name: str) -> list[tuple[str, list[str]]]:
    """(answer, wordings of what the user says) of one file of ``talk/``."""
    out: list[tuple[str, list[str]]] = []
    for line in (Path(__file__).parent / "talk" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line[:2] in ("> ", "= "):
            out.append((line[2:].replace("{can}", CAN), []))
        elif line:
            out[-1][1].append(line)
    return out


def _cast(rng: random.Random) -> Callable[[str], str]:
    """The slots of ``cannot.txt``: topics, names, places and words of all sorts, known and invented."""
    draws: dict[str, Callable[[], str]] = {
        "x": lambda: _topic(rng),
        "x2": lambda: _topic(rng),
        "n": lambda: any_name(rng)[0],
        "c": lambda: _place(rng),
        "y": lambda: str(rng.randint(1200, 2030)),
        "w": lambda: _word(rng),
        "w2": lambda: _word(rng),
        "t": lambda: any_noun(rng),
        "m": lambda: rng.choice(words("famous_people") if rng.random() < 0.6 else words("surnames")),
        "f": lambda: rng.choice(words("famous")),
        "u": lambda: rng.choice(words("countries")),
    }
    return lambda name: draws[name]() if name in draws else name


def _topic(rng: random.Random) -> str:
    x = rng.random()
    if x < 0.35:
        return rng.choice(words("topics"))
    if x < 0.55:
        return plural(any_noun(rng))
    if x < 0.65:
        return f"a {rng.choice(words('trades'))} and a {any_noun(rng)}"
    if x < 0.75:
        return f"{rng.choice(words('colors'))} {plural(any_noun(rng))}"
    return rng.choice(
        [
            rng.choice(words("famous_people")),
            invented(rng),
            rng.choice(words("countries")),
            "the " + rng.choice(words("famous")),
        ]
    )


def _place(rng: random.Random) -> str:
    return any_city(rng) if rng.random() < 0.5 else rng.choice(words("countries"))


def _word(rng: random.Random) -> str:
    return rng.choice(words("spell")) if rng.random() < 0.7 else invented(rng)


def _say(rng: random.Random, phrase: str, slot: Callable[[str], str]) -> str:
    text = " ".join(expand(BARE.sub(r"{\1}", phrase), rng, slot).split())
    return sentences(text) if rng.random() < 0.75 else text


def about_itself(rng: random.Random) -> Turn:
    answer, asked = rng.choice(replies("self"))
    text = _say(rng, rng.choice(asked), _cast(rng))
    if text.endswith("?") and rng.random() < 0.2:
        text = (
            rng.choice(["Hey, ", "Hi, ", "Hello! ", "So, ", "And ", "Please, ", "Tell me, ", "Well, "])
            + text[0].lower()
            + text[1:]
        )
    return Turn(text, "This is small talk.", answer)


def cannot(rng: random.Random) -> Turn:
    kinds = replies("cannot")
    answer, asked = rng.choice(kinds) if rng.random() < 0.5 else kinds[-1]
    return Turn(_say(rng, rng.choice(asked), _cast(rng)), "I cannot do that.", answer)


def capital(rng: random.Random) -> Turn:
    row = rng.choice(table("capitals"))
    country, city = row["country"], row["capital"]
    if rng.random() < 0.25:
        return Turn(
            f"Which country has the capital {city}?", "I know this one.", f"{city} is the capital of {country}."
        )
    ask = rng.choice(
        [
            "What is the capital of {}?",
            "What is the capital city of {}?",
            "Name the capital of {}.",
            "Capital of {}?",
            "what's the capital of {}",
        ]
    )
    return Turn(ask.format(country), "I know this one.", f"The capital of {country} is {city}.")


def opposite(rng: random.Random) -> Turn:
    a, b = rng.sample(list(rng.choice(table("opposites")).values()), 2)
    ask = rng.choice(["What is the opposite of {}?", "Give me the opposite of {}.", "Opposite of {}?"])
    return Turn(ask.format(a), "I know this word.", f"The opposite of {a} is {b}.")


def sound(rng: random.Random) -> Turn:
    row = rng.choice(table("sounds"))
    ask = rng.choice(["What sound does {} make?", "What does {} say?"])
    return Turn(ask.format(row["animal"]), "I know this animal.", f"It says {row['sound']}.")


def calendar(rng: random.Random) -> Turn:
    names, what = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    i, after = rng.randrange(len(names)), rng.random() < 0.6
    if what == "month" and rng.random() < 0.4:
        return Turn(
            f"What number is the month {names[i]}?", "I count the months.", f"{names[i]} is month number {i + 1}."
        )
    word = "after" if after else "before"
    found = names[(i + (1 if after else -1)) % len(names)]
    ask = rng.choice([f"Which {what} comes {word} {names[i]}?", f"What {what} is {word} {names[i]}?"])
    return Turn(ask, f"I think of the {'week' if what == 'day' else 'year'}.", f"{found} comes {word} {names[i]}.")


def fact(rng: random.Random) -> Turn:
    row = rng.choice(table("facts"))
    ask = rng.choice(["What is {}?", "Tell me what {} is.", "Explain what {} is."])
    return Turn(ask.format(row["thing"]), "I know this.", row["fact"])


def legs(rng: random.Random) -> Turn:
    row = rng.choice([r for r in table("legs") if r["part"] == "legs"])
    article = "an" if row["a"][0] == "a" else "a"
    return Turn(f"How many legs does {article} {row['a']} have?", "I know this animal.", f"It has {row['k']} legs.")


def listing(rng: random.Random) -> Turn:
    row, k = rng.choice(table("lists")), rng.randint(2, 8)
    ask = rng.choice(["List {} {}.", "Name {} {}.", "Give me {} {}."]).format(
        rng.choice([str(k), in_words(k)]), row["name"]
    )
    return Turn(ask, f"I need {k} {row['name']}.", ", ".join(row["items"].split(", ")[:k]))


def plural_of(rng: random.Random) -> Turn:
    word = rng.choice(words("foods") + words("things"))
    return Turn(
        rng.choice(["What is the plural of {}?", "Give me the plural of {}."]).format(word),
        "I know this word.",
        f"The plural of {word} is {plural(word)}.",
    )


KINDS: list[tuple[Callable[[random.Random], Turn], float]] = [
    (about_itself, 9),
    (cannot, 12),
    (capital, 2),
    (opposite, 1.5),
    (sound, 1),
    (calendar, 2),
    (fact, 1.5),
    (legs, 0.7),
    (listing, 1.5),
    (plural_of, 1.5),
]


def smalltalk(rng: random.Random) -> Turn:
    """One turn of small talk."""
    makers, weights = zip(*KINDS, strict=True)
    turn: Turn = rng.choices(makers, weights)[0](rng)
    return turn
