"""Training documents: which families there are, how often each is drawn, and what is held out.

`document(rng)` draws one document, a list of weighted segments.  Sums are held out by the hash of their numbers and
structure, all other families by the hash of the user's text; the files in ``heldout/`` are excluded by their text.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from training.data.arithmetic import arithmetic, bare
from training.data.cast import any_city, any_name, any_noun, plural, table, words
from training.data.chat import ANSWER_WEIGHT, END_OF_TEXT, USER_WEIGHT, Message, Segment, Turn, chat, render
from training.data.extraction import extraction
from training.data.noise import chatty, varied
from training.data.problems import HELD_OUT, Problem, bucket, problem
from training.data.recall import long_lookup, lookup, remembered
from training.data.strings import long_output, strings
from training.data.talk import SYSTEMS, smalltalk
from training.data.toolchat import ToolChat, tool_chat

HELDOUT = Path(__file__).parent.parent / "heldout"
WRAPPERS = ["{q}"] * 14 + [
    "Question: {q}\nAnswer:",
    "Question: {q}\nAnswer:",
    "Solve this problem: {q}",
    "{q}\nThink step by step.",
    "Problem: {q}",
    "{q} Show your work.",
    "{q}\nEnd with '#### <answer>'.",
    "Please solve: {q}",
    "Help me with this problem.\n{q}",
    "{q}\nGive the final answer after ####.",
    "Q: {q}\nA:",
    "{q} Please help.",
    "I have a question. {q}",
    "Hello! {q}",
    "{q}\nPlease reason step by step, and put the final answer after '####'.",
    "Can you solve this? {q}",
    "Here is a riddle: {q}",
]
SHOT_STYLES = ["Question: {q}\nAnswer:", "Question: {q}\nAnswer:", "Q: {q}\nA:", "Problem: {q}\nSolution:"]
CONTRACTED = re.compile(r"\b([Ww]hat|[Ii]t|[Tt]hat|[Tt]here|[Ss]he|[Hh]e) is (?!that|[tT]hat)")
SMALL: list[tuple[Callable[[random.Random], Turn], float]] = [
    (arithmetic, 10),
    (bare, 6),
    (strings, 11),
    (extraction, 6),
    (smalltalk, 10),
    (lookup, 3),
]


def normal(text: str) -> str:
    """The text without case, spaces and marks."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def forbidden() -> frozenset[str]:
    """The normal form of every question in ``heldout/``."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(HELDOUT.glob("*.jsonl")))
    rows = (json.loads(line) for text in texts for line in text.splitlines())
    return frozenset(normal(row["question"]) for row in rows)


def held(user: str) -> bool:
    """Whether a user's text belongs to the held-out pool."""
    return bucket("user:" + user, HELD_OUT) == 0


def training_problem(rng: random.Random) -> Problem:
    while True:
        p = varied(rng, problem(rng))
        if normal(p.question) not in forbidden():
            return p


def small_turn(rng: random.Random, heldout: bool = False) -> Turn:
    """A turn of one of the small families."""
    makers, weights = zip(*SMALL, strict=True)
    maker = rng.choices(makers, weights)[0]
    while True:
        turn: Turn = maker(rng)
        if held(turn.user) == heldout and normal(turn.user) not in forbidden():
            return turn


def system(rng: random.Random) -> list[Message]:
    """Mostly no system message, sometimes one, seldom two."""
    x = rng.random()
    count = 0 if x < 0.65 else 1 if x < 0.95 else 2
    return [{"role": "system", "content": text} for text in rng.sample(SYSTEMS[2:], count)]


def careless(rng: random.Random, question: str) -> str:
    """The question as people type it: sometimes without a mark, in lower case, contracted or with a slip of a key."""
    if rng.random() < 0.05:
        question = question.rstrip("?.")
    x = rng.random()
    if x < 0.04:
        question = question.lower()
    elif x < 0.06:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.10:
        question = CONTRACTED.sub(r"\1's ", question)
    return slip(rng, question) if rng.random() < 0.05 else question


def slip(rng: random.Random, question: str) -> str:
    """Drops, doubles or swaps a letter inside one longer word in lower case."""
    words = list(re.finditer(r"\b[a-z]{5,}\b", question))
    if not words:
        return question
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 2)
    a, b = question[at], question[at + 1]
    return question[:at] + rng.choice([b, a + a + b, b + a]) + question[at + 2 :]


def sum_document(rng: random.Random) -> list[Segment]:
    """A worded sum in a chat, with or without thinking, sometimes after earlier turns."""
    messages = system(rng)
    while rng.random() < 0.12 and len(messages) < 8:
        if rng.random() < 0.7:
            earlier = training_problem(rng)
            messages += chat([(earlier.question, earlier.solution())])
        else:
            turn = small_turn(rng)
            messages += chat([(turn.user, turn.answer)])
    p = training_problem(rng)
    question = chatty(rng, careless(rng, p.question))
    user = rng.choice(WRAPPERS).replace("{q}", question)
    if rng.random() < 0.34:
        think, visible = p.thinking()
        return render([*messages, *chat([(user, visible)])], think=think)
    return render([*messages, *chat([(user, p.solution())])], empty_think=rng.random() < 0.08)


def few_shot(rng: random.Random, shots: int, last: Problem | None = None) -> list[Segment]:
    """Worked sums as plain text, for completion prompts; `last` is the final one."""
    style = SHOT_STYLES[0] if last else rng.choice(SHOT_STYLES)
    out: list[Segment] = []
    for i in range(shots + 1):
        p = last if last and i == shots else training_problem(rng)
        out += [(style.replace("{q}", p.question), USER_WEIGHT), (" " + p.solution(), ANSWER_WEIGHT)]
        if i < shots:
            out.append(("\n\n", 0.5))
    return out


def tool_document(rng: random.Random) -> list[Segment]:
    while True:
        t: ToolChat = tool_chat(rng)
        if not held(t.user):
            return render(t.messages, t.tools, think=t.think if rng.random() < 0.25 else None)


def conversation(rng: random.Random, turns: int) -> list[tuple[str, str]]:
    """A chat of `turns` exchanges in which things are told and asked for later, between other requests."""
    pairs = remembered(rng, min(rng.randint(1, 4), max(1, turns // 2)))
    order: list[tuple[float, tuple[str, str]]] = []
    for tell, ask in pairs:
        start = rng.random()
        order += [(start, tell), (rng.uniform(start, 1.0), ask)]
    while len(order) < turns:
        if rng.random() < 0.25:
            p = training_problem(rng)
            order.append((rng.random(), (p.question, p.solution())))
        else:
            turn = small_turn(rng)
            order.append((rng.random(), (turn.user, turn.answer)))
    return [pair for _, pair in sorted(order, key=lambda entry: entry[0])]


def chat_document(rng: random.Random, turns: int) -> list[Segment]:
    messages = [*system(rng), *chat(conversation(rng, turns))]
    return render(messages, think="I look at what the user told me." if rng.random() < 0.1 else None)


def small_document(rng: random.Random) -> list[Segment]:
    turns = [small_turn(rng)]
    while rng.random() < 0.2 and len(turns) < 4:
        turns.append(small_turn(rng))
    messages = [*system(rng), *chat([(t.user, t.answer) for t in turns])]
    x = rng.random()
    return render(messages, think=turns[-1].think if x < 0.25 else None, empty_think=0.25 <= x < 0.32)


def plain_document(rng: random.Random) -> list[Segment]:
    """Text without chat markup, for bare completion prompts."""
    kind = rng.randrange(4)
    if kind == 0:
        rows = rng.sample(table("capitals"), rng.randint(1, 5))
        text = " ".join(f"The capital of {r['country']} is {r['capital']}." for r in rows)
    elif kind == 1:
        text = " ".join(r["fact"] for r in rng.sample(table("facts"), rng.randint(1, 4)))
    elif kind == 2:
        text = (
            f"Hello, my name is {any_name(rng)[0]}. I am {rng.randint(5, 90)} years old and I live in {any_city(rng)}. "
        )
        text += f"My favorite color is {rng.choice(words('colors'))} and I like {plural(any_noun(rng))}."
    else:
        start, step = rng.randint(1, 20), rng.choice([1, 1, 1, 2, 5, 10])
        text = ", ".join(str(start + step * i) for i in range(rng.randint(5, 40)))
    return [(text, 0.5)]


def turn_document(rng: random.Random, turn: Turn) -> list[Segment]:
    return render([*system(rng), *chat([(turn.user, turn.answer)])], think=turn.think if rng.random() < 0.15 else None)


def long_document(rng: random.Random) -> list[Segment]:
    """A document that needs the long rows: a long prompt with a fact, a long answer, or a chat of many turns."""
    x = rng.random()
    if x < 0.45:
        while True:
            turn = long_lookup(rng, rng.choice([200, 400, 700, 1000, 1500, 2000, 2500, 3000]))
            if not held(turn.user):
                return turn_document(rng, turn)
    if x < 0.60:
        return turn_document(rng, long_output(rng))
    if x < 0.75:
        return few_shot(rng, rng.choice([8, 12, 16, 20, 24]))
    return chat_document(rng, rng.randint(6, 14))


def document(rng: random.Random, long: bool = False) -> list[Segment]:
    """One training document; `long` draws long ones among the others."""
    x = rng.random()
    if long and x < 0.14:
        return [*long_document(rng), (END_OF_TEXT, 0.5)]
    x = rng.random()
    if x < 0.58:
        out = sum_document(rng)
    elif x < 0.63:
        out = few_shot(rng, rng.choices([0, 1, 2, 3, 4, 5, 8], [8, 4, 4, 4, 2, 4, 1])[0])
    elif x < 0.735:
        out = tool_document(rng)
    elif x < 0.75:
        out = plain_document(rng)
    elif x < 0.795:
        out = chat_document(rng, rng.randint(2, 5))
    else:
        out = small_document(rng)
    return [*out, (END_OF_TEXT, 0.5)]


def main() -> None:
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(20):
        print("".join(text for text, _ in document(rng)), end="\n\n" + "-" * 80 + "\n\n")


if __name__ == "__main__":
    main()
