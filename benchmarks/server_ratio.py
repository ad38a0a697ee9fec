"""The server under streaming clients beside the same requests offline, on this machine.

    python -m benchmarks.server_ratio --clients 256 --requests 512 -- preset=qwen3-next-80b-a3b-fp8 load_format=dummy

What stands behind `--` are fields of EngineConfig; both get the same. Offline, an engine in a process of its own gets
all requests at once. Then comes a server with as many clients as rows of a step, each of which sends its next request
when its answer has ended, `deltaserve bench serve` being the client. Prints the share of the offline output tokens a
second that the server keeps, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deltaserve.bench import serve
from deltaserve.bench.client_config import LoadConfig
from deltaserve.bench.floor import Rates
from deltaserve.bench.report import environment
from deltaserve.bench.steps import Stopwatch
from deltaserve.config import EngineConfig
from deltaserve.engine.engine import Engine
from tests.serving import serving

NO_RATES = Rates(copy=1.0, matrix=1.0, matrix_fp8=1.0)
"""Of a device; no floor is told here."""


def offline(result: Connection, fields: dict[str, Any], requests: int, prompt: int, output: int) -> None:
    engine = Engine(EngineConfig(**fields))
    watch = Stopwatch(engine, NO_RATES)
    watch.seconds(min(requests, 8), prompt, 8)
    seconds = watch.seconds(requests, prompt, output)
    result.send((requests * output / seconds, environment(engine.blueprint.device)))
    engine.close()


def served(fields: dict[str, Any], asked: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """The JSON line of `deltaserve bench serve`."""
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder, serving(*flags, ready_seconds=asked.ready_seconds) as server:
        path = Path(folder) / "serve.json"
        serve.run(
            LoadConfig(
                url=server.origin,
                concurrency=str(asked.clients),
                requests=asked.requests,
                prompt_tokens=asked.prompt_tokens,
                output_tokens=asked.output_tokens,
                vocab_size=vocab,
                json=str(path),
            )
        )
        found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        return found


def main(words: Sequence[str]) -> int:
    own, behind = list(words), []
    if "--" in own:
        cut = own.index("--")
        own, behind = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=2000, help="random token ids are below it")
    parser.add_argument("--ready-seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(own)
    fields: dict[str, Any] = {"max_num_seqs": str(asked.clients)} | dict(field.split("=") for field in behind)
    typed = {name: int(value) if value.isdigit() else value for name, value in fields.items()}

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    arguments = theirs, typed, asked.requests, asked.prompt_tokens, asked.output_tokens
    process = spawn.Process(target=offline, args=arguments)
    process.start()
    theirs.close()
    rate, where = ours.recv()
    process.join()
    row = served(fields, asked, asked.vocab_size)
    ratio = row["output_tokens_per_s"] / rate
    print(f"offline {rate:.1f} output tokens/s, served {row['output_tokens_per_s']:.1f}: {ratio:.3f} of it (goal 0.9)")
    line = json.dumps({"ratio": ratio, "offline_tokens_per_s": rate, "served": row, "environment": where})
    if asked.json:
        asked.json.write_text(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
