"""The built-in model by lm_eval through a running server: ``python -m training.eval.run``, or ``make eval``.

Fails (exit status 1) when the accuracy lies further below the stored figure than chance explains, or when
transformers answers any of the first rows differently.  Needs lm_eval.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serving import serving

HERE = Path(__file__).parent
BUILTIN = HERE.parents[1] / "src" / "deltaserve" / "builtin"
REFERENCE = HERE / "reference.json"
TASK = "builtin_sums"
NOISE_SIGMAS = 3.0
ROWS_BESIDE_TRANSFORMERS = 20


@dataclass(frozen=True)
class Score:
    """The accuracy over `rows` rows and the answers by row."""

    accuracy: float
    rows: int
    answers: dict[int, Any]


def lm_eval(model: str, model_args: str, *flags: str) -> Score:
    """Runs lm_eval's command line. Raises RuntimeError with its words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--include_path",
            str(HERE),
            "--tasks",
            TASK,
            "--log_samples",
        ]
        command += ["--model", model, "--model_args", model_args, "--output_path", folder, "--apply_chat_template"]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": f"{folder}/home",
            "OPENAI_API_KEY": "-",
        }
        done = subprocess.run([*command, *flags], cwd=HERE, env=os.environ | offline, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        (results,) = Path(folder).rglob("results_*.json")
        (samples,) = Path(folder).rglob("samples_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        scores = json.loads(results.read_text(encoding="utf-8"))["results"][TASK]
    return Score(scores["exact_match,answer"], len(rows), {row["doc_id"]: row["resps"] for row in rows})


def lowest(accuracy: float, rows: int) -> float:
    """What chance leaves of an accuracy: NOISE_SIGMAS standard errors below it, one wrong answer at least."""
    error = math.sqrt(max(accuracy * (1 - accuracy), 1 / rows) / rows)
    return accuracy - NOISE_SIGMAS * error


def through_server(model: str, limit: list[str]) -> Score:
    with serving(*([model] if model else []), "--served-model-name", "builtin") as server:
        args = f"model=builtin,base_url={server.base_url}/chat/completions,num_concurrent=8,max_retries=1"
        return lm_eval("local-chat-completions", args, *limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="another checkpoint folder than the built-in one")
    parser.add_argument("--limit", type=int, default=0, help="only the first rows")
    parser.add_argument("--store", action="store_true", help="keep the accuracy as the reference")
    args = parser.parse_args()
    score = through_server(args.model, ["--limit", str(args.limit)] if args.limit else [])
    print(f"{TASK}: {score.accuracy:.3f} of {score.rows} rows right, through deltaserve")
    if args.store:
        REFERENCE.write_text(json.dumps({"accuracy": score.accuracy, "rows": score.rows}) + "\n", encoding="utf-8")
    least = lowest(**json.loads(REFERENCE.read_text(encoding="utf-8")))
    if score.accuracy < least:
        print(f"that is below {least:.3f}, more than chance explains")
        return 1
    pretrained = f"pretrained={args.model or BUILTIN},dtype=float32"
    rows = min(ROWS_BESIDE_TRANSFORMERS, score.rows)
    theirs = lm_eval("hf", pretrained, "--device", "cpu", "--batch_size", "1", "--limit", str(rows))
    different = [row for row, answer in theirs.answers.items() if answer != score.answers[row]]
    print(f"transformers gives the same answer to {rows - len(different)} of {rows} rows")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
