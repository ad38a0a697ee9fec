"""Sentences that do not matter to a sum, as people put them in."""

import random
import re

from training.data.cast import Cast
from training.data.grammar import articles, expand, sentences

DISTRACTIONS = [
    "it is {a sunny|a rainy|a cold|a busy|a quiet|an ordinary} day.",
    "it {is|was} {day}.",
    "the {weather|sun|sky} is {nice|bad|grey|bright}.",
    "{p} {likes|hates|loves} {colors}.",
    "{p} lives in {city}.",
    "{p} is {k} years old.",
    "everyone is {happy|tired|hungry|busy}.",
    "the {places} opens at {h} o'clock.",
    "{p} has a {colors} {goods}.",
    "{p} has {h} {cousins|brothers|neighbors}.",
    "{p} got up at {h} o'clock.",
    "{p} has lived in {city} for {k} years.",
    "{p} wears a {colors} {hat|shirt|coat|scarf}.",
    "{p} came along to help.",
    "the {places} is {k} {miles|km|minutes} away.",
    "{p} was {born|married|hired} in {y}.",
    "it is {h} degrees outside.",
    "the {places} has {k} {windows|workers|steps|rooms}.",
    "the {places} is on {k} {p} Street.",
    "{p} has been {here|there|waiting} since {h}.",
    "{p} had {h} hours of sleep.",
    "the bus number is {k}.",
    "{p} is {h} years {older|younger} than {q}.",
    "all this was {k} years ago.",
    "they had met {h} times before.",
    "{p} prefers {tea|music|rain|snow}.",
    "{p} was {not there|late again|asleep|on holiday}.",
    "a {goods} stands in the corner.",
    "{p} and {q} are {friends|cousins|neighbors}.",
    "nobody knows why.",
    "{p} does this every year.",
    "the {trades} was very {kind|slow|loud|pleased}.",
    "it had been a long {day|week|winter}.",
    "{p} hummed a tune.",
    "{p}'s phone rang.",
    "{that took all day|it was hard work|nobody was surprised|the dog barked|they had fun|then it rained}.",
]


def distracted(rng: random.Random, question: str, share: float = 0.10) -> str:
    """Sometimes inserts a sentence that does not matter before the question proper."""
    if rng.random() > share:
        return question
    cast = Cast(rng)
    cast.set("k", str(rng.randint(3, 40)))
    cast.set("h", str(rng.randint(2, 11)))
    cast.set("y", str(rng.randint(1950, 2025)))
    extra = articles(sentences(expand(rng.choice(DISTRACTIONS), rng, cast)))
    parts = re.split(r"(?<=[.!]) (?=[A-Z0-9])", question)
    parts.insert(rng.randrange(len(parts)), extra)
    return " ".join(parts)
