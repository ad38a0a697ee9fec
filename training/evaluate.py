"""Scores a checkpoint on the held-out prompts: ``python -m training.evaluate FOLDER --out FILE``.

Prints one line a family: right answers, and how many drafts of the MTP layer would have been accepted.  The answers
are this folder's own, or with --by-engine those of deltaserve in float32.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training import export
from training.data.heldout import Item, correct, items
from training.decode import acceptance, generate
from training.network import Network

DEFAULT_LIMIT = 220
LIMITS = {"counting to 500": 2700, "list of 100": 1000, "text tasks": 500, "sums, five shots": 120, "ten turns": 120}
WIDTHS = (448, 1024, 4096)
ACCEPTANCE_SHARE = 150
WARM = 0.8


@dataclass
class Result:
    """The outputs of one family."""

    right: list[bool] = field(default_factory=list)
    sequences: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


def limit(family: str) -> int:
    return 420 if "thinking" in family else LIMITS.get(family, DEFAULT_LIMIT)


def run(
    net: Network, tokenizer: Tokenizer, chosen: Sequence[Item], dtype: torch.dtype, temperature: float = 0.0
) -> dict[str, Result]:
    """Generates an answer for every item, in lock-step groups of like length."""
    stop = tokenizer.encode("<|im_end|><|endoftext|>").ids
    prompts = [e.ids for e in tokenizer.encode_batch([i.prompt for i in chosen], add_special_tokens=False)]
    needs = [len(p) + limit(i.family) for p, i in zip(prompts, chosen, strict=True)]
    groups = [
        [n for n, need in enumerate(needs) if low < need <= high]
        for low, high in zip((0, *WIDTHS), WIDTHS, strict=False)
    ]
    out: dict[str, Result] = {}
    for group in groups:
        if not group:
            continue
        start = time.monotonic()
        made = generate(
            net, [prompts[n] for n in group], [limit(chosen[n].family) for n in group], stop, dtype, temperature
        )
        print(f"{len(group)} prompts in {time.monotonic() - start:.1f} s", flush=True)
        for n, ids in zip(group, made, strict=True):
            result = out.setdefault(chosen[n].family, Result())
            ended = bool(ids) and ids[-1] in stop
            text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            result.right.append(correct(chosen[n], text, ended))
            result.sequences.append(prompts[n] + ids)
            result.starts.append(len(prompts[n]))
            result.texts.append(text)
            result.items.append(chosen[n])
    return out


def run_by_engine(
    folder: Path, tokenizer: Tokenizer, chosen: Sequence[Item], dtype: torch.dtype, temperature: float = 0.0
) -> dict[str, Result]:
    """As `run`, through deltaserve: plain decoding, no prefix reused."""
    from deltaserve import LLM, SamplingParams

    stop = tokenizer.encode("<|im_end|><|endoftext|>").ids
    prompts = [e.ids for e in tokenizer.encode_batch([i.prompt for i in chosen], add_special_tokens=False)]
    params = [
        SamplingParams(temperature=temperature, seed=n, max_tokens=limit(item.family), stop_token_ids=tuple(stop))
        for n, item in enumerate(chosen)
    ]
    name = str(dtype).removeprefix("torch.")
    with LLM(model=str(folder), dtype=name, max_num_seqs=32, speculative_tokens=0, prefix_cache="off") as llm:
        answers = llm.generate(prompts, params)
    out: dict[str, Result] = {}
    for item, prompt, answer in zip(chosen, prompts, answers, strict=True):
        result, ids = out.setdefault(item.family, Result()), answer.outputs[0].token_ids
        ended = bool(ids) and ids[-1] in stop
        text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        result.right.append(correct(item, text, ended))
        result.sequences.append(prompt + ids)
        result.starts.append(len(prompt))
        result.texts.append(text)
        result.items.append(item)
    return out


def report(
    net: Network, results: dict[str, Result], dtype: torch.dtype, counted: int, temperature: float = 0.0
) -> dict[str, Any]:
    """{family: n, right, accepted}, drafts of the first `counted` answers; prints it."""
    out: dict[str, Any] = {}
    for family, r in results.items():
        share = slice(counted)
        accepted = acceptance(net, r.sequences[share], r.starts[share], dtype, temperature)
        out[family] = {"n": len(r.right), "right": round(sum(r.right) / len(r.right), 4), "accepted": accepted}
        print(f"{family:45s} n {len(r.right):4d}  right {out[family]['right']:.3f}  accepted {accepted}", flush=True)
    return out


def mistakes(results: dict[str, Result], most: int = 12) -> list[dict[str, str]]:
    """Wrong answers of each family beside what was wanted."""
    out = []
    for family, r in results.items():
        wrong = [(i, t) for i, t, right in zip(r.items, r.texts, r.right, strict=True) if not right]
        count = len(wrong) if "development" in family or "prototype" in family else most
        out += [
            {"family": family, "prompt": i.prompt[-600:], "got": t[-600:], "want": i.want[-300:]}
            for i, t in wrong[:count]
        ]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("--no-long", action="store_true")
    parser.add_argument("--family", default="", help="only families whose name contains this")
    parser.add_argument("--skip", default="\n", help="no family whose name contains this")
    parser.add_argument("--no-warm", action="store_true", help="greedy only")
    parser.add_argument("--by-engine", action="store_true", help="deltaserve answers, in float32")
    parser.add_argument("--accepted", type=int, default=ACCEPTANCE_SHARE, help="answers of a family to count drafts of")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" and not args.by_engine else torch.float32
    net = export.read(args.folder).to(device, dtype)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    chosen = [i for i in items(args.n, long=not args.no_long) if args.family in i.family and args.skip not in i.family]
    answers = partial(run_by_engine, args.folder) if args.by_engine else partial(run, net)
    results = answers(tokenizer, chosen, dtype)
    summary = {"greedy": report(net, results, dtype, args.accepted)}
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1), encoding="utf-8")
        args.out.with_suffix(".mistakes.json").write_text(
            json.dumps(mistakes(results), indent=1, ensure_ascii=False), encoding="utf-8"
        )
    if args.no_warm:
        return
    warm = [i for i in chosen if limit(i.family) <= 500][:: max(1, len(chosen) // 600)]
    print(f"temperature {WARM}")
    summary[f"temperature {WARM}"] = report(net, answers(tokenizer, warm, dtype, WARM), dtype, args.accepted, WARM)
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
