"""What /metrics tells: each number is the engine's own, and times land in their histograms."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deltaserve.core.stats import CacheUsage, Stats
from deltaserve.engine.metrics import Metrics

USAGE = CacheUsage(blocks_used=10, blocks_cached=2, blocks_total=40, slots_used=3, slots_cached=1, slots_total=4)
STATS = Stats(
    running=5,
    waiting=6,
    cache=USAGE,
    steps=7,
    prefilled_tokens=8,
    cached_tokens=9,
    generated_tokens=10,
    draft_tokens=11,
    accepted_tokens=12,
    preemptions=13,
    finished={"stop": 14, "length": 15},
    aborts={"disconnect": 16},
    draft_alarm=True,
    tokens_a_step={1: 17, 2: 18, 4: 19, 12: 1},
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Each sample by its name, with the values of its labels behind."""
    return {
        "/".join([sample.name.removeprefix("deltaserve_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_every_figure_of_the_engine_is_told() -> None:
    told = samples(Metrics(lambda: STATS))
    expected = {
        "requests_running": 5,
        "requests_waiting": 6,
        "kv_blocks_used": 10,
        "kv_blocks_cached": 2,
        "kv_blocks_capacity": 40,
        "state_slots_used": 3,
        "state_slots_cached": 1,
        "state_slots_capacity": 4,
        "cache_usage_ratio": 0.75,
        "steps_total": 7,
        "prefilled_tokens_total": 8,
        "cached_prompt_tokens_total": 9,
        "generated_tokens_total": 10,
        "draft_tokens_total": 11,
        "accepted_tokens_total": 12,
        "preemptions_total": 13,
        "requests_finished_total/stop": 14,
        "requests_finished_total/length": 15,
        "requests_aborted_total/disconnect": 16,
        "tokens_per_step_bucket/1.0": 17,
        "tokens_per_step_bucket/2.0": 35,
        "tokens_per_step_bucket/3.0": 35,
        "tokens_per_step_bucket/9.0": 54,
        "tokens_per_step_bucket/+Inf": 55,
        "tokens_per_step_count": 55,
        "tokens_per_step_sum": 17 + 2 * 18 + 4 * 19 + 12,
    }
    assert {name: told[name] for name in expected} == expected


def test_times_land_in_their_histograms() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.count_prompt(20)
    metrics.observe_queue(0.5)
    metrics.observe_first(1.0)
    metrics.observe_gap(0.03, 3)
    metrics.observe_end(2.0)
    told = samples(metrics)
    assert told["prompt_tokens_total"] == 20
    for name, count, total in [
        ("request_queue_seconds", 1, 0.5),
        ("time_to_first_token_seconds", 1, 1.0),
        ("inter_token_latency_seconds", 3, 0.03),
        ("request_duration_seconds", 1, 2.0),
    ]:
        assert told[f"{name}_count"] == count
        assert abs(told[f"{name}_sum"] - total) < 1e-9
    assert (told["inter_token_latency_seconds_bucket/0.005"], told["inter_token_latency_seconds_bucket/0.01"]) == (0, 3)


def test_two_servers_share_no_numbers() -> None:
    first, second = Metrics(lambda: STATS), Metrics(lambda: STATS)
    first.count_prompt(5)
    assert samples(second)["prompt_tokens_total"] == 0


def test_the_page_names_what_is_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \|", page, re.MULTILINE))
    text = Metrics(lambda: STATS).render().decode()
    kinds = dict(re.findall(r"^# TYPE deltaserve_(\w+) (\w+)$", text, re.MULTILINE))
    assert rows == {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
