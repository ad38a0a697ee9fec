"""What drafts cost and bring on a device, with random weights: steps that verify and propose k drafts beside their
floor, and tokens a second where drafts count as right with given probabilities.

    python -m benchmarks.drafts --preset qwen3-next-80b-a3b-fp8 --batches 1,8,32,128 --acceptance 0.9,0.8,0.6

One engine for all rows. A row of the table is the mean of `--steps` steps of requests that all extend, prompts of
`--prompt` tokens; `k` is a number of drafts, or `auto` where the scheduler chooses. `gain` is the ratio of the tokens
a second to those without drafts.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from deltaserve.bench.floor import EXPERT_WEIGHTS, Rates, decode_bytes, distinct_experts, measure_rates, weights_of
from deltaserve.bench.report import environment, table
from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.device import choose_device
from deltaserve.scheduler.speculation import GPU_COST, Speculation, StepCost


class Chosen(Speculation):
    """As many drafts as a measurement says; None lets the scheduler choose."""

    number: int | None = None

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
        self.random, self.count = random.Random(0), 0

    def floor(self, rows: int, k: int, context: float) -> float:
        """Seconds: distinct experts of all tokens, states read once and written 1 + k times, the layer and the head k
        times."""
        sizes, tokens = self.engine.blueprint.memory.sizes, rows * (1 + k)
        moved = decode_bytes(self.model, self.weights, sizes.block, sizes.slot, rows, context) + rows * k * sizes.slot
        moved += (distinct_experts(self.model, tokens) - distinct_experts(self.model, rows)) * self.weights.expert
        if k:
            passes = distinct_experts(self.model, tokens) + (k - 1) * distinct_experts(self.model, rows)
            moved += passes * self.mtp.expert + k * self.mtp.rest
        return moved / self.rates.copy

    def measure(self, rows: int, k: int | None, acceptance: float) -> dict[str, Any]:
        self.speculation.number = k
        self.runner.sampler.pretend([acceptance])
        engine, names = self.engine, [f"{self.count}-{row}" for row in range(rows)]
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=self.args.steps * 9 + 400, ignore_eos=True)
        for name in names:
            prompt = [self.random.randrange(self.model.vocab_size) for _ in range(self.args.prompt)]
            engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0))
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {output.request_id for output in engine.step()}
        for _ in range(100 if k is None else 8):  # the scheduler learns what is accepted
            engine.step()
        drafted = engine.stats().draft_tokens
        self.wait()
        begin, tokens = time.perf_counter(), 0
        for _ in range(self.args.steps):
            tokens += sum(len(output.token_ids) for output in engine.step())
        self.wait()
        step = (time.perf_counter() - begin) / self.args.steps
        drafts = (engine.stats().draft_tokens - drafted) / self.args.steps / rows
        for name in names:
            engine.abort(name, "measured")
        while engine.has_work():
            engine.step()
        context = self.args.prompt + (100 if k is None else 8) + tokens / rows / 2
        floor = self.floor(rows, round(drafts), context)
        return {
            "rows": rows,
            "k": "auto" if k is None else k,
            "acceptance": acceptance,
            "drafts": round(drafts, 2),
            "step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "times_floor": step / floor,
            "tokens_a_row": tokens / self.args.steps / rows,
            "tokens_per_s": tokens / self.args.steps / step,
        }

    def wait(self) -> None:
        if self.runner.device.type != "cpu":
            torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, default=3, help="the most of a step")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--acceptance", default="0.9,0.8,0.6")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--state-dtype", default="float32")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    config = EngineConfig(
        preset=args.preset,
        load_format="dummy",
        device=args.device,
        state_dtype=args.state_dtype,
        max_num_seqs=max(batches),
        max_model_len=args.prompt + args.steps * 9 + 1400,
        speculative_tokens=str(args.drafts),  # type: ignore[arg-type]
        speculative_synthetic_acceptance=args.acceptance.split(",")[0],
        prefix_cache="off",
    )
    rates = measure_rates(choose_device(config.device))
    bench = Bench(args, config, rates)
    print(", ".join(f"{name} {value}" for name, value in environment(bench.runner.device).items()), flush=True)
    bench.measure(1, args.drafts, 0.5)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        plain = bench.measure(batch, 0, 0.0)
        found = [plain]
        for acceptance in map(float, args.acceptance.split(",")):
            found += [bench.measure(batch, k, acceptance) for k in (*range(1, args.drafts + 1), None)]
        found.append(bench.measure(batch, None, 0.0))
        rows += [row | {"gain": row["tokens_per_s"] / plain["tokens_per_s"]} for row in found]
    print(table(rows))


if __name__ == "__main__":
    main()
