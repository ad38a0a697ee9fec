"""The arithmetic of worded sums: a written step, and its digit-level working for the thinking variant."""

from dataclasses import dataclass

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
TEENS = ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 10: "a tenth"}
ORDINALS = ["zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]


def in_words(n: int) -> str:
    """A number from 0 to 999 in English words."""
    if n < 13:
        return WORDS[n]
    if n < 20:
        return TEENS[n - 13]
    if n < 100:
        return TENS[n // 10] + ("-" + WORDS[n % 10] if n % 10 else "")
    return in_words(n // 100) + " hundred" + (" and " + in_words(n % 100) if n % 100 else "")


class OutOfRangeError(ValueError):
    """The result of a step is no non-negative integer."""


@dataclass(frozen=True)
class Step:
    """One operation ``left op right = result`` on non-negative integers."""

    left: int
    op: str
    right: int

    @property
    def result(self) -> int:
        a, b = self.left, self.right
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else -1}[self.op]
        if value < 0 or (self.op == "/" and value * b != a):
            raise OutOfRangeError(f"{a} {self.op} {b} leaves the non-negative integers")
        return value

    def written(self) -> str:
        """``3 * 4 = 12``, a hard product split into parts."""
        return (
            product(self.left, self.right) if self.op == "*" else f"{self.left} {self.op} {self.right} = {self.result}"
        )

    def working(self) -> str | None:
        """The step in smaller steps, or None where it is easy."""
        a, b, c = self.left, self.right, self.result
        if self.op in "+-" and b >= 10 and b % 10 and (self.op == "-" or a >= 10):
            tens = b // 10 * 10
            middle = a + tens if self.op == "+" else a - tens
            return f"{a} {self.op} {b}: {a} {self.op} {tens} = {middle}, {middle} {self.op} {b % 10} = {c}."
        if self.op == "*" and 10 < a < 100 and b < 10 and a % 10:
            tens, ones = a // 10 * 10, a % 10
            return f"{a} * {b}: {tens} * {b} = {tens * b}, {ones} * {b} = {ones * b}, {tens * b} + {ones * b} = {c}."
        if self.op == "/" and c >= 10:
            return f"Check: {product(c, b)}."
        return None


def product(a: int, b: int) -> str:
    """``a * b = c``, split into parts when it is too hard for one step."""
    c = a * b
    if a <= 10 or (b <= 10 and a < 100):
        return f"{a} * {b} = {c}" if a < 10 or b <= 10 or b % 10 == 0 else _long(a, b)
    if b <= 10:
        hundreds, rest = a // 100 * 100, a % 100
        if not rest:
            return f"{a} * {b} = {c}"
        return f"{a} * {b} = {hundreds} * {b} + {rest} * {b} = {hundreds * b} + {rest * b} = {c}"
    return _long(a, b)


def _long(a: int, b: int) -> str:
    tens, ones = b // 10 * 10, b % 10
    if a == 10 or not tens:
        return f"{a} * {b} = {a * b}"
    if not ones:
        return f"{a} * {b} = {a} * {b // 10} * 10 = {a * (b // 10)} * 10 = {a * b}"
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"
