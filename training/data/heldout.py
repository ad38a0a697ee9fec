"""Held-out prompts with answers that can be checked, by family."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from training.data.arithmetic import arithmetic
from training.data.chat import END, START, Call, Message, Tool, Turn, chat, dumps, prompt_of, render
from training.data.corpus import HELDOUT, few_shot, held, small_turn
from training.data.extraction import by_keys, by_schema
from training.data.problems import problem
from training.data.recall import long_lookup, lookup, remembered
from training.data.strings import count, numbered_list, strings
from training.data.talk import about_itself, cannot
from training.data.toolchat import ToolChat, call_chat, result_chat, tool_chat

SEED = 777
HAND_WRITTEN = (
    ("hand-written sums", "hand_written"),
    ("hand-written sums, development", "hand_written_dev"),
    ("hand-written sums, second development", "hand_written_dev2"),
    ("hand-written sums, third development", "hand_written_dev3"),
    ("hand-written sums, fourth development", "hand_written_dev4"),
)


@dataclass(frozen=True)
class Item:
    """A prompt and what is expected; `answer` is a number for sums, `calls` are expected tool calls."""

    family: str
    prompt: str
    want: str
    answer: str = ""
    calls: list[Call] | None = None
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] | None = None


def _item(
    family: str, messages: list[Message], tools: list[Tool] | None = None, think: str | None = None, **more: Any
) -> Item:
    prompt, want = prompt_of(render(messages, tools, think=think))
    return Item(family, prompt, want, messages=messages[:-1], tools=tools, **more)


def _sums(rng: random.Random, family: str, n: int, pool: str, think: bool) -> list[Item]:
    out = []
    for _ in range(n):
        p = problem(rng, pool)
        reasoning, visible = p.thinking()
        messages = chat([(p.question, visible if think else p.solution())])
        out.append(_item(family, messages, think=reasoning if think else None, answer=str(p.answer)))
    return out


def _turns(rng: random.Random, family: str, n: int, maker: Callable[[random.Random], Turn]) -> list[Item]:
    out: list[Item] = []
    while len(out) < n:
        turn = maker(rng)
        if held(turn.user):
            out.append(_item(family, chat([(turn.user, turn.answer)])))
    return out


def _tools(
    rng: random.Random, family: str, n: int, maker: Callable[[random.Random], ToolChat], think: bool = False
) -> list[Item]:
    out: list[Item] = []
    while len(out) < n:
        t = maker(rng)
        if held(t.user):
            out.append(_item(family, t.messages, t.tools, t.think if think else None, calls=t.calls))
    return out


def _memory(rng: random.Random, family: str, n: int, turns: int) -> list[Item]:
    """Something told at the start and asked for at the end."""
    out = []
    for _ in range(n):
        (tell, ask), *_ = remembered(rng, 1)
        middle = [small_turn(rng, heldout=True) for _ in range(turns - 2)]
        out.append(_item(family, chat([tell, *((t.user, t.answer) for t in middle), ask])))
    return out


def written_by_hand(name: str) -> list[dict[str, str]]:
    """The rows of a file in ``heldout/``."""
    return [json.loads(line) for line in (HELDOUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _written(family: str, name: str, think: bool = False) -> list[Item]:
    out = []
    for row in written_by_hand(name):
        prompt = f"{START}user\n{row['question']}{END}\n{START}assistant\n" + ("<think>\n" if think else "")
        answer = row["answer"].split("#### ")[-1]
        out.append(Item(family, prompt, row["answer"], answer, messages=[{"role": "user", "content": row["question"]}]))
    return out


def _shots(rng: random.Random, n: int) -> list[Item]:
    out = []
    for _ in range(n):
        p = problem(rng, "numbers")
        segments = few_shot(rng, 5, p)
        out.append(Item("sums, five shots", "".join(text for text, _ in segments[:-1]), segments[-1][0], str(p.answer)))
    return out


def _long(rng: random.Random, n: int) -> list[Item]:
    return [
        *_turns(rng, "fact in 3,000 tokens", n, lambda r: long_lookup(r, 2900)),
        *_turns(rng, "fact in 1,000 tokens", n, lambda r: long_lookup(r, 1000)),
        _item("counting to 500", chat([("Count to 500.", ", ".join(map(str, range(1, 501))))])),
        *(_item("counting to 500", chat([(t.user, t.answer)])) for t in (count(rng, far=True) for _ in range(n // 4))),
        *(_item("list of 100", chat([(t.user, t.answer)])) for t in (_hundred(rng) for _ in range(n // 4))),
    ]


def _hundred(rng: random.Random) -> Turn:
    while True:
        turn = numbered_list(rng, far=True)
        if turn.answer.count("\n") == 99:
            return turn


def items(n: int, seed: int = SEED, long: bool = True) -> list[Item]:
    """About `n` prompts for each family of sums, half of it or less for the others."""
    rng = random.Random(seed)
    half, quarter = n // 2, max(1, n // 4)
    out = [
        *_sums(rng, "sums", n, "numbers", think=False),
        *_sums(rng, "sums, thinking", n, "numbers", think=True),
        *_sums(rng, "sums, unseen structures", n, "structures", think=False),
        *_shots(rng, half),
        *_turns(rng, "arithmetic", half, arithmetic),
        *_turns(rng, "text tasks", half, strings),
        *_turns(rng, "JSON by keys", half, by_keys),
        *_turns(rng, "JSON by schema", half, by_schema),
        *_turns(rng, "lookup", half, lookup),
        *_memory(rng, "memory", quarter, 2),
        *_memory(rng, "ten turns", quarter, 10),
        *_tools(rng, "tools", half, lambda r: tool_chat(r)),
        *_tools(rng, "tools, thinking", quarter, lambda r: call_chat(r), think=True),
        *_tools(rng, "one of four tools", half, lambda r: call_chat(r, tools=4)),
        *_tools(rng, "two calls", half, lambda r: call_chat(r, double=True)),
        *_tools(rng, "answer from results", half, result_chat),
        *_turns(rng, "about itself", quarter, about_itself),
        *_turns(rng, "what it cannot do", half, cannot),
    ]
    for family, name in HAND_WRITTEN:
        out += _written(family, name) + _written(family + ", thinking", name, think=True)
    out += _written("hand-written talk", "hand_talk")
    out += _written("the prototype's sums", "earlier_problems")[:n]
    return out + (_long(rng, quarter) if long else [])


def parse_calls(text: str) -> list[Call] | None:
    """The tool calls in an answer, None where one cannot be read."""
    try:
        bodies = [json.loads(part.split("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
        return [(body["name"], body["arguments"]) for body in bodies]
    except (ValueError, KeyError, TypeError):
        return None


def correct(item: Item, text: str, ended: bool) -> bool:
    """Whether `text`, the answer without its end token, is right; `ended` says that it ended by itself."""
    if item.family == "sums, five shots":
        return text.split("\n\n")[0].rsplit("#### ", 1)[-1].strip() == item.answer
    if not ended:
        return False
    if item.family.endswith("thinking"):
        if text.count("</think>\n\n") != 1:
            return False
        text = text.split("</think>\n\n")[1]
    if item.family == "hand-written talk":
        return text.startswith(item.answer)
    if item.answer:
        return text.rsplit("#### ", 1)[-1] == item.answer
    if item.calls is not None:
        return dumps(parse_calls(text)) == dumps(item.calls)
    if item.family.startswith("JSON"):
        try:
            return bool(json.loads(text) == json.loads(item.want))
        except ValueError:
            return False
    return text == item.want.split("</think>\n\n")[-1]
