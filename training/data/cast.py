"""Who and what a sum is about: draws people, things and places for the slots of a phrase, each once per text."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "cl",
    "dr",
    "fl",
    "gr",
    "kr",
    "pl",
    "st",
    "tr",
    "zh",
    "sh",
    "th",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ee", "oo"]
CODAS = ["", "", "n", "r", "l", "m", "k", "x", "th"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
RELATIONS = {
    "she": ["sister", "mother", "aunt", "mom", "daughter", "grandma", "wife", "niece", "mum", "grandmother"],
    "he": ["brother", "father", "uncle", "dad", "son", "grandpa", "husband", "nephew", "grandfather"],
    "": ["friend", "cousin", "neighbor", "neighbour", "teacher", "boss", "classmate", "coach", "roommate", "colleague"],
}
PRONOUNS = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
    "I": ("I", "me", "my", "myself"),
    "we": ("we", "us", "our", "ourselves"),
    "you": ("you", "you", "your", "yourself"),
    "they": ("they", "them", "their", "themselves"),
}


@cache
def words(name: str) -> list[str]:
    """The entries of ``words/<name>.txt``, one a line or separated by commas."""
    text = (HERE / "words" / f"{name}.txt").read_text(encoding="utf-8")
    return list(dict.fromkeys(w for line in text.splitlines() for w in (p.strip() for p in line.split(",")) if w))


@cache
def table(name: str) -> list[dict[str, str]]:
    """The rows of ``tables/<name>.txt``; its first line names the columns, which are separated by semicolons."""
    head, *rows = (HERE / "tables" / f"{name}.txt").read_text(encoding="utf-8").strip().splitlines()
    columns = head.split(";")
    out = []
    for row in rows:
        cells = row.split(";")
        if len(cells) != len(columns):
            raise ValueError(f"table {name}: {row!r} has {len(cells)} cells, the head {len(columns)}")
        out.append(dict(zip(columns, cells, strict=True)))
    return out


def plural(word: str) -> str:
    """The plural of an English noun, by rule and by the list of exceptions."""
    irregular = _irregular().get(word)
    if irregular:
        return irregular
    if word.endswith(("s", "x", "ch", "sh", "z")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


@cache
def _irregular() -> dict[str, str]:
    return dict(entry.split(":") for entry in words("irregular"))


def conjugate(verb: str) -> str:
    """The third person singular of a verb: buy, buys; carry, carries."""
    special = {"have": "has", "do": "does", "be": "is"}.get(verb)
    if special:
        return special
    if verb.endswith(("s", "x", "ch", "sh", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def invented(rng: random.Random, syllables: int = 0) -> str:
    """A word that no list holds, so that unknown words are copied instead of guessed."""
    n = syllables or rng.choice([1, 2, 2, 3])
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(n)) + rng.choice(CODAS)


def any_name(rng: random.Random) -> tuple[str, str]:
    """A given name and its pronoun."""
    x = rng.random()
    if x < 0.10:
        return invented(rng).capitalize(), rng.choice(["she", "he"])
    return (rng.choice(words("girls")), "she") if x < 0.55 else (rng.choice(words("boys")), "he")


def any_noun(rng: random.Random) -> str:
    """A countable noun, singular."""
    x = rng.random()
    if x < 0.07:
        return invented(rng)
    if x < 0.30:
        return rng.choice(words("e_things"))
    if x < 0.50:
        return rng.choice(words("foods"))
    return rng.choice(words("things"))


def any_city(rng: random.Random) -> str:
    return invented(rng).capitalize() if rng.random() < 0.15 else rng.choice(words("cities"))


@dataclass(frozen=True)
class Person:
    """`text` names the person, `pronoun` is a key of PRONOUNS."""

    text: str
    pronoun: str

    @property
    def singular(self) -> bool:
        return self.pronoun in ("she", "he")


def subject(rng: random.Random) -> Person:
    """The one a sum is about: a name mostly, else a relative, a trade, I, we, you or a group."""
    x = rng.random()
    if x < 0.50:
        return Person(*any_name(rng))
    if x < 0.64:
        pronoun = rng.choice(["she", "he", ""])
        relation = rng.choice(RELATIONS[pronoun])
        owner = rng.choice(["my ", "my ", "our ", "his ", "her ", f"{any_name(rng)[0]}'s "])
        return Person(owner + relation, pronoun or rng.choice(["she", "he"]))
    if x < 0.76:
        title = rng.choice(["Mr. ", "Mrs. ", "Ms. ", "old Mr. ", "Dr. "]) + rng.choice(words("surnames"))
        trade = rng.choice(["a ", "the ", "the ", "one "]) + rng.choice(words("trades"))
        return Person(rng.choice([title, trade, trade]), rng.choice(["she", "he"]))
    if x < 0.88:
        return Person("I", "I")
    if x < 0.92:
        return Person("we", "we")
    if x < 0.95:
        return Person("you", "you")
    group = rng.choice([f"{any_name(rng)[0]} and {any_name(rng)[0]}", "the " + rng.choice(words("groups"))])
    return Person(group, "they")


class Cast:
    """Resolves slot names; a name gives the same text every time within one cast.

    ``s he him his`` are the subject's forms, ``have+s`` conjugates for it, ``p q r`` are further names with ``p.he``
    and so on; a list of ``words/`` gives its plural with a trailing ``+``, and a trailing digit asks for another draw.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._subject: Person | None = None
        self._people: dict[str, Person] = {}
        self._texts: dict[str, str] = {}

    @property
    def subject(self) -> Person:
        if self._subject is None:
            self._subject = subject(self.rng)
        return self._subject

    @subject.setter
    def subject(self, person: Person) -> None:
        self._subject = person

    def set(self, name: str, text: str) -> None:
        self._texts[name] = text

    def __call__(self, name: str) -> str:
        text = self._texts.get(name)
        if text is None:
            text = self._draw(name)
        return text

    def _draw(self, name: str) -> str:
        if name in ("s", "he", "him", "his", "self", "S"):
            return self._subject_form(name)
        if name.endswith("+s"):
            verb, _, rest = self._texts.get(name[:-2], name[:-2]).partition(" ")
            verb = conjugate(verb) if self.subject.singular else verb
            return f"{verb} {rest}" if rest else verb
        if name in ("was", "is"):
            forms = {"I": ("was", "am"), "she": ("was", "is"), "he": ("was", "is")}
            return forms.get(self.subject.pronoun, ("were", "are"))[name == "is"]
        if name[0] in "pqr" and (len(name) == 1 or name[1] == "."):
            return self._person_form(name)
        many, base = name.endswith("+"), name.rstrip("+")
        word = self._texts.get(base)
        if word is None:
            word = self._texts[base] = self._word(base)
        return plural(word) if many else word

    def _subject_form(self, name: str) -> str:
        person = self.subject
        if name == "s":
            return person.text
        if name == "S":
            the = person.text
            for article in ("a ", "one "):
                the = "the " + the[len(article) :] if the.startswith(article) else the
            return the
        return PRONOUNS[person.pronoun][("he", "him", "his", "self").index(name)]

    def _person_form(self, name: str) -> str:
        key, _, form = name.partition(".")
        if key not in self._people:
            taken = {p.text for p in self._people.values()} | {self.subject.text}
            person = Person(*any_name(self.rng))
            while person.text in taken:
                person = Person(*any_name(self.rng))
            self._people[key] = person
        person = self._people[key]
        return PRONOUNS[person.pronoun][("he", "him", "his").index(form)] if form else person.text

    def _word(self, base: str) -> str:
        rng, kind = self.rng, base.rstrip("0123456789")
        if kind == "it":
            return self._fresh(kind, lambda: any_noun(rng))
        if kind == "city":
            return any_city(rng)
        if kind in ("day", "month"):
            names = DAYS if kind == "day" else MONTHS
            first = self._texts.setdefault(kind, rng.choice(names[:-3]))
            return names[names.index(first) + int(base[len(kind) :] or 1) - 1]
        return self._fresh(kind, lambda: rng.choice(words(kind)))

    def _fresh(self, kind: str, draw: Callable[[], str]) -> str:
        taken = {t for k, t in self._texts.items() if k.startswith(kind)}
        text = draw()
        while text in taken:
            text = draw()
        return text
