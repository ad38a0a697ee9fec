"""Worded sums with worked solutions, drawn from the templates in ``problems/*.txt``.

A template names its numbers, some wordings of the question and the steps of the solution; README.md in this folder's
parent describes the format.  Solutions use one fixed wording for each operation, so that only the operations and their
numbers remain to be learned.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from training.data.cast import Cast, conjugate, table, words
from training.data.distraction import distracted
from training.data.grammar import articles, expand, sentences
from training.data.sums import FRACTIONS, OutOfRangeError, Step, in_words

HERE = Path(__file__).parent / "problems"
OF_EVERYDAY = ("change", "groups", "share", "compare", "money", "rates", "misc", "wide", "more")
OF_HOME = ("a_kitchen", "a_shopping", "a_school", "a_animals", "a_sports", "a_travel", "a_home", "a_brief", "a_mixed")
OF_WORK = ("b_take", "b_add", "b_times", "b_divide", "b_compare", "b_steps", "b_wide", "b_long")
OF_PLAIN = ("d_start", "d_compare", "d_share", "d_time", "d_money", "d_story")
OF_TWINS = ("c_part", "c_none", "c_sums", "c_facts", "c_chain")
OF_WIDE_WORDS = ("e_brief",)
FILES = (*OF_EVERYDAY, *OF_HOME, *OF_WORK, *OF_PLAIN, *OF_TWINS)
CURRENCIES = [("$", "dollars")] * 5 + [("", "dollars"), ("", "euros"), ("", "euros"), ("", "pounds"), ("", "cents")]
PHRASES = {
    "+": "Adding {0} gives {1} {2}.",
    "-": "Taking away {0} leaves {1} {2}.",
    "*": "Multiplying by {0} gives {1} {2}.",
    "/": "Dividing by {0} gives {1} {2}.",
}
REQUEST = re.compile(r"(Work out|Find|Calculate|Determine|Figure out|Tell me) ")
EVENTS = ("+", "-", "x", "g", "e", "h", "d", "t")
MAX_ANSWER = 9999
HELD_OUT = 24
WIDE, TOLD, CHAINED = 0.42, 0.22, 0.05
WORDY = 0.05


@dataclass
class Template:
    """One block of a template file."""

    name: str
    draws: list[tuple[str, str]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    work: list[str] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """A question, its worked lines, the steps in them and the answer.

    `key` names the template, its structure and its numbers but neither wording nor names: number combinations are held
    out by it, under every wording.
    """

    kind: str
    question: str
    lines: tuple[str, ...]
    steps: tuple[Step, ...]
    unit: str
    key: str
    structure: str = ""

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    def solution(self) -> str:
        return "\n".join(self.lines) + f"\n#### {self.answer}"

    def thinking(self) -> tuple[str, str]:
        """The text inside ``<think>`` and the visible answer."""
        told = re.split(r"(?<=[.?!]) ", self.question)
        asked = [sentence for sentence in told if sentence.endswith("?") or REQUEST.match(sentence)] or told
        out, steps = [f"The question is: {asked[-1]}"], list(self.steps)
        for line in self.lines:
            step = steps.pop(0) if steps and f"= {steps[0].result}" in line else None
            working = step.working() if step else None
            parts = [working, line] if working else [line]
            out += parts[::-1] if step and step.op == "/" else parts
        out.append(f"So the answer is {self.answer}.")
        return "\n".join(out), f"The answer is {self.answer}.\n#### {self.answer}"


def bucket(key: str, modulus: int) -> int:
    """A stable hash of `key` in [0, modulus)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % modulus


@cache
def macros() -> dict[str, str]:
    lines = (HERE / "macros.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line[1:].split(" = ", 1) for line in lines if line.startswith("@"))
    return {name.strip(): braced(text) for name, text in pairs}


BARE = re.compile(
    r"%?[A-Za-z]\w*\+s?|%[a-z]+|(?<=[{|])[a-z]+/[/=]?[a-z]+(?=[|} ])"
    r"|(?<=[{|])(?:p|q|r|s|he|him|his|S|city|day2|colors)(?=[|}])"
)


def braced(text: str) -> str:
    """Puts braces around slots that stand bare as or inside a branch: ``{want+s|need+s}``, ``{p|a friend}``."""

    def wrap(match: re.Match[str]) -> str:
        start, end = match.span()
        inside = text[start - 1 : start] == "{" and text[end : end + 1] in ("}", " ") and match[0][0] == "%"
        alone = text[start - 1 : start] == "{" and text[end : end + 1] == "}"
        return match[0] if inside or alone else "{" + match[0] + "}"

    return BARE.sub(wrap, text)


def with_macros(text: str) -> str:
    """Replaces ``{%name argument}`` by the macro's text, ``#`` in it by the argument."""
    text = braced(text)
    while (at := text.find("{%")) >= 0:
        depth, end = 1, at + 2
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        name, _, argument = text[at + 2 : end - 1].partition(" ")
        text = text[:at] + macros()[name].replace("#", argument) + text[end:]
    return text


def read(name: str, folder: Path = HERE) -> list[Template]:
    """The templates of one file."""
    out: list[Template] = []
    for line in (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        if line.startswith("## "):
            out.append(Template(line[3:].strip()))
        else:
            _read_line(out[-1], line.strip())
    return out


def _read_line(template: Template, line: str) -> None:
    key, _, rest = line.partition(" ")
    if key == "q:":
        template.questions.append(with_macros(rest))
    elif key in (">", "~"):
        template.work.append(line)
    elif key == "if":
        template.conditions.append(rest)
    elif key.endswith(":") or (key in EVENTS and not rest.startswith("= ")):
        template.parts.setdefault(key.rstrip(":"), []).append(with_macros(rest))
    else:
        for part in line.split(";"):
            head, _, tail = part.strip().partition(" = ")
            if head.startswith("use "):
                template.tables.append(head[4:])
            elif tail:
                template.draws.append((head, tail))
            else:
                raise ValueError(f"template {template.name}: cannot read {line!r}")


@cache
def templates() -> list[Template]:
    return [t for name in FILES for t in read(name)]


@cache
def wide() -> list[Template]:
    """The terse and the odd ones that go with the widely worded tellings."""
    return [t for name in OF_WIDE_WORDS for t in read(name)]


@cache
def weighted() -> list[Template]:
    """The templates as often as they are drawn: those with many wordings more often than others."""
    return [t for t in templates() for _ in range(max(1, min(8, len(t.questions) // 3)))]


@cache
def chains() -> list[Template]:
    return read("chains")


def spread(rng: random.Random, low: int, high: int) -> int:
    """Mostly low..high, sometimes up to two or three digits; often a round number, as people choose them."""
    x = rng.random()
    top = high if x < 0.66 else max(high, 99) if x < 0.90 else max(high, 999)
    return rounded(rng, rng.randint(low, top), low)


def rounded(rng: random.Random, value: int, low: int) -> int:
    """Sometimes the multiple of 10 (or of 5) below `value`."""
    x = rng.random()
    step = 10 if x < 0.12 else 5 if x < 0.18 else 1
    return max(low, value // step * step) if value > 2 * step else value


@cache
def compiled(expression: str) -> Callable[[dict[str, int]], int]:
    code = compile(expression.replace("/", "//"), expression, "eval")

    def value(names: dict[str, int]) -> int:
        return int(eval(code, {"__builtins__": {}}, names))

    return value


def tidy(text: str) -> str:
    """Capitals at the start of sentences, articles before vowels, no space before marks, a mark at the end."""
    text = text.replace("double as ", "twice as ").replace("triple as ", "three times as ")
    text = sentences(text).replace("??", "?").replace(" .", ".").replace(" ,", ",").replace(" ?", "?")
    text = articles(text)
    return text if text[-1] in ".?!" else text + "?"


class Sheet:
    """The numbers of one problem and the slots of its texts; a wordy one writes most numbers up to 100 in words."""

    wordy = False

    def __init__(self, rng: random.Random, template: Template) -> None:
        self.rng, self.cast = rng, Cast(rng)
        self.numbers: dict[str, int] = {}
        self.sign, self.currency = rng.choice(CURRENCIES)
        self.cast.set("cur", self.currency)
        self.spelled = rng.random() < 0.3
        for name in template.tables:
            for column, cell in self.row(name).items():
                if cell.isdigit():
                    self.numbers[column] = int(cell)
                else:
                    self.take(column, cell)
        for name, draw in template.draws:
            self.draw(name, draw)

    def row(self, name: str) -> dict[str, str]:
        """Draws a row of a table."""
        return self.rng.choice(table(name))

    def take(self, column: str, cell: str) -> None:
        """Fills the slot of a table's column."""
        self.cast.set(column, expand(cell, self.rng, self))

    def draw(self, name: str, rule: str) -> None:
        rng, (kind, _, rest) = self.rng, rule.partition(" ")
        if kind == "num":
            low, _, high = rest.partition(" ")
            value = spread(rng, int(low), int(high))
        elif kind == "int":
            low, _, high = rest.partition(" ")
            top = int(high) * (1 if rng.random() < 0.9 or int(high) < 15 else 5)
            value = rounded(rng, rng.randint(int(low), top), int(low))
        elif kind == "pick":
            value = int(rng.choice(rest.split()))
        elif kind == "fix":
            value = int(rest)
        elif kind == "below":
            top = compiled(rest)(self.numbers) - 1
            value = rng.randint(min(2, top), top) if top > 0 else 0
        elif kind == "word":
            self.cast.set(name, rng.choice(rest.split("|")))
            return
        elif kind == "verb":
            self.cast.set(name, conjugate(expand(rest, rng, self)))
            return
        else:
            value = _sum_of_draws(rule, self)
        self.numbers[name] = value

    def __call__(self, slot: str) -> str:
        name, _, form = slot.partition(":")
        money = name.startswith("$")
        value = self.numbers.get(name[money:])
        if value is None:
            return self.cast(slot)
        if form == "times":
            names = {2: ["twice", "twice", "double", "two times"], 3: ["three times", "3 times", "triple"]}
            return self.rng.choice(names.get(value, [f"{value} times", f"{in_words(value)} times"]))
        if form == "frac":
            return FRACTIONS[value]
        if form == "parts":
            return {3: "thirds", 4: "quarters", 5: "fifths"}[value]
        if form == "word":
            return in_words(value)
        if money:
            return f"${value}" if self.sign else f"{value} {self.currency}"
        limit, share = (100, 0.8) if self.wordy else (12, 0.6 if self.spelled else 0.0)
        if value <= limit and self.rng.random() < share:
            return in_words(value)
        return str(value)

    def text(self, phrase: str) -> str:
        return expand(phrase, self.rng, self)

    def question(self, phrase: str) -> str:
        return tidy(self.text(phrase))


def _sum_of_draws(rule: str, sheet: Sheet) -> int:
    """An expression whose terms may be draws: ``x + y + int 1 60``."""
    match = re.search(r"(num|int) (\d+) (\d+)", rule)
    if match is None:
        return compiled(rule)(sheet.numbers)
    sheet.draw("_", match[0])
    return compiled(rule.replace(match[0], "_"))(sheet.numbers)


class Work:
    """Collects the worked lines of a solution."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.unit = ""

    def step(self, left: int, op: str, right: int, unit: str) -> int:
        step = Step(left, op, right)
        self.unit = self.sheet.text(unit)
        self.steps.append(step)
        self.lines.append(PHRASES[op].format(right, step.written(), self.unit).replace(" .", "."))
        return step.result

    def run(self, line: str) -> None:
        """``> t = a + b : unit`` or ``~ a fact``."""
        if line[0] == "~":
            self.lines.append(articles(sentences(self.sheet.text(line[2:]))))
            return
        name, left, op, right, unit = re.fullmatch(r"> (\w+) = (\w+) ([-+*/]) (\w+) :\s?(.*)", line).groups()  # type: ignore[union-attr]
        numbers = self.sheet.numbers
        x, y = (int(term) if term.isdigit() else numbers[term] for term in (left, right))
        numbers[name] = self.step(x, op, y, unit)


def from_template(rng: random.Random, template: Template) -> Problem | None:
    """One problem, or None when the drawn numbers break a condition or leave the non-negative integers."""
    sheet = Sheet(rng, template)
    if any(not compiled(c)(sheet.numbers) for c in template.conditions):
        return None
    drawn = ",".join(f"{k}{v}" for k, v in sorted(sheet.numbers.items()))
    phrase = rng.choice(template.questions)
    sheet.wordy = "%" not in phrase and rng.random() < WORDY
    question = sheet.question(phrase)
    sheet.spelled = sheet.wordy = False
    work = Work(sheet)
    try:
        for line in template.work:
            work.run(line)
    except OutOfRangeError:
        return None
    return Problem(
        template.name,
        distracted(rng, question),
        tuple(work.lines),
        tuple(work.steps),
        work.unit,
        f"{template.name}|{drawn}",
    )


def any_wide(rng: random.Random) -> Problem | None:
    """A sum in wide words: each of their templates is as likely as another."""
    from training.data import telling

    at = rng.randrange(len(wide()) + len(telling.wide()))
    return from_template(rng, wide()[at]) if at < len(wide()) else telling.told(rng, telling.wide()[at - len(wide())])


def any_problem(rng: random.Random) -> Problem:
    from training.data import telling
    from training.data.chain import chain

    while True:
        x = rng.random()
        if x < WIDE:
            problem = any_wide(rng)
        elif x < WIDE + TOLD:
            problem = telling.told(rng, rng.choice(telling.weighted()))
        elif x < WIDE + TOLD + CHAINED:
            problem = chain(rng, rng.choice(chains()))
        else:
            problem = from_template(rng, rng.choice(weighted()))
        if problem is not None and problem.answer <= MAX_ANSWER and max(s.left for s in problem.steps) <= MAX_ANSWER:
            return problem


def held_structure(problem: Problem) -> bool:
    """One in ten of the longer event sequences never enters training."""
    return problem.structure.count("-") >= 2 and bucket("structure:" + problem.structure, 10) == 0


def held_numbers(problem: Problem) -> bool:
    """One in HELD_OUT of all number combinations never enters training."""
    return bucket(problem.key, HELD_OUT) == 0


def problem(rng: random.Random, pool: str = "training") -> Problem:
    """A problem of a pool: ``training``, or held out by ``numbers`` or by ``structures`` of events."""
    while True:
        p = any_problem(rng)
        if pool == "structures":
            if held_structure(p):
                return p
        elif not held_structure(p) and held_numbers(p) == (pool == "numbers"):
            return p


def vocabulary() -> list[str]:
    """Plain words for lists, spelling and copying."""
    return sorted({*words("spell"), *words("things"), *words("foods"), *words("colors")})
