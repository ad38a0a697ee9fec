"""Sums told as a chain of events, of one to four steps."""

import random

from training.data.distraction import distracted
from training.data.problems import Problem, Sheet, Template, Work, spread

LENGTHS = ([1, 2, 3, 4], [1, 5, 5, 2])


class Chain:
    """The running amount of a story and the sentences so far."""

    def __init__(self, rng: random.Random, template: Template) -> None:
        self.rng, self.template = rng, template
        self.sheet = Sheet(rng, template)
        self.work = Work(self.sheet)
        self.unit = template.parts["unit"][0]
        self.amount = self.sheet.numbers["n"]
        self.numbers = [self.amount]
        self.told = [rng.choice(template.parts["open"])]
        self.events: list[str] = []

    def options(self) -> list[str]:
        """The kinds of event that the amount allows."""
        n = self.amount
        allowed = {
            "+": True,
            "-": n >= 4,
            "x": n >= 4,
            "g": n < 200,
            "e": n >= 12,
            "h": n >= 4 and n % 2 == 0,
            "d": n <= 80,
            "t": n >= 6 and n % 3 == 0,
        }
        weights = {"+": 4, "-": 5, "x": 2, "g": 1, "e": 1, "h": 1, "d": 1, "t": 1}
        return [k for k, w in weights.items() if allowed[k] and k in self.template.parts for _ in range(w)]

    def event(self) -> None:
        kind = self.rng.choice(self.options())
        phrase = self.rng.choice(self.template.parts[kind])
        self.events.append(kind if kind != "-" else "m")
        getattr(
            self,
            "_"
            + {
                "+": "plus",
                "-": "minus",
                "x": "both",
                "g": "groups",
                "e": "each",
                "h": "half",
                "d": "double",
                "t": "third",
            }[kind],
        )()
        self.told.append(self.sheet.text(phrase))

    def _set(self, **numbers: int) -> None:
        self.sheet.numbers.update(numbers)
        self.numbers += numbers.values()

    def _do(self, op: str, right: int) -> None:
        self.amount = self.work.step(self.amount, op, right, self.unit)

    def _plus(self) -> None:
        x = spread(self.rng, 2, 30)
        self._set(x=x)
        self._do("+", x)

    def _minus(self) -> None:
        x = self.rng.randint(2, self.amount - 1)
        self._set(x=x)
        self._do("-", x)

    def _both(self) -> None:
        x, y = self.rng.randint(2, self.amount - 1), spread(self.rng, 2, 30)
        self._set(x=x, y=y)
        self._do("-", x)
        self._do("+", y)

    def _groups(self) -> None:
        a, b = self.rng.randint(2, 9), self.rng.randint(2, 12)
        self._set(a=a, b=b)
        self._do("+", self.work.step(a, "*", b, self.unit))

    def _each(self) -> None:
        a = self.rng.randint(2, 5)
        b = self.rng.randint(1, max(1, min(9, (self.amount - 1) // a)))
        self._set(a=a, b=b)
        self._do("-", self.work.step(a, "*", b, self.unit))

    def _half(self) -> None:
        self._do("/", 2)

    def _double(self) -> None:
        self._do("*", 2)

    def _third(self) -> None:
        self._do("-", self.work.step(self.amount, "/", 3, self.unit))

    def ending(self) -> None:
        parts, n = self.template.parts, self.amount
        divisors = [d for d in range(2, 10) if n % d == 0 and 2 <= n // d < 100]
        if "share" in parts and divisors and self.rng.random() < 0.2:
            d = self.rng.choice(divisors)
            self._set(d=d)
            self.events.append("s")
            self.told.append(self.rng.choice(parts["share"]))
            self._do("/", d)
        else:
            self.told.append(self.rng.choice(parts["ask"]))


def chain(rng: random.Random, template: Template) -> Problem | None:
    """One chained problem, or None when the story runs out of amounts."""
    story = Chain(rng, template)
    story.told = [story.sheet.text(story.told[0])]
    for _ in range(rng.choices(*LENGTHS)[0]):
        story.event()
    story.ending()
    structure = "-".join(story.events)
    key = f"{template.name}|{structure}|{','.join(map(str, story.numbers))}"
    question = distracted(rng, story.sheet.question(" ".join(story.told)))
    return Problem(
        "chain_" + template.name,
        question,
        tuple(story.work.lines),
        tuple(story.work.steps),
        story.work.unit,
        key,
        structure,
    )
