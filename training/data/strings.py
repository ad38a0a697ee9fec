"""Copying, reversing, spelling, counting, sorting, and the long outputs: lists of 100 items, counting to 500."""

import random
import string
from collections.abc import Callable

from training.data.cast import any_city, any_name, any_noun, invented, plural, words
from training.data.chat import Turn
from training.data.problems import vocabulary
from training.data.sums import ORDINALS

EMOJI = [chr(c) for c in range(0x1F600, 0x1F640)] + list("❤⭐✅🎉🚀👍🐈🍎")
ACCENTED = [
    "Grüße",
    "Köln",
    "café",
    "naïve",
    "señor",
    "garçon",
    "déjà",
    "œuvre",
    "Łódź",
    "Český",
    "façade",
    "ångström",
    "piñata",
    "crème",
    "über",
    "fjörd",
]
OTHER = [
    "你好",
    "世界",
    "日本語",
    "東京",
    "北京",
    "水",
    "火",
    "山",
    "Привет",
    "мир",
    "да",
    "αβγ",
    "π",
    "안녕",
    "€",
    "£",
    "¥",
    "°C",
    "→",
    "∞",
]
MARKS = string.ascii_lowercase + "  .,;:!?-_/()[]{}<>=+*&%$#@'\""


def spelled_word(rng: random.Random) -> str:
    return (
        rng.choice(words("spell"))
        if rng.random() < 0.5
        else rng.choice([w for w in words("things")[:300] if w.isalpha()])
    )


def random_text(rng: random.Random) -> str:
    """Something to copy: words, codes, digits, names, a sentence, invented words, other scripts, marks."""
    kind = rng.choice(["words", "words", "code", "digits", "names", "sentence", "made", "script", "marks"])
    if kind == "made":
        return " ".join(invented(rng) for _ in range(rng.randint(1, 5)))
    if kind == "script":
        return rng.choice(["", " "]).join(
            rng.choice(rng.choice([EMOJI, ACCENTED, OTHER])) for _ in range(rng.randint(1, 6))
        )
    if kind == "marks":
        return "".join(rng.choice(MARKS) for _ in range(rng.randint(4, 14))).strip() or "a"
    if kind == "words":
        return " ".join(rng.choice(vocabulary_list()) for _ in range(rng.randint(2, 12)))
    if kind == "code":
        return "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(4, 12)))
    if kind == "digits":
        return "".join(rng.choice(string.digits) for _ in range(rng.randint(4, 16)))
    if kind == "names":
        return ", ".join(any_name(rng)[0] for _ in range(rng.randint(2, 6)))
    return f"{any_name(rng)[0]} has a {rng.choice(words('colors'))} {any_noun(rng)} in {any_city(rng)}."


_VOCABULARY: list[str] = []


def vocabulary_list() -> list[str]:
    if not _VOCABULARY:
        _VOCABULARY.extend(vocabulary())
    return _VOCABULARY


def some_words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(vocabulary_list(), rng.randint(low, high))


def copy(rng: random.Random) -> Turn:
    if rng.random() < 0.15:
        noun, name = any_noun(rng), any_name(rng)[0]
        phrases = [
            "this is a test",
            "hello",
            "hi",
            "yes",
            "no",
            "good morning",
            "I am here",
            "all is well",
            "thank you",
        ]
        phrase = rng.choice(
            [*phrases, f"I like {plural(noun)}", f"the {noun} is {rng.choice(words('colors'))}", f"hello {name}"]
        )
        mark = rng.choice(["!", "."])
        return Turn(f"Say {phrase}{mark}", "The user wants me to say something.", phrase[0].upper() + phrase[1:] + mark)
    text = random_text(rng)
    asks = [
        f"Repeat exactly: {text}",
        f"Repeat after me: {text}",
        f"Copy this text: {text}",
        f"Say: {text}",
        f"Echo the following.\n{text}",
    ]
    asks += [f"Copy: {text}", f"Please repeat this: {text}", f"Write this down again:\n{text}"]
    return Turn(rng.choice(asks), "The user wants me to repeat the text.", text)


def reverse_digits(rng: random.Random) -> Turn:
    digits = [rng.choice(string.digits) for _ in range(rng.randint(2, 10))]
    return Turn(f"Reverse the digits: {''.join(digits)}", f"The digits are {' '.join(digits)}.", "".join(digits[::-1]))


def reverse_list(rng: random.Random) -> Turn:
    items = some_words(rng, 2, 7)
    ask = rng.choice(["Reverse this list: {}", "Write this list in reverse order: {}", "Turn this list around: {}"])
    return Turn(
        ask.format(", ".join(items)),
        f"The list has {len(items)} items. I start with the last one.",
        ", ".join(items[::-1]),
    )


def spell(rng: random.Random) -> Turn:
    word = spelled_word(rng)
    ask = rng.choice([f"Spell the word {word}.", f"Spell {word}.", f"How do you spell {word}?"])
    return Turn(ask, "I write the letters one by one.", "-".join(word))


def reverse_word(rng: random.Random) -> Turn:
    word = spelled_word(rng)
    letters = "-".join(word)
    ask = rng.choice([f"Reverse the word {word}.", f"Write {word} backwards.", f"What is {word} backwards?"])
    return Turn(ask, f"The letters are {letters}.", f"{letters} becomes {letters[::-1]}.")


def count_letter(rng: random.Random) -> Turn:
    word = spelled_word(rng)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice(string.ascii_lowercase)
    k, letters = word.count(letter), "-".join(word)
    ask = [f"How many times does the letter {letter} appear in {word}?", f"How many {letter}'s are in {word}?"]
    ask += [f"Count the letter {letter} in the word {word}.", f"How many {letter}s are in the word {word}?"]
    return Turn(
        rng.choice(ask),
        f"The letters are {letters}.",
        f"{letters}: the letter {letter} appears {k} time{'s' * (k != 1)}.",
    )


def length(rng: random.Random) -> Turn:
    if rng.random() < 0.5:
        word = spelled_word(rng)
        letters = "-".join(word)
        ask = rng.choice([f"How many letters are in {word}?", f"How many letters does the word {word} have?"])
        return Turn(ask, f"The letters are {letters}.", f"{letters}: that is {len(word)} letters.")
    items = some_words(rng, 2, 10)
    counted = "\n".join(f"{i + 1} {x}" for i, x in enumerate(items))
    return Turn(
        f"How many words are in this list: {', '.join(items)}?",
        f"I count.\n{counted}",
        f"There are {len(items)} words.",
    )


def count(rng: random.Random, far: bool = False) -> Turn:
    """Counting; `far` counts from 1 to up to 500."""
    a = 1 if far else rng.choice([1, 1, rng.randint(0, 200), rng.randint(0, 450)])
    b = (
        rng.choice([100, 120, 150, 200, 200, 250, 300, 400, 500, 500, rng.randint(100, 500)])
        if far
        else a + rng.randint(3, rng.choice([12, 12, 40, 100]))
    )
    down = not far and rng.random() < 0.2
    numbers = range(b, a - 1, -1) if down else range(a, b + 1)
    first, last = numbers[0], numbers[-1]
    if a == 1 and not down and (far or rng.random() < 0.5):
        ask = rng.choice(
            [
                "Count to {}.",
                "Can you count to {}?",
                "Please count up to {}.",
                "Count from 1 to {}.",
                "Count up to {}",
                "List the numbers from 1 to {}.",
            ]
        ).format(b)
    else:
        ask = rng.choice(
            [
                f"Count from {first} to {last}.",
                f"Count {'down ' * down}from {first} to {last}.",
                f"List the numbers from {first} to {last}.",
            ]
        )
    return Turn(ask, f"I start at {first} and stop at {last}.", ", ".join(map(str, numbers)))


def numbered_list(rng: random.Random, far: bool = False) -> Turn:
    """A numbered list of one repeated word, up to 100 lines."""
    k = rng.choice([20, 30, 40, 50, 60, 75, 80, 100, 100, 100, rng.randint(10, 100)]) if far else rng.randint(2, 12)
    word = any_noun(rng)
    ask = rng.choice(
        [
            f"Write a numbered list of {k} {plural(word)}.",
            f"Make a numbered list with {k} lines. Each line says {word}.",
            f"Write the word {word} {k} times as a numbered list.",
            f"Give me a numbered list of {k} items: {word}.",
            f"Write {word} {k} times, numbered.",
            f"I need a numbered list of {k} {plural(word)}.",
        ]
    )
    return Turn(ask, f"I write {k} lines.", "\n".join(f"{i}. {word}" for i in range(1, k + 1)))


def number_given(rng: random.Random) -> Turn:
    items = some_words(rng, 3, 15)
    ask = rng.choice(
        ["Make a numbered list of these words: {}", "Number these words: {}", "Write these as a numbered list: {}"]
    )
    return Turn(
        ask.format(", ".join(items)), "I number the words.", "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))
    )


def multiples(rng: random.Random) -> Turn:
    a, k = rng.randint(2, 12), rng.randint(3, 10)
    return Turn(
        f"List the first {k} multiples of {a}.",
        f"I count in steps of {a}.",
        ", ".join(str(a * i) for i in range(1, k + 1)),
    )


def sort_numbers(rng: random.Random) -> Turn:
    xs = rng.sample(range(1, rng.choice([20, 100, 100, 999])), rng.randint(3, 7))
    up = rng.random() < 0.6
    order = (
        rng.choice(["small to large", "smallest to largest"])
        if up
        else rng.choice(["large to small", "largest to smallest"])
    )
    return Turn(
        f"Sort these numbers from {order}: {', '.join(map(str, xs))}",
        "I pick the next number each time.",
        ", ".join(map(str, sorted(xs, reverse=not up))),
    )


def sort_words(rng: random.Random) -> Turn:
    xs = rng.sample(words("spell"), rng.randint(2, 5))
    return Turn(
        f"Sort these words alphabetically: {', '.join(xs)}", "I compare the first letters.", ", ".join(sorted(xs))
    )


def nth(rng: random.Random) -> Turn:
    items = some_words(rng, 3, 7)
    listed = ", ".join(items)
    if rng.random() < 0.3:
        return Turn(
            f"What is the last word in this list: {listed}?",
            "I look at the end of the list.",
            f"The last word is {items[-1]}.",
        )
    i = rng.randint(0, min(4, len(items) - 1))
    place = ORDINALS[i + 1]
    return Turn(
        f"What is the {place} word in this list: {listed}?",
        f"I look for item {i + 1}.",
        f"The {place} word is {items[i]}.",
    )


KINDS: list[tuple[Callable[[random.Random], Turn], float]] = [
    (copy, 6), (reverse_digits, 2), (reverse_list, 3), (spell, 2), (count_letter, 3), (count, 3), (multiples, 1),
    (sort_numbers, 3), (sort_words, 2), (nth, 3), (length, 2), (reverse_word, 2), (numbered_list, 2), (number_given, 1),
]  # fmt: skip


def strings(rng: random.Random) -> Turn:
    """One short task on text."""
    makers, weights = zip(*KINDS, strict=True)
    turn: Turn = rng.choices(makers, weights)[0](rng)
    return turn


def long_output(rng: random.Random) -> Turn:
    """A task whose answer is long: hundreds of numbers or a list of up to 100 lines."""
    return count(rng, far=True) if rng.random() < 0.5 else numbered_list(rng, far=True)
