"""Tool definitions, requests that need one, the calls and the answers from their results."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.data.cast import DAYS, any_city, any_name, any_noun, invented, plural, words
from training.data.chat import Call, Tool, dumps
from training.data.recall import code

Property = tuple[str, str] | tuple[str, str, list[str]]
TEXTS = [
    "I am late",
    "see you soon",
    "happy birthday",
    "call me back",
    "the meeting is over",
    "dinner is ready",
    "good luck",
    "I will be home at six",
]


@dataclass(frozen=True)
class Use:
    """One tool, a request for it, the call, its result and the answer made from that result."""

    tool: Tool
    request: str
    call: Call
    result: dict[str, Any]
    answer: str

    @property
    def name(self) -> str:
        return self.call[0]


def definition(rng: random.Random, name: str, text: str, properties: dict[str, Property]) -> Tool:
    """A function definition in the OpenAI form, with descriptions here and there."""
    props: dict[str, Any] = {}
    for key, (kind, about, *enum) in properties.items():
        prop: dict[str, Any] = {"type": kind}
        if rng.random() < 0.6:
            prop["description"] = about
        if enum:
            prop["enum"] = enum[0]
        props[key] = prop
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = text
    function["parameters"] = {"type": "object", "properties": props, "required": list(properties)}
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def weather(rng: random.Random) -> Use:
    name, key, city = (
        rng.choice(["get_weather", "get_current_weather", "weather"]),
        rng.choice(["city", "location"]),
        any_city(rng),
    )
    properties: dict[str, Property] = {key: ("string", "The city")}
    arguments: dict[str, Any] = {key: city}
    request = rng.choice(
        [
            f"What is the weather in {city}?",
            f"What's the weather like in {city} today?",
            f"How is the weather in {city}?",
            f"Is it raining in {city}?",
            f"Tell me the weather in {city}.",
            f"Do I need a coat in {city}?",
            f"How warm is it in {city}?",
            f"Check the weather in {city}, please.",
            f"Weather in {city}?",
            f"What is the current weather in {city}?",
        ]
    )
    if rng.random() < 0.25:
        unit = rng.choice(["celsius", "fahrenheit"])
        properties["unit"] = ("string", "The unit", ["celsius", "fahrenheit"])
        arguments["unit"] = unit
        request += f" Use {unit}."
    degrees, sky = rng.randint(-9, 38), rng.choice(["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"])
    tool = definition(rng, name, "Get the current weather for a city", properties)
    return Use(
        tool,
        request,
        (name, arguments),
        {"temperature": degrees, "condition": sky},
        f"It is {sky} and {degrees} degrees in {city}.",
    )


def calculate(rng: random.Random) -> Use:
    name = rng.choice(["add", "multiply", "subtract"])
    a, b = rng.randint(2, 9999), rng.randint(2, 9999)
    word = rng.choice({"add": ["plus", "+"], "multiply": ["times", "*"], "subtract": ["minus", "-"]}[name])
    result = {"add": a + b, "multiply": a * b, "subtract": a - b}[name]
    tool = definition(
        rng,
        name,
        f"{name.capitalize()} two numbers",
        {"a": ("integer", "First number"), "b": ("integer", "Second number")},
    )
    request = rng.choice(
        [f"What is {a} {word} {b}?", f"Use the tool to compute {a} {word} {b}.", f"Compute {a} {word} {b}."]
    )
    return Use(tool, request, (name, {"a": a, "b": b}), {"result": result}, f"The result is {result}.")


def clock(rng: random.Random) -> Use:
    name, key, city = (
        rng.choice(["get_time", "get_current_time"]),
        rng.choice(["city", "location", "timezone"]),
        any_city(rng),
    )
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    request = rng.choice(
        [
            f"What time is it in {city}?",
            f"Tell me the time in {city}.",
            f"How late is it in {city}?",
            f"Time in {city}?",
        ]
    )
    tool = definition(rng, name, "Get the current time in a city", {key: ("string", "The city")})
    return Use(tool, request, (name, {key: city}), {"time": time}, f"It is {time} in {city}.")


def search(rng: random.Random) -> Use:
    name = rng.choice(["search", "web_search", "search_web"])
    colored = f"{rng.choice(words('colors'))} {plural(any_noun(rng))}"
    topic = rng.choice(
        [rng.choice(words("topics")), colored, f"{plural(any_noun(rng))} in {any_city(rng)}", invented(rng)]
    )
    found = rng.randint(2, 99)
    request = rng.choice(
        [
            f"Search for {topic}.",
            f"Look up {topic} on the web.",
            f"Find pages about {topic}.",
            f"Search the web for {topic}.",
        ]
    )
    tool = definition(rng, name, "Search the web", {"query": ("string", "Search query")})
    return Use(tool, request, (name, {"query": topic}), {"results": found}, f"I found {found} results for {topic}.")


def timer(rng: random.Random) -> Use:
    name, k, unit = rng.choice(["set_timer", "start_timer"]), rng.randint(2, 90), rng.choice(["minutes", "seconds"])
    request = rng.choice(
        [
            f"Set a timer for {k} {unit}.",
            f"Start a timer of {k} {unit}.",
            f"Wake me up in {k} {unit}.",
            f"I need a timer for {k} {unit}.",
        ]
    )
    tool = definition(rng, name, "Set a timer", {unit: ("integer", f"Number of {unit}")})
    return Use(tool, request, (name, {unit: k}), {"status": "ok"}, f"The timer is set for {k} {unit}.")


def send(rng: random.Random) -> Use:
    name, person = rng.choice(["send_message", "send_email"]), any_name(rng)[0]
    made = [
        f"bring {rng.randint(2, 20)} {plural(any_noun(rng))}",
        f"the {any_noun(rng)} is {rng.choice(words('colors'))}",
        f"I am in {any_city(rng)}",
    ]
    text = rng.choice(TEXTS + made)
    request = rng.choice(
        [
            f"Tell {person}: {text}",
            f"Send a message to {person} that says {text}",
            f"Write to {person}: {text}",
            f"Send {person} the text: {text}",
        ]
    )
    tool = definition(
        rng, name, "Send a message to a person", {"to": ("string", "The receiver"), "text": ("string", "The text")}
    )
    return Use(
        tool, request, (name, {"to": person, "text": text}), {"status": "sent"}, f"I sent the message to {person}."
    )


def convert(rng: random.Random) -> Use:
    amount, result = rng.randint(2, 900), rng.randint(2, 999)
    x, y = rng.sample(["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "CAD"], 2)
    properties: dict[str, Property] = {
        "amount": ("number", "The amount"),
        "from": ("string", "From currency"),
        "to": ("string", "To currency"),
    }
    request = rng.choice(
        [f"Convert {amount} {x} to {y}.", f"How much is {amount} {x} in {y}?", f"What are {amount} {x} in {y}?"]
    )
    tool = definition(rng, "convert_currency", "Convert an amount of money", properties)
    return Use(
        tool,
        request,
        ("convert_currency", {"amount": amount, "from": x, "to": y}),
        {"result": result},
        f"{amount} {x} is {result} {y}.",
    )


def calendar(rng: random.Random) -> Use:
    name, title = (
        rng.choice(["create_event", "add_event"]),
        rng.choice(["lunch", "meeting", "party", "call", "lesson", "dinner", "match"]),
    )
    day, hour = rng.choice(DAYS), rng.randint(1, 12)
    properties: dict[str, Property] = {
        "title": ("string", "The title"),
        "day": ("string", "The day"),
        "hour": ("integer", "The hour"),
    }
    request = rng.choice(
        [
            f"Add a {title} on {day} at {hour} to my calendar.",
            f"Put a {title} in my calendar, {day} at {hour}.",
            f"I have a {title} on {day} at {hour}. Save it.",
        ]
    )
    tool = definition(rng, name, "Add an event to the calendar", properties)
    return Use(
        tool,
        request,
        (name, {"title": title, "day": day, "hour": hour}),
        {"status": "ok"},
        f"The {title} is in your calendar on {day} at {hour}.",
    )


def stock(rng: random.Random) -> Use:
    symbol, price = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 4))), rng.randint(5, 900)
    request = rng.choice(
        [f"What is the stock price of {symbol}?", f"How much is one share of {symbol}?", f"Price of {symbol} stock?"]
    )
    tool = definition(rng, "get_stock_price", "Get the price of a stock", {"symbol": ("string", "The stock symbol")})
    return Use(
        tool,
        request,
        ("get_stock_price", {"symbol": symbol}),
        {"price": price},
        f"One share of {symbol} costs ${price}.",
    )


def translate(rng: random.Random) -> Use:
    text, language = (
        " ".join(rng.sample(words("spell"), rng.randint(1, 3))),
        rng.choice(["French", "German", "Spanish", "Italian", "Polish"]),
    )
    request = rng.choice(
        [
            f"Translate '{text}' to {language}.",
            f"How do you say '{text}' in {language}?",
            f"Translate '{text}' into {language}.",
        ]
    )
    tool = definition(
        rng,
        "translate",
        "Translate a text",
        {"text": ("string", "The text"), "language": ("string", "Target language")},
    )
    return Use(
        tool,
        request,
        ("translate", {"text": text, "language": language}),
        {"status": "done"},
        f"The translation of '{text}' to {language} is done.",
    )


def _noun(rng: random.Random) -> str:
    known = words("tool_nouns")
    return rng.choice([*known, *known, invented(rng)])


def lookup(rng: random.Random) -> Use:
    """A made-up tool with one argument."""
    verb, noun = rng.choice(words("tool_verbs")), _noun(rng)
    name, key = f"{verb}_{noun}", rng.choice(["id", f"{noun}_id", "name", "number"])
    drawn: list[int | str] = [any_name(rng)[0]] if key == "name" else [rng.randint(1, 99999), code(rng)]
    value = rng.choice(drawn) if key != "name" else drawn[0]
    said = {"name": f"with the name {value}", "number": f"number {value}"}.get(
        key, rng.choice([f"{value}", f"with id {value}"])
    )
    spoken = "look up" if verb == "lookup" else verb
    request = rng.choice(
        [
            f"{spoken.capitalize()} the {noun} {said}.",
            f"Please {spoken} {noun} {said}.",
            f"Can you {spoken} the {noun} {said}?",
            f"Call {name} with {key} {value}.",
            f"I want to {spoken} the {noun} {said}.",
        ]
    )
    properties: dict[str, Property] = {
        key: ("integer" if isinstance(value, int) else "string", f"The {key.replace('_', ' ')}")
    }
    tool = definition(rng, name, f"{spoken.capitalize()} a {noun}", properties)
    return Use(tool, request, (name, {key: value}), {"status": "ok"}, "Done.")


def generic(rng: random.Random) -> Use:
    """A made-up tool with several arguments of mixed types."""
    verb, noun = rng.choice(words("tool_verbs")), _noun(rng)
    pool: dict[str, tuple[str, Any]] = {
        "color": ("string", rng.choice(words("colors"))),
        "count": ("integer", rng.randint(1, 500)),
        "size": ("integer", rng.randint(1, 60)),
        "city": ("string", any_city(rng)),
        "owner": ("string", any_name(rng)[0]),
        "day": ("string", rng.choice(DAYS)),
        "fast": ("boolean", rng.random() < 0.5),
        "item": ("string", any_noun(rng)),
        "code": ("string", code(rng)),
        "price": ("number", rng.choice([rng.randint(1, 900), rng.randint(1, 99) + 0.5])),
    }
    keys = rng.sample(list(pool), rng.randint(2, 4))
    values = {k: pool[k][1] for k in keys}
    shown = [f"{k} {dumps(v) if isinstance(v, bool) else v}" for k, v in values.items()]
    said = ", ".join(shown[:-1]) + f" and {shown[-1]}"
    name, order = f"{verb}_{noun}", rng.sample(keys, len(keys)) if rng.random() < 0.2 else keys
    request = rng.choice(
        [
            f"Call {name} with {said}.",
            f"{verb.capitalize()} the {noun} with {said}.",
            f"Please {verb} a {noun} with {said}.",
        ]
    )
    tool = definition(rng, name, f"{verb.capitalize()} a {noun}", {k: (pool[k][0], f"The {k}") for k in order})
    return Use(tool, request, (name, {k: pool[k][1] for k in order}), {"status": "ok"}, "Done.")


KINDS: list[tuple[Callable[[random.Random], Use], float]] = [
    (weather, 5),
    (calculate, 3),
    (clock, 3),
    (search, 2),
    (timer, 2),
    (send, 2),
    (convert, 2),
    (calendar, 2),
    (stock, 2),
    (translate, 1),
    (lookup, 6),
    (generic, 4),
]
COMMON = [weather, clock, stock, convert, search, calculate]


def some_use(rng: random.Random) -> Use:
    makers, weights = zip(*KINDS, strict=True)
    use: Use = rng.choices(makers, weights)[0](rng)
    return use


def others(rng: random.Random, uses: list[Use], count: int) -> list[Tool]:
    """Definitions of `count` further tools that none of `uses` could mean."""
    out = {u.name: u.tool for u in uses}
    kinds = {_family(n) for n in out}
    while len(out) < len({u.name for u in uses}) + count:
        other = some_use(rng)
        if other.name not in out and (
            _family(other.name) not in kinds or _family(other.name) in ("arithmetic", "made up")
        ):
            out[other.name] = other.tool
            kinds.add(_family(other.name))
    tools = list(out.values())
    rng.shuffle(tools)
    return tools


def _family(name: str) -> str:
    if name in ("add", "multiply", "subtract"):
        return "arithmetic"
    known = ("weather", "time", "search", "timer", "send", "convert", "event", "stock", "translate")
    return next((k for k in known if k in name), "made up")
