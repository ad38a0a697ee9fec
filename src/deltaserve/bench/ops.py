"""Times ops on a GPU, each beside the time that its bytes or its operations must take. Needs a GPU.

Every case is captured in a CUDA graph over all its input sets, so that launch gaps of the host do not count and weights
come from memory, not from the cache.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltaserve.bench.floor import Rates, measure_rates
from deltaserve.bench.report import append, environment, output, told


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    name: str
    make: Callable[[], Sequence[Callable[[], object]]]
    """Allocates input sets on the GPU and returns one call per set. Sets together exceed the L2 cache, where a set is
    small; 2 to 20 of them."""
    num_bytes: float
    """That must move through device memory in one call: inputs read once, outputs written once."""
    flops: float = 0.0
    is_fp8: bool = False
    """Which matrix rate the operations are held against."""


MODULES = ("linear", "moe", "gated_delta", "replay", "attention", "norm", "sampling", "chain")


def seconds_of(case: Case) -> float:
    """Of one call: the median of several replays of a graph that holds every input set several times."""
    calls = case.make()
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = max(1, 20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return statistics.median(times[1:])


def row_of(case: Case, rates: Rates) -> dict[str, Any]:
    """The case's line of the table."""
    seconds = seconds_of(case)
    floor = max(case.num_bytes / rates.copy, case.flops / (rates.matrix_fp8 if case.is_fp8 else rates.matrix))
    return {
        "op": case.name,
        "us": seconds * 1e6,
        "floor_us": floor * 1e6,
        "times_floor": seconds / max(floor, 1e-12),
        "TB/s": case.num_bytes / seconds / 1e12,
        "TFLOP/s": case.flops / seconds / 1e12,
    }


def main(words: Sequence[str], path: Path | None = None) -> int:
    """Every case whose name holds one of the words; one that fails is told and does not end the rest.

    Raises ValueError where there is no GPU, and for words that no case has; OSError for a file that cannot be written.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"bench ops times kernels, and torch {torch.__version__} sees no GPU here; bench steps runs on a CPU"
        )
    output(path)
    device = torch.device("cuda", 0)
    rates, where = measure_rates(device), environment(device)
    print(
        f"copy {rates.copy / 1e12:.2f} TB/s, bf16 {rates.matrix / 1e12:.0f}, fp8 {rates.matrix_fp8 / 1e12:.0f} TFLOP/s"
    )
    rows, failures = [], 0
    for name in MODULES:
        for case in importlib.import_module(f"deltaserve.bench.ops_{name}").cases():
            if words and not any(word in case.name for word in words):
                continue
            try:
                with torch.inference_mode():
                    rows.append(row_of(case, rates))
            except (RuntimeError, ValueError, AssertionError, TypeError) as failure:
                failures += 1
                rows.append({"op": f"{case.name}: {type(failure).__name__}: {str(failure)[:80]}"})
            torch.cuda.empty_cache()
            print("  ".join(f"{name} {told(value)}" for name, value in rows[-1].items()), flush=True)
    if not rows:
        raise ValueError(f"only is {','.join(words)!r}, which no case's name holds; leave it out to time all")
    append(rows, "ops", where, path)
    return 1 if failures else 0
