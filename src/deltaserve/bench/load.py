"""Loads: which requests are sent, and when. Clients that wait for their answers, or arrivals that wait for nobody.

Knows a target and records; no figures.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from deltaserve.bench.target import Api, Record, Target

TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back face others level door health"
)
WORDS = TEXT.split()
"""Most vocabularies have each of them, with the blank before it, as one token."""
PROBE_TOKENS = 8
FIT_WORDS = 256


@dataclass(frozen=True)
class Load:
    """One way of sending requests: `clients` that each wait for an answer, or `rate` arrivals a second."""

    clients: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"clients {self.clients}" if self.rate is None else f"rate {self.rate:g}"


def read_loads(clients: str | None, rates: str | None) -> list[Load]:
    """From "1,8,32" and "0.5,2,inf"; clients come first. Raises ValueError for what is no number above 0."""
    counts = _numbers("concurrency", clients)
    if any(not number.is_integer() for number in counts):
        raise ValueError(f"concurrency is {clients!r}; it must be whole numbers, with commas between them")
    return [
        *(Load(clients=int(number)) for number in counts),
        *(Load(rate=number) for number in _numbers("rates", rates)),
    ]


def _numbers(name: str, text: str | None) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        numbers = [0.0]
    if any(not number > 0 for number in numbers):
        raise ValueError(f"{name} is {text!r}; it must be numbers above 0, with commas between them")
    return numbers


class Prompts:
    """Random prompts that never repeat. Equal seeds and names give equal prompts."""

    def __init__(self, kind: Literal["tokens", "words"], api: Api, vocab_size: int, seed: int) -> None:
        self._kind, self._api, self._vocab_size, self._seed = kind, api, vocab_size, seed
        self._slope, self._offset = 1.0, 0.0
        """Tokens of a word, and of what stands around the words."""

    @property
    def are_words(self) -> bool:
        return self._kind == "words" or self._api == "chat"

    def ids(self, length: int, name: str) -> list[int]:
        drawn: list[int] = self._generator(name).integers(0, self._vocab_size, length).tolist()
        return drawn

    def text(self, length: int, name: str) -> str:
        """About `length` tokens."""
        count = max(1, round((length - self._offset) / self._slope))
        return " ".join(WORDS[i] for i in self._generator(name).integers(0, len(WORDS), count))

    def body(self, length: int, name: str) -> dict[str, Any]:
        """A request with a prompt of `length` tokens."""
        if not self.are_words:
            return {"prompt": self.ids(length, name)}
        text = self.text(length, name)
        return {"messages": [{"role": "user", "content": text}]} if self._api == "chat" else {"prompt": text}

    async def fit(self, target: Target, length: int, name: str) -> None:
        """Warms the target up, and learns from its usage how many tokens words are there.

        Raises RuntimeError when it refuses a prompt of this length.
        """
        if self.are_words:
            self._slope, self._offset = 1.0, 0.0
            few, many = max(1, min(length, FIT_WORDS) // 2), max(2, min(length, FIT_WORDS))
            low, high = [await self._probe(target, count, f"{name} {count}") for count in (few, many)]
            if low.failure is None and high.failure is None and high.prompt_tokens > low.prompt_tokens:
                self._slope = (high.prompt_tokens - low.prompt_tokens) / (many - few)
                self._offset = low.prompt_tokens - few * self._slope
        await self._probe(target, length, name)

    async def _probe(self, target: Target, length: int, name: str) -> Record:
        return await target.learn(self.body(length, name) | {"max_tokens": PROBE_TOKENS, "temperature": 0.0})

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng(random.Random(f"{self._seed} {name}").getrandbits(64))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process, or all at once for infinity."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


@dataclass(frozen=True)
class Run:
    """What came of one load."""

    records: list[Record]
    seconds: float
    """From the start to the last end."""
    busy: float
    """Share of that time in which the client itself computed; near 1 it measures itself."""


async def drive(target: Target, load: Load, payloads: Sequence[bytes], seed: int) -> Run:
    """Sends every payload once, as the load says. A failure is a record and ends nothing."""
    start, work = time.perf_counter(), time.process_time()
    if load.rate is not None:
        times = arrivals(load.rate, len(payloads), seed)
        records = await asyncio.gather(
            *(_at(target, payload, start + wait) for payload, wait in zip(payloads, times, strict=True))
        )
    else:
        waiting = iter(payloads)
        assert load.clients is not None, "a load is clients or a rate"

        async def client() -> list[Record]:
            return [await target.ask(payload, time.perf_counter()) for payload in waiting]

        each = await asyncio.gather(*(client() for _ in range(load.clients)))
        records = list(chain.from_iterable(each))
    seconds = max(record.ended for record in records) - start
    return Run(records, seconds, (time.process_time() - work) / seconds)


async def _at(target: Target, payload: bytes, due: float) -> Record:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return await target.ask(payload, due)
