"""How much faster than transformers, on this machine's CPU, with the built-in model: `make bench`.

Everything is measured in one run with the same threads and dtype, and told as ratios, so that figures from different
machines can be compared. A table for people, then one JSON line a measurement. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer import Peer
from benchmarks.streams import stream_all
from deltaserve import LLM, SamplingParams
from deltaserve.engine.tokenizer import Tokenizer
from tests.serving import serving

BUILTIN = Path(__file__).resolve().parents[1] / "src" / "deltaserve" / "builtin"
SUMS = Path(__file__).resolve().parents[1] / "tests" / "clients" / "data" / "sums.jsonl"
GOALS = {"one request": 2.5, "16 requests": 3.0, "server / offline": 0.8}
NUM_REQUESTS = 16
IMPORT = "import time; start = time.perf_counter(); import deltaserve; print(time.perf_counter() - start)"


def environment(threads: int, dtype: str) -> dict[str, Any]:
    """What a figure depends on."""
    names = {
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    }
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "threads": threads,
        "dtype": dtype,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("deltaserve", "torch", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
    }


def prompts_of(tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """Prompts of `count` different lengths up to `longest` tokens, each beginning with another sum."""
    rows = [json.loads(line) for line in SUMS.read_text().splitlines()]
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows]
    prompts = []
    for number in range(count):
        turned = texts[number % len(texts) :] + texts[: number % len(texts)]
        ids = tokenizer.encode("".join(turned), add_special_tokens=False)
        prompts.append(ids[: longest * (number + 1) // count])
    return prompts


Prompts = list[list[int]]


Answer = Callable[[Prompts], int]
"""Answers prompts, and returns how many tokens that took."""


def rates(answers: Sequence[Answer], prompts: Prompts, repeat: int) -> list[list[float]]:
    """Output tokens a second of each of `answers` in `repeat` runs, after one that warms up.

    They take turns, so that what else happens on the machine falls on all of them.
    """
    runs: list[list[float]] = [[] for _ in answers]
    for number in range(1 + repeat):
        for answer, its_runs in zip(answers, runs, strict=True):
            start = time.perf_counter()
            its_runs.append(answer(prompts) / (time.perf_counter() - start))
        if number == 0:
            for its_runs in runs:
                its_runs.clear()
    return runs


def measure_offline(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One request and sixteen, by transformers and by the engine in this process, speculating and not."""
    torch.set_num_threads(chosen.threads)
    peer = Peer(BUILTIN, chosen.dtype)
    tokenizer = Tokenizer.load(BUILTIN)
    assert tokenizer is not None, f"{BUILTIN} has no tokenizer"
    params = SamplingParams(temperature=0.0, max_tokens=chosen.num_tokens, ignore_eos=True)

    def engine(speculative_tokens: str) -> Answer:
        # Every run computes its prompts anew: transformers keeps nothing either.
        options = {"prefix_cache": "off", "speculative_tokens": speculative_tokens}
        llm = LLM(dtype=chosen.dtype, num_threads=chosen.threads, **options)
        return lambda prompts: sum(len(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params))

    def theirs(prompts: Prompts) -> int:
        return sum(map(len, peer.generate(prompts, chosen.num_tokens)))

    ours, plain = engine("auto"), engine("0")
    records = []
    for name, count, longest in (("one request", 1, 128), ("16 requests", NUM_REQUESTS, 512)):
        prompts = prompts_of(tokenizer, count, longest)
        *both_runs, peer_runs = rates([ours, plain, theirs], prompts, chosen.repeat)
        peer_rate = statistics.median(peer_runs)
        for suffix, runs in zip(("", ", no drafts"), both_runs, strict=True):
            records.append(
                {
                    "name": name + suffix,
                    "ratio": statistics.median(runs) / peer_rate,
                    "goal": GOALS[name],
                    "tokens_per_second": statistics.median(runs),
                    "transformers_tokens_per_second": peer_rate,
                    "runs": runs,
                    "transformers_runs": peer_runs,
                    "prompt_tokens": [len(prompt) for prompt in prompts],
                    "output_tokens": chosen.num_tokens,
                }
            )
    return records


def measure_server(chosen: argparse.Namespace, offline: float) -> list[dict[str, Any]]:
    """Sixteen streaming clients of a server, against the same sixteen requests offline; and how soon it is ready."""
    first: list[float] = []
    tokenizer = Tokenizer.load(BUILTIN)
    assert tokenizer is not None, f"{BUILTIN} has no tokenizer"
    flags = ("--dtype", chosen.dtype, "--num-threads", str(chosen.threads), "--prefix-cache", "off")
    with serving(*flags) as server:

        def answer(prompts: Prompts) -> int:
            ask = {"max_tokens": chosen.num_tokens, "temperature": 0, "ignore_eos": True}
            streams = stream_all(server.port, [{"prompt": prompt, **ask} for prompt in prompts])
            first.extend(stream.first for stream in streams)
            return sum(stream.num_tokens for stream in streams)

        (runs,) = rates([answer], prompts_of(tokenizer, NUM_REQUESTS, 512), chosen.repeat)
    served = statistics.median(runs)
    return [
        {
            "name": "server / offline",
            "ratio": served / offline,
            "goal": GOALS["server / offline"],
            "tokens_per_second": served,
            "runs": runs,
            "first_token_seconds": statistics.median(first),
        },
        {"name": "serve until ready", "seconds": server.ready_after, "goal": 10.0},
    ]


def measure_import() -> dict[str, Any]:
    command = [sys.executable, "-c", IMPORT]
    runs = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    return {"name": "import deltaserve", "seconds": min(runs), "goal": 0.3, "runs": runs}


def print_table(records: list[dict[str, Any]]) -> None:
    print(f"{'':<24}{'deltaserve':>14}{'transformers':>14}{'ratio':>9}{'goal':>9}")
    for record in records:
        if "ratio" in record:
            peer = record.get("transformers_tokens_per_second")
            theirs = f"{peer:.1f} tok/s" if peer else ""
            ours = f"{record['tokens_per_second']:.1f} tok/s"
            print(f"{record['name']:<24}{ours:>14}{theirs:>14}{record['ratio']:>9.2f}{'>= ' + str(record['goal']):>9}")
        else:
            print(f"{record['name']:<24}{record['seconds']:>12.3f} s{'':>23}{'<= ' + str(record['goal']):>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every process that computes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-tokens", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each measurement")
    chosen = parser.parse_args()
    facts = environment(chosen.threads, chosen.dtype)
    records = [measure_import()]
    offline = measure_offline(chosen)
    (sixteen,) = [record["tokens_per_second"] for record in offline if record["name"] == "16 requests"]
    records += [*offline, *measure_server(chosen, sixteen)]
    print(f"{facts['cpu']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['versions']['torch']}\n")
    print_table(records)
    print()
    for record in records:
        print(json.dumps(record | {"environment": facts}))


if __name__ == "__main__":
    main()
