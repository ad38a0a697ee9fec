"""What /metrics tells: the engine's figures as they are, and times measured where the user sees them.

Knows Prometheus and the engine's Stats; no HTTP and no text. Every instance has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaserve.core.stats import CacheUsage, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_TOKENS_A_STEP = 9
"""The last bucket: a token and the longest chain of drafts."""
FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

GAUGES: list[tuple[str, str, Callable[[Stats], float]]] = [
    ("requests_running", "Requests that are being computed.", lambda s: s.running),
    ("requests_waiting", "Requests that wait for room, preempted ones included.", lambda s: s.waiting),
    ("kv_blocks_used", "KV blocks of 64 tokens that requests hold.", lambda s: s.cache.blocks_used),
    ("kv_blocks_cached", "KV blocks that only the prefix index keeps.", lambda s: s.cache.blocks_cached),
    ("kv_blocks_capacity", "KV blocks that there are.", lambda s: s.cache.blocks_total),
    ("state_slots_used", "State slots that requests hold.", lambda s: s.cache.slots_used),
    ("state_slots_cached", "State slots that only the prefix index keeps.", lambda s: s.cache.slots_cached),
    ("state_slots_capacity", "State slots that there are.", lambda s: s.cache.slots_total),
    ("cache_usage_ratio", "Share in use of the fuller pool, KV blocks or state slots.", lambda s: usage_ratio(s.cache)),
    ("draft_alarm", "1 where of the last thousand drafts hardly any was right.", lambda s: s.draft_alarm),
]
COUNTERS: list[tuple[str, str, Callable[[Stats], float]]] = [
    ("steps", "Steps of the engine.", lambda s: s.steps),
    ("prefilled_tokens", "Tokens computed in prefill, again after a preemption.", lambda s: s.prefilled_tokens),
    ("cached_prompt_tokens", "Prompt tokens that a reused prefix saved.", lambda s: s.cached_tokens),
    (
        "wanted_prompt_tokens",
        "Prompt tokens in whole blocks, which a reused prefix could save.",
        lambda s: s.wanted_tokens,
    ),
    ("snapshots_kept", "States that the prefix cache took.", lambda s: s.cache.snapshots_kept),
    ("snapshots_evicted", "Kept states that it had to give up again.", lambda s: s.cache.snapshots_evicted),
    ("snapshots_dropped", "States that it wanted while no slot could be had.", lambda s: s.cache.snapshots_dropped),
    ("generated_tokens", "Tokens handed out.", lambda s: s.generated_tokens),
    ("draft_tokens", "Drafts that were verified.", lambda s: s.draft_tokens),
    ("accepted_tokens", "Drafts that were right.", lambda s: s.accepted_tokens),
    ("preemptions", "Times that a running request was sent back to wait.", lambda s: s.preemptions),
]
LABELLED: list[tuple[str, str, str, Callable[[Stats], Mapping[Any, int]]]] = [
    ("requests_finished", "Requests that came to their end, by finish reason.", "reason", lambda s: s.finished),
    ("requests_aborted", "Requests that were ended early, by reason.", "reason", lambda s: s.aborts),
    ("lost_prompt_tokens", "Prompt tokens wanted and not saved, by reason.", "reason", lambda s: s.lost_tokens),
    ("draft_tokens_at", "Drafts that were verified, by their place in the chain.", "place", lambda s: s.drafted_at),
    ("accepted_tokens_at", "Drafts that were right, by their place in the chain.", "place", lambda s: s.accepted_at),
]


def usage_ratio(cache: CacheUsage) -> float:
    return max(cache.blocks_used / max(1, cache.blocks_total), cache.slots_used / max(1, cache.slots_total))


def tokens_per_step(counts: Mapping[int, int]) -> Metric:
    """How often a step gave a request so many tokens, with a bucket for each number: sum by count is their mean."""
    below = [(f"{most}.0", sum(n for k, n in counts.items() if k <= most)) for most in range(1, MAX_TOKENS_A_STEP + 1)]
    return HistogramMetricFamily(
        "deltaserve_tokens_per_step",
        "Tokens that a step gave a request past its prompt: 1 and the right drafts.",
        buckets=[*below, ("+Inf", sum(counts.values()))],
        sum_value=sum(k * n for k, n in counts.items()),
    )


class StatsCollector(Collector):
    """The engine's own gauges and counters, read when somebody asks."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, read in GAUGES:
            yield GaugeMetricFamily(f"deltaserve_{name}", text, value=read(stats))
        for name, text, read in COUNTERS:
            yield CounterMetricFamily(f"deltaserve_{name}", text, value=read(stats))
        for name, text, label, count in LABELLED:
            family = CounterMetricFamily(f"deltaserve_{name}", text, labels=[label])
            for kind, value in sorted(count(stats).items()):
                family.add_metric([str(kind)], value)
            yield family
        yield tokens_per_step(stats.tokens_a_step)


class Metrics:
    """Counts and times of one server. Times are in seconds."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(stats))
        self._prompt_tokens = Counter(
            "deltaserve_prompt_tokens", "Tokens of prompts, each once.", registry=self._registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token.", SLOW)
        self._gap = self._histogram("inter_token_latency_seconds", "From one token of an answer to the next.", FAST)
        self._end = self._histogram("request_duration_seconds", "From the request to the end of its answer.", SLOW)
        self._queue = self._histogram("request_queue_seconds", "From the request to its first step.", SLOW)

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def observe_first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """Tokens that came together share the time since those before them."""
        for _ in range(num_tokens):
            self._gap.observe(seconds / num_tokens)

    def observe_end(self, seconds: float) -> None:
        self._end.observe(seconds)

    def observe_queue(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"deltaserve_{name}", text, buckets=buckets, registry=self._registry)
