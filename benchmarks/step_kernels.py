"""Where the time of a step goes: every kernel of decode steps and of a prompt, by torch's profiler. Needs a GPU.

    python -m benchmarks.step_kernels --rows 1,32 --lengths 1024 -- preset=qwen3-next-80b-a3b-fp8 load_format=dummy

What stands behind `--` are fields of EngineConfig. Prints, for each size, the kernels with their calls in a step, after
the plain tables of `deltaserve bench`. Kernels that start early overlap the one before, so that their times do not add
up. What does add up is `added`: how far the end of a kernel lies behind the latest end of those before it. "(nothing)"
is time in which no kernel ran.

Column          Meaning
mean_us         from a kernel's start to its end
added_us        of one call
step_us         `added` of all calls of a step
share           of all of `step_us`
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deltaserve.bench.floor import measure_rates
from deltaserve.bench.report import environment, table, write
from deltaserve.bench.steps import Stopwatch
from deltaserve.config import EngineConfig
from deltaserve.engine.engine import Engine

NOTHING = "(nothing)"
PROMPT_TOKENS, STEPS = 8, 24
"""Of decode steps that are profiled."""

Event = tuple[str, float, float]
"""A kernel's name, start and end, in microseconds."""


def device_events(profile: torch.profiler.profile) -> list[Event]:
    """In the order of their starts."""
    events: Any = profile.events()  # type: ignore[no-untyped-call]
    found = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
    return sorted(found, key=lambda event: event[1:])


def times_of(events: Sequence[Event]) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """By name: the sum of times, how far ends were moved, and calls."""
    total: dict[str, float] = defaultdict(float)
    added: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    latest: float | None = None
    for name, start, end in events:
        latest = start if latest is None else latest
        if start > latest:
            added[NOTHING] += start - latest
            count[NOTHING] += 1
        total[name] += end - start
        added[name] += max(0.0, end - max(latest, start))
        count[name] += 1
        latest = max(latest, end)
    return total, added, count


def decode_events(watch: Stopwatch, rows: int, steps: int) -> list[Event]:
    """Of so many steps in which every row gives a token: prompts are over before the profiler starts."""
    engine = watch.engine
    batch = watch.batch(rows, PROMPT_TOKENS, min(2048, engine.max_model_len) - PROMPT_TOKENS)
    for request in batch:
        engine.add(request)
    begun: set[str] = set()
    while len(begun) < rows:
        begun |= {output.request_id for output in engine.step()}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for request in batch:
        engine.abort(request.request_id, "measured")
    while engine.has_work():
        engine.step()
    return device_events(profile)


def prompt_events(watch: Stopwatch, length: int) -> list[Event]:
    """Of one prompt."""
    watch.seconds(1, length, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        watch.seconds(1, length, 1)
    return device_events(profile)


def kernels_of(events: Sequence[Event], steps: int) -> list[dict[str, Any]]:
    """The longest in total first."""
    total, added, count = times_of(events)
    everything = sum(added.values())
    return [
        {
            "kernel": name[:60],
            "calls": count[name] / steps,
            "mean_us": total[name] / count[name],
            "added_us": added[name] / count[name],
            "step_us": added[name] / steps,
            "share": added[name] / everything,
        }
        for name in sorted(added, key=lambda name: -added[name])[:30]
    ]


def main(words: Sequence[str]) -> int:
    own, fields = list(words), []
    if "--" in own:
        cut = own.index("--")
        own, fields = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1")
    parser.add_argument("--lengths", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--no-tables", action="store_true")
    asked = parser.parse_args(own)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms: %(message)s")
    rates = measure_rates(torch.device("cuda", 0))  # before the pools take the memory
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    engine = Engine(EngineConfig(**{name: _value(text) for name, text in (field.split("=") for field in fields)}))
    print(f"started in {time.perf_counter() - begin:.1f} s")
    watch, where = Stopwatch(engine, rates), environment(engine.blueprint.device)
    print(where, watch.rates)
    watch.seconds(1, 64, 8)
    rows, lengths = ([int(part) for part in text.split(",") if part] for text in (asked.rows, asked.lengths))
    if not asked.no_tables:
        for length in lengths:
            write([watch.prefill(length)], "prefill", where, asked.json)
        for count in rows:
            write([watch.decode(count)], "decode", where, asked.json)
    if not asked.no_profile:
        for count in rows:
            print(f"decode, {count} rows ({PROMPT_TOKENS} prompt tokens)")
            print(table(kernels_of(decode_events(watch, count, STEPS), STEPS)), flush=True)
        for length in lengths:
            print(f"prefill, {length} tokens")
            print(table(kernels_of(prompt_events(watch, length), 1)))
    engine.close()
    return 0


def _value(text: str) -> Any:
    return {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
