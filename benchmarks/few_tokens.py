"""Ways to compute the projections and experts of steps of few tokens, side by side. Needs a GPU.

    python -m benchmarks.few_tokens --tokens 8,16,32 --ways "stages=2;stages=4,inner=64;12288.split=2"

Runs the layers of `deltaserve.bench.ops_chain`, eight sets of weights, in one CUDA graph. A way is what it changes:
fields of `Ways`, fields of the experts' `Tiles`, and fields of a projection's `Tiles` behind its number of outputs. The
first way changes nothing. Prints, for each, microseconds a layer, times the floor of the bytes, how far its numbers are
from those of the first way; then how far each kernel of a layer moves the end (see `benchmarks.step_kernels`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_kernels import Event, device_events, times_of
from deltaserve.bench.floor import measure_rates
from deltaserve.bench.ops_chain import LAYERS, Layer, Sizes, Ways, floor_bytes, make_layer, run, touched
from deltaserve.ops.gpu import compiling_only
from deltaserve.ops.linear.triton_fp8 import quantize_rows

CUDA = torch.device("cuda", 0)
SETS = 4
WAYS = ";".join(
    (
        "stages=2,down_stages=3",
        "stages=3,down_stages=3",
        "stages=4,inner=64,down_stages=3",
        "12288.held=0",
        "12288.held=0,2048.held=0,513.held=0",
    )
)
Call = Callable[[], Tensor]


def way_of(text: str) -> Ways:
    """ValueError for what no way has."""
    own: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    cut_linear: dict[int, dict[str, Any]] = defaultdict(dict)
    known = {item.name for item in dataclasses.fields(Ways)} - {"cut", "cut_linear"}
    for part in filter(None, text.split(",")):
        name, found, value = part.partition("=")
        if not found:
            raise ValueError(f"{part!r} is not a name and a value, as in stages=2")
        number: Any = {"True": True, "False": False}.get(value, value)
        number = int(number) if isinstance(number, str) else number
        height, found, inside = name.partition(".")
        if found:
            cut_linear[int(height)][inside] = number
        else:
            (own if name in known else cut)[name] = number
    return Ways(**own, cut=cut, cut_linear=dict(cut_linear))


def labelled(events: Sequence[Event], rounds: int) -> list[Event]:
    """Kernels that a layer calls more than once get a number: their turn."""
    calls: dict[str, int] = defaultdict(int)
    for name, _, _ in events:
        calls[name] += 1
    seen: dict[str, int] = defaultdict(int)
    found: list[Event] = []
    for name, start, end in events:
        each = calls[name] // rounds
        turn = f" {seen[name] % each + 1}" if each > 1 else ""
        seen[name] += 1
        found.append((name.replace("_kernel", "") + turn, start, end))
    return found


def recorded(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """One graph of all, and what the last gives."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return graph, outputs[-1]


def measured(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Microseconds of one of so many layers."""
    times: list[float] = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / rounds)
    return statistics.median(times[2:])


def added(graph: torch.cuda.CUDAGraph, rounds: int) -> dict[str, float]:
    """Microseconds that each kernel of a layer adds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    _, total, _ = times_of(labelled(device_events(profile), rounds))
    return {name: time / rounds for name, time in total.items()}


def inputs_of(tokens: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator(CUDA).manual_seed(tokens)
    sizes = Sizes()

    def normal(width: int) -> Tensor:
        return torch.randn(tokens, width, device=CUDA, generator=draw).bfloat16()

    return [(normal(sizes.width), normal(sizes.values)) for _ in range(SETS)]


def compare(layers: Sequence[Layer], tokens: int, texts: Sequence[str], copy: float, profiles: bool) -> None:
    floor = floor_bytes(tokens) / LAYERS / copy * 1e6
    inputs = [(x, mixed, quantize_rows(mixed)) for x, mixed in inputs_of(tokens)]
    distinct, rounds = touched(layers, *inputs[0]), SETS * LAYERS
    print(f"T={tokens}: floor {floor:.1f} us a layer, experts touched {distinct}", flush=True)
    exact: Tensor | None = None
    graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
    for text in texts:
        ways = way_of(text)

        def call(x: Tensor, mixed: Tensor, ready: Any, ways: Ways = ways) -> Call:
            return lambda: run(layers, x, mixed, ready, ways)

        try:
            graph, output = recorded([call(*given) for given in inputs])
            time = measured(graph, rounds)
        except (RuntimeError, ValueError, AssertionError, TypeError) as failure:
            print(f"  {text or 'as chosen'}: {type(failure).__name__}: {str(failure)[:100]}", flush=True)
            continue
        graphs.append((text or "as chosen", graph))
        output = (output.sum(1) if output.dim() == 3 else output).float()  # ways differ in what they leave to be summed
        exact = output if exact is None else exact
        error = float((output - exact).norm() / exact.norm())
        print(f"{time:8.1f} us {time / floor:.2f} {error:.0e}  {text or 'as chosen'}", flush=True)
    for text, graph in graphs if profiles else ():  # after all times: one token's rose from 31.5 to 33.3 us behind it
        parts = ", ".join(f"{name[:12]} {time:.1f}" for name, time in added(graph, rounds).items() if time >= 0.05)
        print(f"  {text}: {parts}", flush=True)


def compile_all(layers: Sequence[Layer], tokens: Sequence[int], texts: Sequence[str]) -> None:
    with compiling_only(16):
        for count in tokens:
            x, mixed = inputs_of(count)[0]
            for text in texts:
                try:
                    run(layers[:1], x, mixed, quantize_rows(mixed), way_of(text))
                except (RuntimeError, AssertionError, TypeError):
                    continue  # told when it is measured


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="4,8,16,32,64")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--no-profile", action="store_true")
    asked = parser.parse_args(words)
    copy = measure_rates(CUDA).copy
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    tokens, texts = [int(part) for part in asked.tokens.split(",")], ["", *asked.ways.split(";")]
    with torch.inference_mode():
        layers = [make_layer(Sizes(), CUDA) for _ in range(LAYERS)]
        compile_all(layers, tokens, texts)
        for count in tokens:
            compare(layers, count, texts, copy, not asked.no_profile)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
