"""What drafts cost and bring on a device, with random weights: steps that verify and propose k drafts beside their
floor, and tokens a second where drafts count as right with given probabilities.

    python -m benchmarks.drafts --preset qwen3-next-80b-a3b-fp8 --batches 1,8,32,128 --acceptance 0.9,0.8,0.6 \\
        --plain 2,3,4,16 --reuse 20000 --json FOLDER

One engine for all. A row of the table is the mean of at least `--steps` steps of requests that all extend, behind
prompts of `--prompt` tokens; all numbers of drafts are timed on the same requests, one behind the other. `k` is a
number of drafts, or `auto` where the scheduler chooses. `--plain` adds plain steps of so many rows: those of rows x
(1 + k) show what the tokens of a step with drafts cost without them. `--reuse` adds what is told in
`benchmarks.reuse`.

Column          Meaning
floor_ms        distinct experts of all tokens, other weights once, states read once and written 1 + k times; the MTP
                layer and the head k times
share           of the step that its floor takes
gap_ms          the device between the end of a step's last work and the next step's first (GPU)
verify_ms       from there to the tokens' being drawn (GPU)
draft_ms        and on to the last draft (GPU)
gain            tokens a second over those without drafts
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import reuse
from deltaserve.bench.floor import EXPERT_WEIGHTS, Rates, decode_bytes, distinct_experts, measure_rates, weights_of
from deltaserve.bench.report import environment, write
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.device import choose_device
from deltaserve.runner.runner import Runner
from deltaserve.scheduler.costs import GPU_COST, StepCost
from deltaserve.scheduler.speculation import Speculation

WARM_UP = 6
"""Steps after every change that do not count."""
LEARNING = 192
"""Tokens of all rows, of which at least so many are drawn before the scheduler's number is timed, and in what is timed.
"""


class Chosen(Speculation):
    """As many drafts as a measurement says; None lets the scheduler choose."""

    number: int | None = None

    @property
    def keeps_up(self) -> bool:
        return self.number is None and super().keeps_up

    def choose(self, num_rows: int) -> int:
        return super().choose(num_rows) if self.number is None else self.number


@dataclass(frozen=True)
class MtpBytes:
    expert: int
    """One routed expert of the MTP layer."""
    rest: int
    """Everything else of it, and the head: read once for each draft."""


def mtp_bytes(model: torch.nn.Module, num_experts: int) -> MtpBytes:
    experts = rest = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if name.startswith("mtp.") and name.rsplit(".", 1)[-1] in EXPERT_WEIGHTS:
            experts += size
        elif name.startswith("mtp.") or name == "lm_head.weight":
            rest += size
    return MtpBytes(experts // max(num_experts, 1), rest)


class Timeline:
    """Where the device stands at three moments of each step that runs as a graph."""

    def __init__(self, runner: Runner) -> None:
        self.steps: list[list[torch.cuda.Event]] = []
        self.is_on = runner.graphs is not None
        if runner.graphs is None:
            return
        launch = runner.launch

        def launched(plan: Plan) -> Pending:
            self.steps.append([])
            pending = launch(plan)
            self.mark()
            return pending

        def fed(send: Callable[..., None], *args: Any) -> None:
            send(*args)
            self.mark()

        runner.launch = launched  # type: ignore[method-assign]
        for feed in runner.graphs._feeds.values():
            feed.send = partial(fed, feed.send)  # type: ignore[method-assign]
        if runner.guesser is not None:
            propose = runner.guesser.propose

            def proposed(*args: Any) -> None:
                self.mark()
                propose(*args)

            runner.guesser.propose = proposed  # type: ignore[method-assign, assignment]

    def mark(self) -> None:
        if self.is_on and self.steps:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.steps[-1].append(event)

    def parts(self) -> dict[str, float | None]:
        """Milliseconds, means over the steps since the last call."""
        steps, self.steps = [step for step in self.steps if len(step) > 1], []
        if len(steps) < 2:
            return {"gap_ms": None, "verify_ms": None, "draft_ms": None}
        gaps = [a[-1].elapsed_time(b[0]) for a, b in pairwise(steps)]
        verify = [step[0].elapsed_time(step[1]) for step in steps]
        draft = [step[1].elapsed_time(step[-1]) for step in steps]
        names = ("gap_ms", "verify_ms", "draft_ms")
        return {name: sum(part) / len(part) for name, part in zip(names, (gaps, verify, draft), strict=True)}


class Bench:
    def __init__(self, args: argparse.Namespace, config: EngineConfig, rates: Rates) -> None:
        self.args, self.rates = args, rates
        cost = StepCost() if choose_device(config.device).type == "cpu" else GPU_COST
        self.speculation = Chosen(int(config.speculative_tokens), cost)
        self.engine = Engine(config, speculation=self.speculation)
        runner = self.engine.workers.runner
        assert runner is not None
        self.runner, self.model = runner, self.engine.model_config
        self.weights = weights_of(runner.model, self.model)  # type: ignore[arg-type]
        self.mtp = mtp_bytes(runner.model, self.model.num_experts)  # type: ignore[arg-type]
        self.timeline = Timeline(runner)
        self.random, self.count = random.Random(0), 0
        self.context = 0.0
        """Tokens of each row's sequence."""

    def floor(self, rows: int, k: int, context: float) -> float:
        """Seconds."""
        sizes, tokens = self.engine.blueprint.memory.sizes, rows * (1 + k)
        moved = decode_bytes(self.model, self.weights, sizes.block, sizes.slot, rows, context) + rows * k * sizes.slot
        moved += (distinct_experts(self.model, tokens) - distinct_experts(self.model, rows)) * self.weights.expert
        if k:
            passes = distinct_experts(self.model, tokens) + (k - 1) * distinct_experts(self.model, rows)
            moved += passes * self.mtp.expert + k * self.mtp.rest
        return moved / self.rates.copy

    def group(self, rows: int, acceptance: float, numbers: list[int | None]) -> list[dict[str, Any]]:
        """One set of requests, steps of each number of drafts. The first is what `gain` compares with."""
        self.runner.sampler.pretend([acceptance])
        names = self.begin(rows)
        found = [self.measure(rows, k, acceptance) for k in numbers]
        for name in names:
            self.engine.abort(name, "measured")
        while self.engine.has_work():
            self.engine.step()
        return [row | {"gain": row["tokens_per_s"] / found[0]["tokens_per_s"]} for row in found]

    def begin(self, rows: int) -> list[str]:
        """Requests that all extend."""
        self.speculation.number = 0
        names = [f"{self.count}-{row}" for row in range(rows)]
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=room(self.args, rows) - self.args.prompt, ignore_eos=True)
        for name in names:
            prompt = [self.random.randrange(self.model.vocab_size) for _ in range(self.args.prompt)]
            self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0))
        tokens, begun = 0, set[str]()
        while len(begun) < rows:
            outputs = self.engine.step()
            begun |= {output.request_id for output in outputs}
            tokens += sum(len(output.token_ids) for output in outputs)
        self.context = self.args.prompt + tokens / rows
        return names

    def measure(self, rows: int, k: int | None, acceptance: float) -> dict[str, Any]:
        self.speculation.number = k
        steps = num_steps(self.args, rows)
        self.run(rows, steps if k is None else WARM_UP)
        before, start = self.engine.stats(), self.context
        self.wait()
        self.timeline.parts()
        begin = time.perf_counter()
        tokens = self.run(rows, steps)
        self.wait()
        step = (time.perf_counter() - begin) / steps
        after = self.engine.stats()
        drafts = (after.draft_tokens - before.draft_tokens) / steps / rows
        floor = self.floor(rows, round(drafts), (start + self.context) / 2)
        return {
            "rows": rows,
            "k": "auto" if k is None else k,
            "acceptance": acceptance,
            "drafts": round(drafts, 2),
            "step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "times_floor": step / floor,
            "share": floor / step,
            **self.timeline.parts(),
            "tokens_a_row": tokens / steps / rows,
            "tokens_per_s": tokens / steps / step,
            "sent_back": after.preemptions - before.preemptions,
        }

    def run(self, rows: int, steps: int) -> int:
        """Tokens of so many steps."""
        tokens = sum(len(output.token_ids) for _ in range(steps) for output in self.engine.step())
        self.context += tokens / rows
        return tokens

    def wait(self) -> None:
        if self.runner.device.type != "cpu":
            torch.accelerator.synchronize()


def num_steps(args: argparse.Namespace, rows: int) -> int:
    return max(int(args.steps), LEARNING // rows)


def room(args: argparse.Namespace, rows: int) -> int:
    """Tokens of the longest sequence that a group can make."""
    steps = (args.drafts + 3) * (num_steps(args, rows) + WARM_UP) + 100
    return int(args.prompt + steps * (1 + args.drafts))


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, default=3, help="the most of a step")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--acceptance", default="0.9,0.8,0.6")
    parser.add_argument("--plain", default="", help="rows of further plain steps")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--reuse", type=int, default=0, help="tokens of the prompt that is sent twice; 0: none")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--json", type=Path, help="a folder")
    args = parser.parse_args()
    batches, plain = ([int(rows) for rows in numbers(text)] for text in (args.batches, args.plain))
    config = EngineConfig(
        preset=args.preset,
        load_format="dummy",
        device=args.device,
        state_dtype=args.state_dtype,
        max_num_seqs=max(batches + plain),
        max_model_len=max(room(args, min(batches)) + 1, reuse.context(args.reuse)),
        speculative_tokens=str(args.drafts),  # type: ignore[arg-type]
        speculative_synthetic_acceptance=args.acceptance.split(",")[0],
        prefix_cache="on" if args.reuse else "off",
    )
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms: %(message)s")
    rates = measure_rates(choose_device(config.device))
    begin = time.perf_counter()
    bench = Bench(args, config, rates)
    gc.collect()
    gc.freeze()  # as the engine's own process does: no step waits while all modules are looked through
    where = environment(bench.runner.device) | {"start_s": round(time.perf_counter() - begin, 1)}
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    if args.json is not None:
        args.json.mkdir(parents=True, exist_ok=True)
    path = args.json and args.json / "drafts.jsonl"
    begin = time.perf_counter()
    every: list[int | None] = [*range(args.drafts + 1), None]
    bench.group(1, 0.5, every)
    for rows in plain:
        write(bench.group(rows, 0.0, [0]), "drafts", where, path)
    for rows in batches:
        for acceptance in numbers(args.acceptance):
            write(bench.group(rows, acceptance, every), "drafts", where, path)
        write(bench.group(rows, 0.0, [0, None]), "drafts", where, path)
    print(f"steps took {time.perf_counter() - begin:.1f} s", flush=True)
    if args.reuse:
        bench.speculation.number = None
        begin = time.perf_counter()
        reuse.measure(bench.engine, args.reuse, where, args.json)
        print(f"reuse took {time.perf_counter() - begin:.1f} s", flush=True)
    bench.engine.close()


if __name__ == "__main__":
    main()
