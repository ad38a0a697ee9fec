"""Decode steps and prompts, timed through the whole engine: scheduling, sampling and host work included.

A decode step is (time for 1 + N tokens - time for 1 token) / N, the median of several; a prompt is the time to the only
token of one request. Prompts are random token ids that never repeat, and end-of-text is ignored.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deltaserve.bench import report
from deltaserve.bench.floor import Rates, decode_bytes, measure_rates, prefill_seconds, weights_of
from deltaserve.bench.report import environment, write
from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.device import choose_device
from deltaserve.runner.memory import MemoryPlan, blocks_of

PROMPT_TOKENS = 512
"""Before the first decode step of a row."""
OUTPUT_TOKENS = 128
"""Decode steps of a row."""


class Stopwatch:
    """Runs requests through an engine and times them."""

    def __init__(self, engine: Engine, rates: Rates, seed: int = 0) -> None:
        self.engine, self.rates = engine, rates
        self._random = random.Random(seed)
        self._count = 0
        runner = engine.workers.runner
        assert runner is not None, "the engine is closed"
        self._model = engine.model_config
        self._weights = weights_of(runner.model, self._model)  # type: ignore[arg-type]
        self._is_fp8 = any(p.dtype == torch.float8_e4m3fn for p in runner.model.parameters())  # type: ignore[attr-defined]

    def batch(self, requests: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
        """Requests that nobody has seen, greedy, each of which takes all of its tokens."""
        vocab = self._model.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        batch = []
        for _ in range(requests):
            prompt = [self._random.randrange(vocab) for _ in range(prompt_tokens)]
            batch.append(
                Request(request_id=f"bench-{self._count}", prompt_token_ids=prompt, params=params, arrival=time.time())
            )
            self._count += 1
        return batch

    def seconds(self, requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """From the first request's arrival to the last one's last token. Prompts are drawn before the clock starts."""
        engine, batch = self.engine, self.batch(requests, prompt_tokens, output_tokens)
        begin = time.perf_counter()
        for request in batch:
            engine.add(request)
        tokens = 0
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                tokens += len(output.token_ids)
        elapsed = time.perf_counter() - begin
        assert tokens == requests * output_tokens, f"{tokens} tokens came, {requests * output_tokens} were asked for"
        return elapsed

    def decode(
        self, rows: int, prompt_tokens: int = PROMPT_TOKENS, output_tokens: int = OUTPUT_TOKENS, repeats: int = 3
    ) -> dict[str, Any]:
        """A row of the table: milliseconds a step and tokens a second, the floor and how many times it is."""
        steps = [
            (self.seconds(rows, prompt_tokens, 1 + output_tokens) - self.seconds(rows, prompt_tokens, 1))
            / output_tokens
            for _ in range(repeats)
        ]
        step = statistics.median(steps)
        sizes = self.engine.blueprint.memory.sizes
        moved = decode_bytes(
            self._model, self._weights, sizes.block, sizes.slot, rows, prompt_tokens + output_tokens / 2
        )
        floor = moved / self.rates.copy
        return {
            "rows": rows,
            "step_ms": step * 1e3,
            "tokens_per_s": rows / step,
            "floor_ms": floor * 1e3,
            "times_floor": step / floor,
            "spread_ms": (max(steps) - min(steps)) * 1e3,
        }

    def prefill(self, tokens: int, repeats: int = 3) -> dict[str, Any]:
        """A row of the table: milliseconds to the first token of one prompt."""
        times = [self.seconds(1, tokens, 1) for _ in range(repeats)]
        took = statistics.median(times)
        floor = prefill_seconds(self._model, self._weights, self._is_fp8, tokens, self.rates)
        return {
            "tokens": tokens,
            "first_token_ms": took * 1e3,
            "tokens_per_s": tokens / took,
            "floor_ms": floor * 1e3,
            "times_floor": took / floor,
            "spread_ms": (max(times) - min(times)) * 1e3,
        }


def run(config: EngineConfig, decode: Sequence[int], prefill: Sequence[int], path: Path | None) -> None:
    """Start an engine and print its tables, after one round that does not count.

    Raises ValueError as `Engine`, and for sizes that the engine has no room for; OSError for a file that cannot be
    written.
    """
    report.output(path)
    rates = measure_rates(choose_device(config.device))  # before the pools take the memory
    begin = time.perf_counter()
    engine = Engine(config)
    refuse_beyond(engine.blueprint.memory, decode, prefill)
    watch = Stopwatch(engine, rates)
    watch.seconds(1, 64, 8)
    where = environment(engine.blueprint.device) | {"start_s": round(time.perf_counter() - begin, 1)}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    for kind, sizes, measure in (("decode", decode, watch.decode), ("prefill", prefill, watch.prefill)):
        if sizes:
            print(kind)
            write([measure(size) for size in sizes], kind, where, path)
    engine.close()


def refuse_beyond(memory: MemoryPlan, decode: Sequence[int], prefill: Sequence[int]) -> None:
    """Raises ValueError for rows that would wait for one another, and for prompts beyond the context."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS + 1
    if decode and length > memory.max_model_len:
        raise ValueError(
            f"max_model_len is {memory.max_model_len}; decode steps are timed up to {length} tokens: raise it"
        )
    room = min(memory.max_num_seqs, memory.num_blocks // blocks_of(length))
    if decode and max(decode) > room:
        raise ValueError(
            f"batches has {max(decode)}, but {room} requests of {length} tokens run at once, which is the largest "
            "legal value; lower it, or raise max_num_seqs or the cache's memory"
        )
    if prefill and max(prefill) >= memory.max_model_len:
        raise ValueError(
            f"lengths has {max(prefill)}, but the context of {memory.max_model_len} tokens leaves room for "
            f"{memory.max_model_len - 1}, which is the largest legal value"
        )
