"""Finding one fact: in a list, in a long text, or in what the user said some turns ago."""

import random
import string
from collections.abc import Callable

from training.data.cast import RELATIONS, Cast, any_city, any_name, any_noun, invented, words
from training.data.chat import Turn
from training.data.grammar import expand, sentences


def code(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_uppercase + string.digits) for _ in range(4))


def lookup(rng: random.Random, entries: int = 0) -> Turn:
    """Finds the value of one key in a list of `entries`."""
    k = entries or rng.choice([3, 5, 8, 12, 12, 20, 40])
    keys: dict[str, None] = {}
    while len(keys) < k:
        keys[any_name(rng)[0] if k < 60 and rng.random() < 0.8 else invented(rng).capitalize()] = None
    names, kind = list(keys), rng.randrange(3)
    draws: list[Callable[[], str]] = [lambda: str(rng.randint(1, 9999)), lambda: any_noun(rng), lambda: code(rng)]
    values, i = [draws[kind]() for _ in names], rng.randrange(k)
    what = ("number", "thing", "code")[kind]
    join, form = rng.choice([("\n", "{}: {}"), (", ", "{}: {}"), ("\n", "- {} = {}"), ("\n", "{} has {}")])
    text = join.join(form.format(a, b) for a, b in zip(names, values, strict=True))
    ask = rng.choice(
        [f"What is the {what} of {names[i]}?", f"Which {what} does {names[i]} have?", f"Find the {what} of {names[i]}."]
    )
    user = rng.choice([f"{text}\n{ask}", f"Here is a list.\n{text}\n\n{ask}", f"{ask}\n{text}"])
    return Turn(user, f"I look for {names[i]} in the list.", f"The {what} of {names[i]} is {values[i]}.")


FILLER = [
    "the {places} in {city} {is|was} {open|closed|busy|quiet} on {day}.",
    "{p} {likes|sells|collects|paints} {colors} {it+}.",
    "{p} and {q} {met|worked|sat|talked} {in|near} the {places}.",
    "a {trades} {came|went} to {city} with {a|one} {it}.",
    "in {month} it {rained|snowed|was warm} in {city}.",
    "{p} {bought|lost|found} {a|the} {goods} {in|near} {city}.",
    "the {colors} {it} {is|was} {on the table|in the {places}|behind the door}.",
    "nobody {saw|knew|liked} the {trades}.",
    "{p} said that {the {places} is far|{q} is late|it is {day}|{p.he} was {tired|happy|hungry}}.",
]
FACTS = [
    (
        "the {secret|magic|special|access} {kind} {of|for} {x} is {v}.",
        "{what is|tell me|do you know} the {kind} {of|for} {x}?",
        "The {kind} of {x} is {v}.",
    ),
    ("{x}'s {kind} is {v}.", "{what is|tell me} {x}'s {kind}?", "The {kind} of {x} is {v}."),
    (
        "the {kind} {of|for} {x} is {v}.",
        "{what is|which is|what was} the {kind} {of|for} {x}?",
        "The {kind} of {x} is {v}.",
    ),
]
KINDS = ["number", "code", "password", "color", "key", "pin", "badge number", "room number", "phone number", "word"]


def needle(rng: random.Random, sentences_before: int, sentences_after: int) -> Turn:
    """A fact inside a text that does not matter, and the question for it."""
    who = rng.choice(
        [any_name(rng)[0], any_city(rng), f"the {rng.choice(words('places'))}", f"the {rng.choice(words('trades'))}"]
    )
    kind = rng.choice(KINDS)
    number = str(rng.randint(10, 99999))
    value = {
        "color": rng.choice(words("colors")),
        "word": invented(rng),
        "code": code(rng),
        "password": invented(rng),
    }.get(kind, number)
    fact, ask, answer = rng.choice(FACTS)
    slots = {"x": who, "kind": kind, "v": value}

    def told(text: str) -> str:
        cast = Cast(rng)
        for name, slot in slots.items():
            cast.set(name, slot)
        return sentences(expand(text, rng, cast))

    lines = [told(rng.choice(FILLER)) for _ in range(sentences_before)]
    lines.append(told(fact))
    lines += [told(rng.choice(FILLER)) for _ in range(sentences_after)]
    question = told(ask)
    text = " ".join(lines)
    user = rng.choice([f"{text}\n\n{question}", f"Read this text.\n{text}\n\n{question}", f"{text} {question}"])
    return Turn(user, f"I look for {who} in the text.", told(answer))


def long_lookup(rng: random.Random, tokens: int) -> Turn:
    """A prompt of about `tokens` tokens with a fact to find."""
    if rng.random() < 0.4:
        return lookup(rng, entries=max(3, tokens // 9))
    total = max(2, tokens // 13)
    before = rng.randint(0, total)
    return needle(rng, before, total - before)


def _told_name(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    name = any_name(rng)[0]
    tell = rng.choice(
        [f"My name is {name}.", f"Hi, I am {name}.", f"Hello, my name is {name}.", f"I'm {name}.", f"Call me {name}."]
    )
    ask = rng.choice(
        ["What is my name?", "Do you know my name?", "Who am I?", "What's my name?", "Do you remember my name?"]
    )
    return (tell, f"Hello {name}! How can I help you?"), (ask, f"Your name is {name}.")


def _told_color(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    color = rng.choice(words("colors"))
    tell = rng.choice([f"My favorite color is {color}.", f"I like the color {color}.", f"I love {color}."])
    ask = rng.choice(["What is my favorite color?", "Which color do I like?", "What's my favorite color?"])
    return (tell, f"{color.capitalize()} is a nice color."), (ask, f"Your favorite color is {color}.")


def _told_number(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    x = rng.randint(10, 99999)
    tell = rng.choice(
        [
            f"Remember the number {x}.",
            f"Please remember {x}.",
            f"The secret number is {x}.",
            f"Keep the number {x} in mind.",
        ]
    )
    ask = rng.choice(
        [
            "What is the number?",
            "Which number did I tell you?",
            "What was the secret number?",
            "What number should you remember?",
        ]
    )
    return (tell, f"I will remember the number {x}."), (ask, f"The number is {x}.")


def _told_city(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    city = any_city(rng)
    tell = rng.choice([f"I live in {city}.", f"I am from {city}.", f"My home is {city}."])
    ask = rng.choice(["Where do I live?", "Where am I from?", "Which city do I live in?"])
    return (tell, f"{city} is a nice place."), (ask, f"You live in {city}.")


def _told_relative(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    who = rng.choice([*RELATIONS["she"], *RELATIONS["he"], *RELATIONS[""], "dog", "cat"])
    name, color, thing = any_name(rng)[0], rng.choice(words("colors")), any_noun(rng)
    tell = f"My {who} {name} has a {color} {thing}."
    if rng.random() < 0.5:
        return (tell, "That is nice."), (f"What does my {who} have?", f"Your {who} has a {color} {thing}.")
    return (tell, "That is nice."), (
        rng.choice([f"What is the name of my {who}?", f"What is my {who} called?"]),
        f"Your {who} is {name}.",
    )


def _told_age(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    x = rng.randint(5, 90)
    ask = rng.choice(["How old am I?", "What is my age?"])
    return (rng.choice([f"I am {x} years old.", f"I'm {x}."]), f"You are {x} years old."), (
        ask,
        f"You are {x} years old.",
    )


TOLD = [_told_name, _told_color, _told_number, _told_city, _told_relative, _told_age]


def remembered(rng: random.Random, facts: int) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """`facts` different things a user tells, each with the question for it and the answer."""
    return [told(rng) for told in rng.sample(TOLD, facts)]
