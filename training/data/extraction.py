"""Reading a text into JSON, by named keys or by a given schema."""

import random
from collections.abc import Callable
from typing import Any

from training.data.cast import DAYS, MONTHS, Cast, any_city, any_name, any_noun, plural, words
from training.data.chat import Turn, dumps
from training.data.grammar import expand, sentences

Record = tuple[str, dict[str, Any]]
SAMPLES: dict[str, Any] = {
    "name": "Anna", "age": 30, "city": "Paris", "color": "blue", "country": "France", "price": 10, "title": "My book",
    "year": 2020, "count": 3, "email": "anna@example.com", "active": True, "id": 1, "score": 95, "tags": ["a", "b"],
    "quantity": 2, "item": "apple", "day": "Monday", "hour": 9, "answer": 42, "language": "English",
    "weather": "sunny", "temperature": 21,
}  # fmt: skip


def _told(rng: random.Random, text: str, values: dict[str, Any]) -> str:
    cast = Cast(rng)
    for key, value in values.items():
        cast.set(key, str(value))
    return sentences(expand(text, rng, cast))


def person(rng: random.Random) -> Record:
    name, pronoun = any_name(rng)
    data: dict[str, Any] = {"name": name, "age": rng.randint(5, 90), "city": any_city(rng)}
    text = (
        "{{name} is {age} years old and lives in {city}.|my name is {name}, I am {age} and I live in {city}."
        "|{name}, {age}, from {city}.|{name} lives in {city}. {name} is {age} years old."
        "|this is {name} from {city}, {age} years old.|{name} ({age}) moved to {city}.}"
    )
    if rng.random() < 0.5:
        data["color"] = rng.choice(words("colors"))
        text += "{ {who} favorite color is {color}.| {he2} likes the color {color}.| {he2} wears a {color} hat.}"
    if rng.random() < 0.3:
        data["job"] = rng.choice(words("trades"))
        text += "{ {he2} works as a {job}.| {he2} is a {job}.}"
    own = {"he2": pronoun.capitalize(), "who": "Her" if pronoun == "she" else "His"}
    return _told(rng, text, data | own), data


def order(rng: random.Random) -> Record:
    data = {
        "customer": any_name(rng)[0],
        "item": plural(any_noun(rng)),
        "quantity": rng.randint(2, 99),
        "price": rng.randint(1, 400),
    }
    text = (
        "{{customer} ordered {quantity} {item} for ${price}."
        "|order from {customer}: {quantity} {item}, ${price} in total."
        "|{quantity} {item} were sold to {customer} for ${price}."
        "|{customer} bought {quantity} {item} and paid ${price}."
        "|please send {quantity} {item} to {customer}. the price is ${price}.}"
    )
    return _told(rng, text, data), data


def event(rng: random.Random) -> Record:
    data = {
        "who": any_name(rng)[0],
        "day": rng.choice(DAYS),
        "hour": rng.randint(1, 12),
        "place": rng.choice(words("places")),
    }
    text = (
        "{{who} goes to the {place} on {day} at {hour}.|on {day} at {hour} o'clock {who} is at the {place}."
        "|{who} meets us at the {place}, {day}, {hour} o'clock."
        "|the meeting with {who} is on {day} at {hour} in the {place}.}"
    )
    return _told(rng, text, data), data


def product(rng: random.Random) -> Record:
    stock = rng.random() < 0.5
    data = {
        "product": rng.choice(words("goods")),
        "color": rng.choice(words("colors")),
        "price": rng.randint(5, 900),
        "in_stock": stock,
    }
    state = rng.choice(
        ["is in stock", "is available", "can be bought"]
        if stock
        else ["is not in stock", "is sold out", "is not available"]
    )
    text = (
        "{the {color} {product} costs ${price} and {state}.|{product} ({color}), ${price}, {state}."
        "|we sell a {color} {product} for ${price}. it {state}.}"
    )
    return _told(rng, text, data | {"state": state}), data


def weather(rng: random.Random) -> Record:
    data = {
        "city": any_city(rng),
        "temperature": rng.randint(-9, 39),
        "condition": rng.choice(["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]),
    }
    text = (
        "{it is {condition} and {temperature} degrees in {city}.|in {city} it is {temperature} degrees and {condition}."
        "|{city}: {condition}, {temperature} degrees.|the weather in {city} is {condition} at {temperature} degrees.}"
    )
    return _told(rng, text, data), data


def book(rng: random.Random) -> Record:
    title = f"The {rng.choice(words('colors')).capitalize()} {any_noun(rng).capitalize()}"
    author = f"{any_name(rng)[0]} {rng.choice(words('surnames'))}"
    data = {"title": title, "author": author, "year": rng.randint(1900, 2026), "pages": rng.randint(40, 900)}
    text = (
        "{{author} wrote {title} in {year}. it has {pages} pages.|{title} by {author} ({year}, {pages} pages)."
        "|the book {title} has {pages} pages. {author} wrote it in {year}.}"
    )
    return _told(rng, text, data), data


def trip(rng: random.Random) -> Record:
    start, end = any_city(rng), any_city(rng)
    data = {"from": start, "to": end, "month": rng.choice(MONTHS), "passengers": rng.randint(1, 9)}
    text = (
        "{a trip from {from} to {to} in {month} for {passengers} people."
        "|{passengers} people fly from {from} to {to} in {month}."
        "|in {month} we travel to {to} from {from}. we are {passengers} people.}"
    )
    return _told(rng, text, data), data


def basket(rng: random.Random) -> Record:
    items = list(dict.fromkeys(plural(any_noun(rng)) for _ in range(rng.randint(2, 4))))
    listed = ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else items[0]
    data: dict[str, Any] = {"name": any_name(rng)[0], "items": items}
    text = "{{name} bought {listed}.|the basket of {name} holds {listed}.|{name} needs {listed}.}"
    return _told(rng, text, data | {"listed": listed}), data


RECORDS: list[Callable[[random.Random], Record]] = [person, person, order, event, product, weather, book, trip, basket]


def record(rng: random.Random, subset: bool = True) -> Record:
    """A text and the JSON object that says the same, sometimes with only some keys."""
    text, data = rng.choice(RECORDS)(rng)
    keys = list(data)
    if subset and rng.random() < 0.4:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    return text, {k: data[k] for k in keys}


def listed(keys: list[str]) -> str:
    return ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]


def type_of(value: Any) -> dict[str, Any]:
    """The JSON schema of a value."""
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": {bool: "boolean", int: "integer", str: "string", float: "number"}[type(value)]}


def schema(rng: random.Random, data: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "object", "properties": {k: type_of(v) for k, v in data.items()}}
    if rng.random() < 0.8:
        out["required"] = list(data)
    if rng.random() < 0.3:
        out["additionalProperties"] = False
    return out


def by_schema(rng: random.Random) -> Turn:
    """A text, a schema and the object that fits both."""
    text, data = record(rng)
    form = dumps(schema(rng, data))
    ask = rng.choice(
        [
            f"{text}\nReply with JSON that matches this schema:\n{form}",
            f"Use this JSON schema:\n{form}\n\nText: {text}",
            f"Schema: {form}\nText: {text}\nGive me the JSON.",
            f"Read the text and fill the schema.\n{text}\n{form}",
            f"Extract the data as JSON. The schema is {form}. The text is: {text}",
            f"{form}\n\n{text}",
        ]
    )
    return Turn(ask, f"The schema has the keys {', '.join(data)}.", dumps(data))


def by_keys(rng: random.Random) -> Turn:
    text, data = record(rng)
    keys = list(data)
    ask = rng.choice(
        [
            f"Extract {listed(keys)} as JSON.\n{text}",
            f"{text}\nReturn a JSON object with {listed(keys)}.",
            f"Read the text and reply with JSON ({', '.join(keys)}).\nText: {text}",
            f"{text}\nAs JSON with {listed(keys)}, please.",
            f"Extract the {listed(keys)} from this text as JSON: {text}",
            f"Give me {listed(keys)} as a JSON object: {text}",
        ]
    )
    return Turn(ask, f"The keys are {', '.join(keys)}.", dumps(data))


def invented_object(rng: random.Random) -> Turn:
    keys = rng.sample(list(SAMPLES), rng.randint(1, 5))
    data = {k: SAMPLES[k] for k in keys}
    if rng.random() < 0.4:
        form = dumps(schema(rng, data))
        ask = rng.choice(
            [f"Make up an object for this JSON schema: {form}", f"Give me example JSON for this schema.\n{form}"]
        )
        return Turn(ask, f"The schema has the keys {', '.join(keys)}.", dumps(data))
    ask = rng.choice(
        [
            f"Give me a JSON object with {listed(keys)}.",
            f"Make up a JSON object with the keys {', '.join(keys)}.",
            f"Reply with JSON. Keys: {', '.join(keys)}",
            f"Generate a person as JSON with {listed(keys)}.",
            f"Write JSON with the keys {listed(keys)}.",
        ]
    )
    return Turn(ask, f"The keys are {', '.join(keys)}.", dumps(data))


def extraction(rng: random.Random) -> Turn:
    """One JSON task."""
    x = rng.random()
    return invented_object(rng) if x < 0.12 else by_schema(rng) if x < 0.5 else by_keys(rng)
