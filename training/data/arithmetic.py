"""Plain arithmetic without a story: sums, comparisons, sequences, number words."""

import random
from collections.abc import Callable

from training.data.chat import Turn
from training.data.sums import Step, in_words, product

SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def two(rng: random.Random, bare: float = 0.15) -> Turn:
    """One operation; `bare` is the probability that only the number is asked for, if it is found without working."""
    op = rng.choice("++--**/")
    if op in "+-":
        high = rng.choice([20, 100, 100, 1000, 1000, 5000])
        a, b = rng.randint(0, high), rng.randint(0, high)
        if op == "-" and b > a:
            a, b = b, a
    elif op == "*":
        a, b = _factors(rng)
    else:
        b = rng.randint(2, 12)
        a = b * rng.randint(1, 40)
    step = Step(a, op, b)
    sign, word = (rng.choice(["x", "*", "*"]) if op == "*" else op), SPOKEN[op]
    ask = rng.choice(
        [f"What is {a} {sign} {b}?"] * 2
        + [f"Calculate {a} {sign} {b}.", f"What's {a} {word} {b}?", f"{a} {sign} {b} = ?", f"Compute {a}{sign}{b}"]
        + [
            f"How much is {a} {word} {b}?",
            f"{a}{sign}{b}=",
            f"{a} {sign} {b}",
            f"what is {a} {word} {b}",
            f"Solve {a} {sign} {b}",
        ]
        + [f"Can you tell me what {a} {word} {b} is?", f"I need the result of {a} {sign} {b}.", f"{a} {word} {b}?"]
    )
    working = step.working()
    think = f"I need to compute {a} {op} {b}.\n" + (working + "\n" if working else "") + step.written() + "."
    if rng.random() < bare and not (op == "*" and (min(a, b) > 12 or a > 99)):
        return Turn(
            ask + rng.choice([" Answer with only the number.", " Just the number.", " Only the result, please."]),
            think,
            str(step.result),
        )
    return Turn(ask, think, step.written())


def bare(rng: random.Random) -> Turn:
    """One operation, mostly to be answered with the number alone, which is the hardest to learn."""
    return two(rng, 0.9)


def _factors(rng: random.Random) -> tuple[int, int]:
    ranges = rng.choice(
        [((0, 12), (0, 12)), ((10, 99), (2, 9)), ((2, 9), (10, 99)), ((10, 99), (11, 99)), ((100, 999), (2, 9))]
    )
    return rng.randint(*ranges[0]), rng.randint(*ranges[1])


def three(rng: random.Random) -> Turn:
    a, b, c = rng.randint(2, 60), rng.randint(2, 20), rng.randint(2, 12)
    if rng.random() < 0.5:
        inner = Step(b, "*", c)
        outer = Step(a, "-" if inner.result <= a and rng.random() < 0.5 else "+", inner.result)
        text = f"{a} {outer.op} {b} * {c}"
    else:
        inner = Step(a, "+", b)
        outer = Step(inner.result, rng.choice("+-") if c <= inner.result else "+", c)
        text = f"{a} + {b} {outer.op} {c}"
    lines = f"{inner.written()}\n{outer.left} {outer.op} {outer.right} = {outer.result}"
    ask = rng.choice([f"What is {text}?", f"Calculate {text}.", f"Compute {text}", f"{text} = ?"])
    return Turn(ask, f"I go step by step.\n{lines}", f"{lines}\nThe answer is {outer.result}.")


def brackets(rng: random.Random) -> Turn:
    a, b, c = rng.randint(2, 30), rng.randint(2, 20), rng.randint(2, 9)
    inner = Step(a, "+" if a <= b else rng.choice("+-"), b)
    left = rng.random() < 0.5
    text = f"({a} {inner.op} {b}) * {c}" if left else f"{c} * ({a} {inner.op} {b})"
    lines = f"{inner.written()}\n{product(inner.result, c) if left else product(c, inner.result)}"
    ask = rng.choice([f"What is {text}?", f"Calculate {text}."])
    return Turn(ask, f"First the part in brackets.\n{lines}", f"{lines}\nThe answer is {inner.result * c}.")


def larger(rng: random.Random) -> Turn:
    a = rng.randint(1, 999)
    b = max(0, rng.choice([rng.randint(1, 999), a + rng.choice([-10, -1, 1, 9])]))
    b += a == b
    up = rng.random() < 0.6
    word = rng.choice(["bigger", "larger", "greater"] if up else ["smaller", "less"])
    return Turn(
        f"Which is {word}, {a} or {b}?", f"I compare {a} and {b}.", f"{max(a, b) if up else min(a, b)} is {word}."
    )


def even(rng: random.Random) -> Turn:
    a = rng.randint(1, 999)
    ask = rng.choice([f"Is {a} even or odd?", f"Is {a} odd or even?", f"{a}: even or odd?"])
    return Turn(ask, f"The last digit is {a % 10}.", f"{a} is {'odd' if a % 2 else 'even'}.")


def sequence(rng: random.Random) -> Turn:
    a, d, k = rng.randint(1, 40), rng.randint(2, 12), rng.randint(3, 5)
    xs = [a + d * i for i in range(k + 1)]
    ask = rng.choice(
        ["What comes next: {}?", "What is the next number: {}?", "Continue the sequence {}", "{}, ... What comes next?"]
    )
    think = f"The numbers grow by {d}. {xs[-2]} + {d} = {xs[-1]}."
    return Turn(
        ask.format(", ".join(map(str, xs[:-1]))), think, f"The numbers grow by {d}, so the next number is {xs[-1]}."
    )


def square(rng: random.Random) -> Turn:
    a = rng.randint(1, 30)
    if rng.random() < 0.4:
        ask = rng.choice([f"What is the square root of {a * a}?", f"Square root of {a * a}?"])
        return Turn(ask, f"{product(a, a)}.", f"The square root of {a * a} is {a}.")
    return Turn(
        rng.choice([f"What is {a} squared?", f"What is the square of {a}?"]),
        f"I multiply {a} by itself.",
        product(a, a),
    )


def number_words(rng: random.Random) -> Turn:
    a = rng.randint(0, 999)
    if rng.random() < 0.5:
        return Turn(
            rng.choice([f"Write {a} in words.", f"How do you write {a} in words?"]), f"The number is {a}.", in_words(a)
        )
    return Turn(f"Write the number {in_words(a)} in digits.", "I write the digits.", str(a))


def extreme(rng: random.Random) -> Turn:
    xs = [rng.randint(1, rng.choice([20, 100, 999])) for _ in range(rng.randint(3, 7))]
    up = rng.random() < 0.6
    word = rng.choice(["largest", "biggest"]) if up else "smallest"
    ask = rng.choice(["What is the {} of these numbers: {}?", "Which is the {} number: {}?"]).format(
        word, ", ".join(map(str, xs))
    )
    return Turn(ask, "I look at all numbers.", f"The {word} number is {max(xs) if up else min(xs)}.")


def double(rng: random.Random) -> Turn:
    a = rng.randint(2, 200)
    if rng.random() < 0.4:
        a -= a % 2
        return Turn(f"What is half of {a}?", f"{a} / 2 = {a // 2}.", f"Half of {a} is {a // 2}.")
    return Turn(rng.choice([f"What is twice {a}?", f"Double {a}."]), f"{a} * 2 = {2 * a}.", f"Twice {a} is {2 * a}.")


def add_list(rng: random.Random) -> Turn:
    xs = [rng.randint(1, 99) for _ in range(rng.randint(3, 5))]
    total, lines = xs[0], []
    for x in xs[1:]:
        lines.append(f"{total} + {x} = {total + x}")
        total += x
    listed = ", ".join(map(str, xs))
    ask = rng.choice([f"Add these numbers: {listed}.", f"What is the sum of {listed}?", f"Add up {listed}."])
    text = "\n".join(lines)
    return Turn(ask, "I add one number after the other.\n" + text, text + f"\nThe sum is {total}.")


KINDS: list[tuple[Callable[[random.Random], Turn], float]] = [
    (two, 13), (three, 4), (brackets, 3), (larger, 2), (even, 1), (sequence, 2),
    (number_words, 1), (extreme, 2), (double, 1), (add_list, 2), (square, 1),
]  # fmt: skip


def arithmetic(rng: random.Random) -> Turn:
    """One question of plain arithmetic."""
    makers, weights = zip(*KINDS, strict=True)
    turn: Turn = rng.choices(makers, weights)[0](rng)
    return turn
