"""What a kept prefix saves: time to the first token of one prompt sent twice, and of the turns of a chat that sends its
whole past with each. In one process; `deltaserve bench multi-turn` asks a server the same.

    python -m benchmarks.reuse --preset qwen3-next-80b-a3b-fp8 --tokens 20000 --json FOLDER

A turn should compute what is new and at most the block of 64 that the past ended in: `excess` is what it computed
beyond what is new.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.bench.report import environment, write
from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine

TURNS, FIRST, NEW, ANSWER = 20, 800, 110, 40
"""Of the chat: turns, tokens of its first prompt, of each later one, and of each answer."""


@dataclass(frozen=True)
class Asked:
    seconds: float
    """From the request's arrival to its first token."""
    cached: int
    """Tokens of the prompt that were not computed."""
    token_ids: list[int]


def context(tokens: int) -> int:
    """The longest sequence, where `tokens` are sent twice."""
    return max(tokens + 1, FIRST + TURNS * (NEW + ANSWER))


def ask(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> Asked:
    """One request alone, to its end."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    begin, first, cached, told = time.perf_counter(), 0.0, 0, list[int]()
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=0.0))
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"request {name} failed: {output.error}")
            if not told:
                first, cached = time.perf_counter() - begin, output.num_cached_tokens
            told += output.token_ids
    return Asked(first, cached, told)


def twice(engine: Engine, tokens: int, repeats: int = 3) -> list[dict[str, Any]]:
    """The same prompt cold and warm, medians over several prompts."""
    draw, vocab = random.Random(1), engine.model_config.vocab_size
    runs = []
    for number in range(repeats + 1):  # the first does not count
        prompt = [draw.randrange(vocab) for _ in range(tokens)]
        runs.append([ask(engine, f"{number} {when}", prompt, 1) for when in ("cold", "warm")])
    cold, warm = (statistics.median(run[i].seconds for run in runs[1:]) for i in (0, 1))
    return [
        {
            "tokens": tokens,
            "cold_ms": cold * 1e3,
            "warm_ms": warm * 1e3,
            "share": warm / cold,
            "cached": min(run[1].cached for run in runs[1:]),
        }
    ]


def chat(engine: Engine) -> list[dict[str, Any]]:
    """A line for each turn, and one for all but the first."""
    draw, vocab, rows = random.Random(2), engine.model_config.vocab_size, list[dict[str, Any]]()
    past: list[int] = []
    for turn in range(1, TURNS + 1):
        new = FIRST if turn == 1 else NEW
        past = past + [draw.randrange(vocab) for _ in range(new)]
        asked = ask(engine, f"turn {turn}", past, ANSWER)
        computed = len(past) - asked.cached
        row = {"turn": turn, "prompt": len(past), "cached": asked.cached, "computed": computed}
        rows.append(row | {"excess": computed - new, "first_token_ms": asked.seconds * 1e3})
        past = past + asked.token_ids
    later = rows[1:]
    mean = {name: sum(row[name] for row in later) / len(later) for name in rows[0] if name != "turn"}
    return [*rows, {"turn": "later", **mean}, {"turn": "most", "excess": max(row["excess"] for row in later)}]


def measure(engine: Engine, tokens: int, where: Mapping[str, Any], folder: Path | None) -> None:
    """Prints both tables and appends their lines to files in `folder`."""
    write(twice(engine, tokens), "prompt twice", where, folder and folder / "reuse.jsonl")
    write(chat(engine), "chat", where, folder and folder / "reuse.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--json", type=Path, help="a folder")
    args = parser.parse_args()
    config = EngineConfig(
        preset=args.preset,
        load_format="dummy",
        device=args.device,
        max_num_seqs=4,
        max_model_len=context(args.tokens),
    )
    engine = Engine(config)
    if args.json is not None:
        args.json.mkdir(parents=True, exist_ok=True)
    measure(engine, args.tokens, environment(engine.blueprint.device), args.json)
    engine.close()


if __name__ == "__main__":
    main()
