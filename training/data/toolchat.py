"""Conversations with tools: one call, two calls in a turn, answers from results, and turns that need no tool."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.data.arithmetic import larger, sequence
from training.data.cast import any_city
from training.data.chat import Call, Message, Tool, Turn, call_text, dumps
from training.data.strings import strings
from training.data.talk import SYSTEMS, smalltalk
from training.data.tools import COMMON, Use, clock, others, some_use, weather

JOINS = ["{a} And {b}", "{a} Also: {b}", "{a} Then {b}", "{a} {b}"]


@dataclass(frozen=True)
class ToolChat:
    """`calls` is what the last answer must call, None when it answers in words; `user` is the request."""

    messages: list[Message]
    tools: list[Tool]
    think: str
    calls: list[Call] | None
    user: str


def _system(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.4 else []


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def requested(rng: random.Random, double: bool) -> tuple[str, list[Use]]:
    """A request and the uses it asks for: one, or two of the same tool or of different ones."""
    first = some_use(rng)
    if not double:
        return first.request, [first]
    if rng.random() < 0.4:
        maker = rng.choice([weather, clock])
        first = maker(rng)
        (name, arguments) = first.call
        key, city = next(iter(arguments.items()))
        other = any_city(rng)
        while other == city:
            other = any_city(rng)
        if len(arguments) == 1:
            request = first.request.replace(city, f"{city} and {other}", 1)
            second = Use(
                first.tool, "", (name, {key: other}), dict(maker(rng).result), first.answer.replace(city, other)
            )
            return request, [first, second]
    first, second = (maker(rng) for maker in rng.sample(COMMON, 2))
    request = rng.choice(JOINS).format(a=first.request, b=second.request)
    return request, [first, second]


def answer_of(uses: list[Use]) -> str:
    return " ".join(_answer(use) for use in uses)


def _answer(use: Use) -> str:
    """The answer from the result (the second use of one tool carries its own result)."""
    if "temperature" in use.result:
        city = next(iter(use.call[1].values()))
        return f"It is {use.result['condition']} and {use.result['temperature']} degrees in {city}."
    if "time" in use.result:
        city = next(iter(use.call[1].values()))
        return f"It is {use.result['time']} in {city}."
    return use.answer


def call_chat(rng: random.Random, double: bool = False, tools: int | None = None) -> ToolChat:
    """The last answer is one call, or two."""
    request, uses = requested(rng, double)
    count = rng.choice([0, 0, 1, 1, 2, 3]) if tools is None else tools - len({u.name for u in uses})
    calls = [u.call for u in uses]
    names = " and ".join(dict.fromkeys(u.name for u in uses))
    think = f"I should call {names}." + (" I need two calls." if double else "")
    messages = [*_system(rng), {"role": "user", "content": request}, {"role": "assistant", "content": call_text(calls)}]
    return ToolChat(messages, others(rng, uses, count), think, calls, request)


def result_chat(rng: random.Random) -> ToolChat:
    """The last answer is made from the results of one or two calls."""
    request, uses = requested(rng, rng.random() < 0.3)
    chat = [
        *_system(rng),
        {"role": "user", "content": request},
        {"role": "assistant", "content": call_text([u.call for u in uses])},
    ]
    chat += [{"role": "tool", "content": dumps(u.result)} for u in uses]
    chat.append({"role": "assistant", "content": answer_of(uses)})
    think = "The tool gave the result. I can answer now."
    return ToolChat(chat, others(rng, uses, rng.choice([0, 1, 1, 2, 3])), think, None, request)


def plain_chat(rng: random.Random) -> ToolChat:
    """Tools are offered, none is needed."""
    makers: list[Callable[[random.Random], Turn]] = [larger, sequence, smalltalk, smalltalk, strings]
    while True:
        turn = rng.choice(makers)(rng)
        user = turn.user
        if not any(
            w in user.lower() for w in ("weather", "time is", "raining", "day is it", "translate", "search", "find")
        ):
            break
    tools = others(rng, [], rng.choice([1, 1, 2, 3, 4]))
    messages = [*_system(rng), {"role": "user", "content": user}, {"role": "assistant", "content": turn.answer}]
    return ToolChat(messages, tools, "No tool is needed here.", None, user)


def tool_chat(rng: random.Random) -> ToolChat:
    """One conversation with tools of any sort."""
    x = rng.random()
    if x < 0.46:
        return call_chat(rng)
    if x < 0.60:
        return call_chat(rng, tools=4)
    if x < 0.72:
        return call_chat(rng, double=True)
    return result_chat(rng) if x < 0.90 else plain_chat(rng)
