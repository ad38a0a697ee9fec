"""`deltaserve bench serve`: loads over HTTP, a line for each, and the same loads against a second server.

Knows how a measurement is run and told; loads, figures and the wire have their own files.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from deltaserve.bench.client_config import ClientConfig, LoadConfig
from deltaserve.bench.figures import LATENCIES, RATES, STATISTICS, figures, ratios, read_limits
from deltaserve.bench.load import Load, Prompts, Run, drive, read_loads
from deltaserve.bench.report import append, machine, output
from deltaserve.bench.target import Target

DEFAULT_CONCURRENCY = "1,8,32"
BUSY = 0.8
"""Above this share of its time the client's own speed is in the figures."""
Print = Callable[[str], None]


class Lines:
    """A table that is printed line by line, as its figures come."""

    def __init__(self, names: Sequence[str], widths: Sequence[int], say: Print) -> None:
        self._widths = [max(width, len(name)) for name, width in zip(names, widths, strict=True)]
        self._say = say
        self.add(names)

    def add(self, cells: Sequence[str]) -> None:
        self._say("  ".join(cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip())


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def spread(values: Mapping[str, float | None] | None) -> str:
    """A latency's statistics in one cell."""
    return "-" if values is None else "/".join(number(values[name]) for name in STATISTICS)


def say(line: str) -> None:
    print(line, flush=True)


def run_client(work: Coroutine[Any, Any, None]) -> None:
    """Runs a client's coroutine, on uvloop where there is one."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


@contextlib.asynccontextmanager
async def opened(urls: Sequence[str], config: ClientConfig, api: Any) -> AsyncIterator[list[Target]]:
    """The servers, each asked who it is. Raises RuntimeError when one is not there."""
    targets = [Target(url, config.model, config.api_key, api, config.timeout) for url in urls]
    try:
        for target in targets:
            await target.open()
        yield targets
    finally:
        for target in targets:
            target.close()


def run(config: LoadConfig) -> None:
    """Prints the table and appends the JSON lines.

    Raises ValueError for loads and limits without meaning, RuntimeError when a server is not there, and at the end when
    some load got no answer at all.
    """
    default = DEFAULT_CONCURRENCY if config.rates is None else None
    loads = read_loads(config.concurrency or default, config.rates)
    run_client(_Bench(config, loads, read_limits(config.goodput), say).run())


class _Bench:
    def __init__(self, config: LoadConfig, loads: list[Load], limits: dict[str, float], say: Print) -> None:
        self._config, self._loads, self._limits, self._say = config, loads, limits, say
        self._fruitless: list[str] = []
        """Loads and servers of lines without one answer."""
        self._rounds = config.rounds or (2 if config.vs else 1)
        self._prompts = Prompts(config.prompts, config.api, config.vocab_size, config.seed)
        self._where = machine()
        self._path = output(config.json)

    async def run(self) -> None:
        config = self._config
        urls = [config.url] if config.vs is None else [config.url, config.vs]
        async with opened(urls, config, config.api) as targets:
            for name, target in zip("AB", targets, strict=False):
                self._say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in target.about.items()))
                await self._prompts.fit(target, config.prompt_tokens, f"fit-{name}")
                if "ignore_eos" not in target.extras:
                    self._say(f"{name} refuses ignore_eos: its answers may end early")
                if "return_token_ids" not in target.extras:
                    self._say(f"{name} refuses return_token_ids: its tokens are spread evenly over their chunks")
            self._say(f"times in ms, as {'/'.join(STATISTICS)}" + ("; A/B is A's figure over B's" if config.vs else ""))
            names = ["load", "server", "ok", "failed", "s", "req/s", "out tok/s", "tok/s"]
            names += ["TTFT", "TPOT", "ITL", "E2E"] + (["goodput/s", "share"] if self._limits else [])
            lines = Lines(names, [11, 6, 5, 6, 6, 6, 9, 7, 23, 19, 19, 23, 9, 5][: len(names)], self._say)
            for place, load in enumerate(self._loads):
                await self._measure(place, load, targets, lines)
        if self._fruitless:
            raise RuntimeError(
                f"no request was answered at {', '.join(self._fruitless)}; the reasons stand in the table"
            )

    async def _measure(self, place: int, load: Load, targets: Sequence[Target], lines: Lines) -> None:
        """All rounds of one load, the servers in turn.

        Both get the same prompts; but a server that is measured against itself would know them the second time.
        """
        is_same = len({target.url for target in targets}) < len(targets)
        results: list[list[dict[str, Any]]] = [[] for _ in targets]
        for round_ in range(self._rounds):
            for side, target in enumerate(targets):
                payloads = self._payloads(f"{place} {round_} {side if is_same else 0}", load, target)
                came = await drive(target, load, payloads, self._config.seed + round_)
                found = figures(came.records, came.seconds, self._limits)
                results[side].append(found)
                lines.add(self._cells(load, "AB"[side], found))
                self._remark(found, came)
                if not found["completed"]:
                    self._fruitless.append(f"{load.name} of {'AB'[side]}")
                row = {"load": load.name, "round": round_, "server": target.about, **found, "client_busy": came.busy}
                append([row], "serve", self._where, self._path)
        if len(targets) == 2:
            ratio = ratios(*results)
            empty = [""] * (2 if self._limits else 0)
            rates = [number(ratio[name]) for name in RATES]
            times = [spread(ratio[f"{name}_ms"]) for name in LATENCIES]
            lines.add([load.name, "A/B", "", "", "", *rates, *times, *empty])
            row = {"load": load.name, "servers": [target.about for target in targets], "ratio": ratio}
            append([row], "serve-ratio", self._where, self._path)

    def _payloads(self, name: str, load: Load, target: Target) -> list[bytes]:
        config = self._config
        count = max(config.requests, load.clients or 0)
        return [
            target.encode(
                {
                    **self._prompts.body(config.prompt_tokens, f"{name} {i}"),
                    "max_tokens": config.output_tokens,
                    "temperature": config.temperature,
                }
            )
            for i in range(count)
        ]

    def _cells(self, load: Load, server: str, found: Mapping[str, Any]) -> list[str]:
        counts = [str(found["completed"]), str(found["failed"]), number(found["duration_s"])]
        rates = [number(found[name]) for name in RATES]
        times = [spread(found[f"{name}_ms"]) for name in LATENCIES]
        good = [number(found["goodput_per_s"]), f"{found['goodput_share']:.0%}"] if self._limits else []
        return [load.name, server, *counts, *rates, *times, *good]

    def _remark(self, found: Mapping[str, Any], came: Run) -> None:
        """What makes a line worth less than it looks."""
        for reason, count in found["failures"].items():
            self._say(f"    failed {count} times: {reason}")
        if (found["cached_tokens"] or 0) > 0.05 * found["prompt_tokens"]:
            self._say(
                f"    {found['cached_tokens']} of {found['prompt_tokens']} prompt tokens were cached from an earlier "
                "run; another --seed avoids it"
            )
        if came.busy > BUSY:
            self._say(f"    the client computed {came.busy:.0%} of the time: its own speed is in these figures")
