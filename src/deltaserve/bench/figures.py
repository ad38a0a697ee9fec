"""From the records of a load to its figures. Every time is in milliseconds, every rate per second.

TTFT  from when a request was due to its first token
TPOT  from the first to the last token, over the tokens that came after the first chunk; one value a request
ITL   the time between chunks, divided over the tokens that the later one carries; one value a token
E2E   from when a request was due to the end of its answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deltaserve.bench.target import Record

LATENCIES = ("ttft", "tpot", "itl", "e2e")
LIMITED = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")


def read_limits(text: str | None) -> dict[str, float]:
    """From "ttft:500,tpot:50". Raises ValueError for another name, or what is no number above 0."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text is not None else []:
        name, _, number = part.strip().partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in LIMITED or not limit > 0:
            raise ValueError(f"goodput is {text!r}; it must be like ttft:500,tpot:50, of {', '.join(LIMITED)} in ms")
        limits[name] = limit
    return limits


def latencies(record: Record) -> dict[str, float]:
    """Of one completed request; a figure that it has not, as TPOT of a single token, is left out."""
    found = {"e2e": 1e3 * (record.ended - record.due)}
    if record.chunks:
        first, last = record.chunks[0], record.chunks[-1]
        found["ttft"] = 1e3 * (first[0] - record.due)
        after = record.output_tokens - first[1] * _scale(record)
        if last[0] > first[0] and after > 0:
            found["tpot"] = 1e3 * (last[0] - first[0]) / after
    return found


def token_gaps(record: Record) -> tuple[list[float], list[int]]:
    """Milliseconds before each token of every chunk but the first, and how many tokens have that value."""
    scale, gaps, counts = _scale(record), [], []
    for (before, _), (now, news) in zip(record.chunks, record.chunks[1:], strict=False):
        tokens = news * scale
        gaps.append(1e3 * (now - before) / tokens)
        counts.append(max(1, round(tokens)))
    return gaps, counts


def _scale(record: Record) -> float:
    """Tokens to one piece of news: 1 where chunks tell, else what spreads the usage evenly."""
    news = sum(count for _, count in record.chunks)
    return 1.0 if record.is_counted or not news else max(record.output_tokens, 1) / news


def statistics(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Mean and percentiles, interpolated; None of nothing."""
    if len(values) == 0:
        return None
    mid, ninety, most = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": mid, "p90": ninety, "p99": most}


def figures(records: Sequence[Record], seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Of one load. Failed requests are counted, and are in no latency and no token rate."""
    good = [record for record in records if record.failure is None]
    each = [latencies(record) for record in good]
    gaps: list[float] = []
    counts: list[int] = []
    for record in good:
        its_gaps, its_counts = token_gaps(record)
        gaps += its_gaps
        counts += its_counts
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    told = [record.cached_tokens for record in good if record.cached_tokens is not None]
    late = [1e3 * (record.sent - record.due) for record in records]
    found = {
        "requests": len(records),
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(Counter(record.failure for record in records if record.failure is not None)),
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(told) if told else None,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        **{f"{name}_ms": statistics([one[name] for one in each if name in one]) for name in ("ttft", "tpot")},
        "itl_ms": statistics(np.repeat(gaps, counts)),
        "e2e_ms": statistics([one["e2e"] for one in each]),
        "sent_late_ms": statistics(late),
    }
    if limits:
        kept = sum(all(one.get(name, 0.0) <= limit for name, limit in limits.items()) for one in each)
        found |= {
            "goodput_limits_ms": dict(limits),
            "goodput_share": kept / len(records),
            "goodput_per_s": kept / seconds,
        }
    return found


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure, the geometric mean over the rounds; None where a round lacks it."""
    found: dict[str, Any] = {name: _ratio([f[name] for f in ours], [f[name] for f in theirs]) for name in RATES}
    for name in (f"{latency}_ms" for latency in LATENCIES):
        found[name] = {
            statistic: _ratio(
                [(f[name] or {}).get(statistic) for f in ours], [(f[name] or {}).get(statistic) for f in theirs]
            )
            for statistic in STATISTICS
        }
    return found


def _ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    pairs = list(zip(ours, theirs, strict=True))
    if any(not a or not b for a, b in pairs):
        return None
    return float(np.exp(np.mean([np.log(a / b) for a, b in pairs if a and b])))
