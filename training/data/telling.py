"""Worded sums put together from clauses: a template gives facts and questions, this module the order they are told in.

A template of ``told/*.txt`` has numbered facts (``1:``, ``2:``: told in this order) or lettered ones (``a:``, ``b:``:
told in any order), questions (``k:``) and steps.  Which clause of a fact is taken, how clauses are joined, where the
question stands and in which tense all is told are drawn independently, so that no wording of a whole sum repeats.
"""

import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

from training.data.cast import Person, conjugate, table
from training.data.distraction import distracted
from training.data.grammar import expand
from training.data.problems import WORDY, Problem, Sheet, Template, Work, compiled, read, tidy, with_macros
from training.data.sums import OutOfRangeError, in_words

HERE = Path(__file__).parent / "told"
FILES = ("stock", "groups", "compare", "money", "time", "many", "daily", "a_days", "b_jobs")
OF_WIDE_WORDS = ("e_flow", "e_groups", "e_compare", "e_money", "e_wide", "e_more")
PAST = 0.65
FIRST = [
    "yesterday ", "on {day} ", "last week ", "this morning ", "one day ", "last year ", "in {month} ", "last summer ",
    "in the morning ", "at the weekend ", "last night ", "a while ago, ", "once ",
]  # fmt: skip
ANY_TENSE = ["in the morning ", "today ", "at first ", "right now ", "at noon ", "this week "]
LATER = [
    "then ", "later ", "after that ", "afterwards ", "next, ", "the next day ", "on the way home ", "an hour later ",
    "soon after, ", "finally ", "at noon ", "in the evening ", "by the evening ", "meanwhile ", "a week later ",
    "during the day ", "after lunch ", "the same day ", "unfortunately ", "luckily ", "in the end ", "on {day2} ",
]  # fmt: skip
INDIRECT = [
    "find {out |}#.", "work out #.", "calculate #.", "can you {tell me|say|work out|figure out} #?", "tell me #.",
    "do you know #?", "i {wonder|want to know|would like to know|need to know} #.", "{figure out|determine} #.",
    "{who} {want+s} to know #.", "say #.",
]  # fmt: skip
BEFORE = ["so ", "now, ", "in the end, ", "then ", "after {all |}this, ", "at the end of the day, ", "in total, "]
MOVES = re.compile(r"/|\{(?:there|are|isp|be)\}|_ \w+\}|_\}|%|\{lessd|\{mored")
EVENT = re.compile(r"\w/|\{(?:out_|in_|lessd_|mored_)")
FORMS = {"are": ("are", "were"), "isp": ("is", "was"), "there": ("there are", "there were"), "has": ("has", "had")}
PICK = re.compile(r"\{[^{}|]+(?:\|[^{}|]+)+\}")
FIRST_PERSON = re.compile(r"\bi\b")
SPECIAL = ("as:", "cur1", "maker", "be", "did")
BOTH_FORMS = re.compile(r"<([^~<>]*)~([^<>]*)>")


class Telling(Sheet):
    """A sheet that knows the tense and whether the subject has been named.

    ``{who}`` is the subject's name at first and its pronoun later, ``{whose}`` the possessive; ``{give/gave}`` agrees
    with the subject and the tense, ``{hold//held}`` with a single thing, ``{fall/=fell}`` with several; ``{be} {are}
    {isp} {there} {did}`` follow the tense.  Columns that end in an underscore are clauses: ``{out_ x}`` draws one,
    with ``x`` in the place of its ``{#}``.
    """

    def __init__(self, rng: random.Random, template: Template) -> None:
        self.past = rng.random() < PAST
        self.wordy = rng.random() < WORDY
        self.named = False
        self.cells: dict[str, str] = {}
        super().__init__(rng, template)

    def row(self, name: str) -> dict[str, str]:
        """A row in which a pick that occurs several times is drawn once: what is liters stays liters."""
        row = super().row(name)
        for pick in _repeated(tuple(row.values())):
            drawn = self.rng.choice(pick[1:-1].split("|"))
            row = {column: cell.replace(pick, drawn) for column, cell in row.items()}
        return row

    def take(self, column: str, cell: str) -> None:
        if column.endswith("_"):
            self.cells[column] = cell
        else:
            super().take(column, "{" + cell + "}" if "|" in cell else cell)

    def __call__(self, slot: str) -> str:
        value = self.numbers.get(slot)
        if value is not None:
            if self.wordy and value <= 100:
                return in_words(value)
            return f"{value:,}" if value >= 1000 and self.rng.random() < 0.2 else super().__call__(slot)
        if slot in ("who", "whose", "Who"):
            return self._named(slot)
        if "/" in slot:
            return self._verb(*slot.split("/", 1))
        head, _, argument = slot.partition(" ")
        if head in self.cells:
            return expand(_clause(self.cells[head], argument), self.rng, self)
        if slot in FORMS:
            return FORMS[slot][self.past]
        return self._special(slot) if slot.startswith(SPECIAL) or slot.endswith(":doz") else super().__call__(slot)

    def _special(self, slot: str) -> str:
        if slot.startswith("as:"):
            return self._cast_as("a " + slot[3:])
        if slot.endswith(":doz"):
            count = self.numbers[slot[:-4]]
            return self.rng.choice(["a dozen", "one dozen"]) if count == 1 else f"{in_words(count)} dozen"
        if slot == "cur1":
            return self.currency.removesuffix("s")
        if slot == "maker":
            return self.cast("who")
        if slot == "be":
            return self.cast("was" if self.past else "is")
        if slot == "did":
            return "did" if self.past else self.cast("do+s")
        return super().__call__(slot)

    def _verb(self, present: str, past: str) -> str:
        mark = past[0] if past[0] in "/=" else ""
        if self.past:
            return past.removeprefix(mark)
        if mark:
            return conjugate(present) if mark == "/" else present
        return conjugate(present) if self.cast.subject.singular else present

    def _cast_as(self, text: str) -> str:
        """Makes the sum be about `text`, unless somebody has been named before."""
        if not self.named:
            self.cast.subject = Person(text, self.rng.choice(["she", "he"]))
        return self._named("who")

    def _named(self, slot: str) -> str:
        again, self.named = self.named, True
        person = self.cast.subject
        if slot == "whose":
            if again or not person.singular:
                return self.cast("his")
            return person.text + ("'" if person.text.endswith("s") and self.rng.random() < 0.5 else "'s")
        if not again:
            return person.text
        return self.cast("S" if self.rng.random() < 0.15 or slot == "Who" else "he")


@cache
def _repeated(cells: tuple[str, ...]) -> list[str]:
    """The innermost picks that occur more than once, without those of slots, which agree with what is around them."""
    found = Counter(pick for cell in cells for pick in PICK.findall(cell))
    return [pick for pick, count in found.items() if count > 1 and "/" not in pick and "{|" not in pick]


@cache
def _clause(cell: str, argument: str) -> str:
    text = with_macros(cell.replace("{#}", "{" + argument + "}").replace("{$#}", "{$" + argument + "}"))
    return "{" + text + "}" if "|" in text else text


@cache
def tellings() -> list[Template]:
    """The templates of ``told/``."""
    return [t for name in FILES for t in read(name, HERE)]


@cache
def wide() -> list[Template]:
    """The templates whose clauses take any thing with any verb of their meaning."""
    return [t for name in OF_WIDE_WORDS for t in read(name, HERE)]


@cache
def weighted() -> list[Template]:
    """The templates as often as they are drawn: those whose scenes fill a long table more often than others."""
    return [t for t in tellings() for _ in range(max(1, min(4, sum(len(table(name)) for name in t.tables) // 8)))]


class Teller:
    """Puts the clauses of one sum in order and in words."""

    def __init__(self, rng: random.Random, sheet: Telling, facts: list[str], question: str, ordered: bool) -> None:
        self.rng, self.sheet, self.facts, self.ordered = rng, sheet, facts, ordered
        self.question = question

    def say(self, raw: str) -> str:
        return expand(raw.lstrip("@"), self.rng, self.sheet)

    def story(self, facts: list[str]) -> str:
        """The facts as sentences, some of them joined."""
        out, rng = "", self.rng
        for i, raw in enumerate(facts):
            x, free = rng.random(), self.ordered and not raw.startswith("@") and MOVES.search(raw) is not None
            if i == 0:
                leads = FIRST if self.sheet.past else ANY_TENSE
                out = (self.say(rng.choice(leads)) if free and x < 0.14 else "") + self.say(raw)
            elif x < 0.6:
                out += ". " + (self.say(rng.choice(LATER)) if free and rng.random() < 0.3 else "") + self.say(raw)
            elif raw.startswith("{who} ") and facts[i - 1].startswith("{who} ") and x < 0.92:
                out += rng.choice([" and ", " and ", ", then ", " and then ", " but ", ", but "]) + self.say(raw[6:])
            else:
                joints = [", and ", " and ", "; ", ", but " if self.ordered else ", while "]
                out += rng.choice(joints) + self.say(raw)
        return out

    def opening(self) -> str:
        """All facts but the last as sentences; said once, for what has been said is named differently after."""
        return self.story(self.facts[:-1]) + ". " if len(self.facts) > 1 else ""

    def condition(self, facts: list[str]) -> str:
        """The facts in one sentence."""
        return " and ".join(self.say(raw) for raw in facts)

    def ask(self) -> str:
        """The question as a sentence of its own."""
        text, rng = self.say(self.question), self.rng
        if rng.random() < 0.12 and ("<" in text or text.startswith("=")):
            inner = BOTH_FORMS.sub(r"\2", text.lstrip("="))
            return self.say(rng.choice(INDIRECT)).replace("#", inner)
        return (self.say(rng.choice(BEFORE)) if rng.random() < 0.04 else "") + direct(text) + "?"

    def tell(self) -> str:
        """The whole sum."""
        facts, rng = self.facts, self.rng
        x, many = rng.random(), len(facts)
        if any(". " in raw for raw in facts):
            x = 1.0
        if x < 0.09 and many <= 3:
            return f"{direct(self.say(self.question))} if {self.condition(facts)}?"
        if x < 0.12:
            return f"{self.ask()} {self.story(facts)}."
        if x < 0.22:
            return f"{self.opening()}if {self.say(facts[-1])}, {direct(self.say(self.question))}?"
        if x < 0.27 and many > 1:
            before = self.opening()
            asked, word = direct(self.say(self.question)), rng.choice(["if", "when", "if"])
            return f"{before}{asked} {word} {self.say(facts[-1])}?"
        if x < 0.30 and self.ordered and many > 1 and EVENT.search(facts[-1]):
            word = rng.choice(["after", "when", "once"])
            return f"{self.opening()}{word} {self.say(facts[-1])}, {direct(self.say(self.question))}?"
        story = self.story(facts)
        if x < 0.34:
            return f"{story}{rng.choice([', so ', '. so ', ' - ', ', and ', ': '])}{direct(self.say(self.question))}?"
        if x < 0.36:
            return f"{rng.choice(['suppose', 'imagine', 'say', 'assume'])} {story}. {self.ask()}"
        return f"{story}. {self.ask()}"


def direct(text: str) -> str:
    return BOTH_FORMS.sub(r"\1", text.lstrip("="))


def keys_of(template: Template) -> list[str]:
    return sorted(key for key in template.parts if key != "k")


def told(rng: random.Random, template: Template) -> Problem | None:
    """One problem, or None when the drawn numbers break a condition or leave the non-negative integers."""
    sheet = Telling(rng, template)
    if any(not compiled(c)(sheet.numbers) for c in template.conditions):
        return None
    drawn = ",".join(f"{k}{v}" for k, v in sorted(sheet.numbers.items()))
    keys = keys_of(template)
    ordered = keys[0].isdigit()
    if not ordered:
        rng.shuffle(keys)
    facts = [rng.choice(template.parts[key]) for key in keys]
    text = FIRST_PERSON.sub("I", tidy(Teller(rng, sheet, facts, rng.choice(template.parts["k"]), ordered).tell()))
    work = Work(sheet)
    sheet.spelled = sheet.wordy = False
    try:
        for line in template.work:
            work.run(line)
    except OutOfRangeError:
        return None
    key = f"{template.name}|{drawn}"
    return Problem(template.name, distracted(rng, text), tuple(work.lines), tuple(work.steps), work.unit, key)
