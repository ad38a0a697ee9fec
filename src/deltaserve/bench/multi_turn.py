"""`deltaserve bench multi-turn`: conversations that send their whole past with each turn, and what a server computes
again of it.

A turn should prefill what is new, and at most the block that the past ended in. With `new` = prompt tokens less those
of the turn before and of its answer, and `prefilled` = prompt tokens less cached ones, the excess is prefilled - new.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaserve.bench.client_config import MultiTurnConfig
from deltaserve.bench.figures import latencies, statistics
from deltaserve.bench.load import Prompts
from deltaserve.bench.report import append, machine, output
from deltaserve.bench.serve import Lines, number, opened, run_client, say, spread
from deltaserve.bench.target import Record, Target

BLOCK = 64
"""Tokens of a block: what a server may compute again beyond what is new."""


@dataclass(frozen=True)
class Turn:
    number: int
    record: Record
    new: int
    """Prompt tokens that the server has not seen or said in the turn before."""

    @property
    def prefilled(self) -> int | None:
        cached = self.record.cached_tokens
        return None if cached is None else self.record.prompt_tokens - cached

    @property
    def excess(self) -> int | None:
        """None for a first turn: all of it is new."""
        return None if self.prefilled is None or self.number == 1 else self.prefilled - self.new


def run(config: MultiTurnConfig) -> None:
    """Prints a line for each turn number and appends the JSON lines."""
    run_client(_measure(config))


async def _measure(config: MultiTurnConfig) -> None:
    where, path = machine(), output(config.json)
    async with opened([config.url], config, config.api) as (target,):
        say(", ".join(f"{key} {value}" for key, value in target.about.items()))
        prompts = Prompts("words" if config.api == "chat" else "tokens", config.api, config.vocab_size, config.seed)
        await prompts.fit(target, config.prompt_tokens, "fit")
        if config.api == "chat":
            target.extras.pop("ignore_eos", None)  # an answer that ends by itself is the one a chat sends back
        start = time.perf_counter()
        turns = await converse(target, prompts, config)
        seconds = time.perf_counter() - start
        say(f"{config.clients} clients, {seconds:.3g} s; tokens are means of a request, TTFT in ms (mean/p50/p90/p99)")
        rows = [row_of(n, [turn for turn in turns if turn.number == n]) for n in range(1, config.turns + 1)]
        rows.append(row_of("all", turns) | {"duration_s": seconds})
        _print(rows)
        append([row | {"server": target.about} for row in rows], "multi-turn", where, path)


async def converse(target: Target, prompts: Prompts, config: MultiTurnConfig) -> list[Turn]:
    """All conversations, `clients` at a time. One that fails ends, and the others go on."""
    waiting = iter(range(config.conversations or config.clients))

    async def client() -> list[Turn]:
        return [turn for name in waiting for turn in await _conversation(target, prompts, config, f"talk {name}")]

    each = await asyncio.gather(*(client() for _ in range(config.clients)))
    return [turn for turns in each for turn in turns]


async def _conversation(target: Target, prompts: Prompts, config: MultiTurnConfig, name: str) -> list[Turn]:
    turns: list[Turn] = []
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    known = 0
    for turn in range(1, config.turns + 1):
        length = config.prompt_tokens if turn == 1 else config.turn_tokens
        asked: dict[str, Any]
        if config.api == "chat":
            messages.append({"role": "user", "content": prompts.text(length, f"{name} {turn}")})
            asked = {"messages": messages}
        else:
            ids += prompts.ids(length, f"{name} {turn}")
            asked = {"prompt": ids}
        asked |= {"max_tokens": config.output_tokens, "temperature": config.temperature}
        record = await target.ask(target.encode(asked), time.perf_counter(), keep=True)
        turns.append(Turn(turn, record, record.prompt_tokens - known))
        if record.failure is None and config.api == "completions" and len(record.token_ids) != record.output_tokens:
            record.failure = "the answer came without its token ids, so it cannot be sent back; use --api chat"
        if record.failure is not None:
            break
        messages.append({"role": "assistant", "content": record.text})
        ids += record.token_ids
        known = record.prompt_tokens + record.output_tokens
    return turns


def row_of(number_: int | str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures of some turns. Means are over those that succeeded and told."""
    good = [turn for turn in turns if turn.record.failure is None]
    excess = [turn.excess for turn in good if turn.excess is not None]

    def mean(values: Sequence[int | None]) -> float | None:
        told = [value for value in values if value is not None]
        return float(np.mean(told)) if told else None

    first = [latencies(turn.record) for turn in good]
    return {
        "turn": number_,
        "completed": len(good),
        "failed": len(turns) - len(good),
        "failures": dict(Counter(turn.record.failure for turn in turns if turn.record.failure is not None)),
        "ttft_ms": statistics([one["ttft"] for one in first if "ttft" in one]),
        "prompt_tokens": mean([turn.record.prompt_tokens for turn in good]),
        "cached_tokens": mean([turn.record.cached_tokens for turn in good]),
        "prefilled_tokens": mean([turn.prefilled for turn in good]),
        "new_tokens": mean([turn.new for turn in good]),
        "output_tokens": mean([turn.record.output_tokens for turn in good]),
        "excess_tokens": mean(excess),
        "most_excess_tokens": max(excess, default=None),
        "turns_with_a_past": len(excess),
        "turns_beyond_a_block": sum(tokens > BLOCK for tokens in excess),
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = ["turn", "ok", "failed", "TTFT", "prompt", "cached", "prefilled", "new", "answer", "excess", "most"]
    keys = ["prompt", "cached", "prefilled", "new", "output", "excess", "most_excess"]
    lines = Lines(names, [4, 5, 6, 23, 6, 6, 6, 6, 6, 6, 6], say)
    for row in rows:
        counts = [str(row[name]) for name in ("turn", "completed", "failed")]
        lines.add([*counts, spread(row["ttft_ms"]), *(number(row[f"{key}_tokens"]) for key in keys)])
    total = rows[-1]
    for reason, times in total["failures"].items():
        say(f"    failed {times} times: {reason}")
    past, beyond = total["turns_with_a_past"], total["turns_beyond_a_block"]
    if past:
        say(f"{beyond} of {past} later turns prefilled more than their new tokens and a block of {BLOCK}")
    elif total["completed"]:
        say("no later turn, or a server that does not tell cached tokens: no excess can be told")
