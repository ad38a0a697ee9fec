"""Figures of records that were made by hand."""

from __future__ import annotations

import pytest

from deltaserve.bench.figures import figures, latencies, ratios, read_limits, statistics, token_gaps
from deltaserve.bench.target import Record


def record(
    *chunks: tuple[float, int], due: float = 1.0, output: int | None = None, failure: str | None = None
) -> Record:
    made = Record(due=due, sent=due + 0.001, ended=chunks[-1][0] + 0.1 if chunks else due + 0.1)
    made.chunks = list(chunks)
    made.prompt_tokens, made.cached_tokens = 100, 25
    made.output_tokens = sum(count for _, count in chunks) if output is None else output
    made.failure, made.is_counted = failure, output is None
    return made


def test_one_request() -> None:
    found = latencies(record((1.5, 1), (1.7, 3), (1.8, 1)))
    assert found == pytest.approx({"ttft": 500, "tpot": 300 / 4, "e2e": 900})


def test_a_first_chunk_of_several_tokens_is_in_no_tpot() -> None:
    assert latencies(record((1.5, 3), (1.7, 2)))["tpot"] == pytest.approx(100)


@pytest.mark.parametrize("chunks", [[(1.5, 1)], [(1.5, 4)]])
def test_one_chunk_has_no_tpot(chunks: list[tuple[float, int]]) -> None:
    assert set(latencies(record(*chunks))) == {"ttft", "e2e"}


def test_gaps_are_divided_over_the_tokens_that_a_chunk_carries() -> None:
    gaps, counts = token_gaps(record((1.0, 1), (1.3, 3), (1.4, 1)))
    assert gaps == pytest.approx([100, 100])
    assert counts == [3, 1]


def test_tokens_that_chunks_do_not_tell_are_spread_by_the_usage() -> None:
    untold = record((1.0, 1), (1.2, 1), (1.6, 2), output=8)  # eight tokens on four events with text
    gaps, counts = token_gaps(untold)
    assert gaps == pytest.approx([100, 100])
    assert counts == [2, 4]
    assert latencies(untold)["tpot"] == pytest.approx(600 / 6)


def test_percentiles_are_interpolated() -> None:
    assert statistics([float(i) for i in range(101)]) == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert statistics([1.0, 2.0]) == pytest.approx({"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert statistics([]) is None


def test_the_figures_add_up() -> None:
    records = [
        record((1.1, 1), (1.2, 1)),
        record((1.3, 1), (1.5, 1)),
        record(failure="HTTP 503"),
        record((1.1, 5), failure="no end after 1 s"),
        record(failure="HTTP 503"),
    ]
    found = figures(records, 2.0, {"ttft": 200.0, "tpot": 150.0})
    assert (found["requests"], found["completed"], found["failed"]) == (5, 2, 3)
    assert found["failures"] == {"HTTP 503": 2, "no end after 1 s": 1}
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (1.0, 2.0, 102.0)
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"]) == (200, 4, 50)
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["itl_ms"]["p50"] == pytest.approx(150)
    assert found["sent_late_ms"]["p99"] == pytest.approx(1)
    assert (found["goodput_share"], found["goodput_per_s"]) == (0.2, 0.5)


def test_a_load_of_failures_has_figures_too() -> None:
    found = figures([record(failure="no")], 1.0, {"e2e": 1.0})
    assert (found["completed"], found["ttft_ms"], found["itl_ms"], found["goodput_share"]) == (0, None, None, 0.0)
    assert ratios([found], [found])["requests_per_s"] is None


def test_ratios_are_geometric_means_of_the_rounds() -> None:
    fast, slow = (figures([record((1.0 + t, 1), (1.0 + 2 * t, 1))], s, {}) for t, s in ((0.1, 1.0), (0.4, 4.0)))
    ratio = ratios([slow, fast], [fast, fast])
    assert ratio["requests_per_s"] == pytest.approx(0.5)
    assert ratio["ttft_ms"] == pytest.approx({"mean": 2, "p50": 2, "p90": 2, "p99": 2})
    assert ratio["itl_ms"]["p99"] == pytest.approx(2)


def test_limits() -> None:
    assert read_limits(None) == {}
    assert read_limits("ttft:500, tpot:50") == {"ttft": 500.0, "tpot": 50.0}
    for text in ("itl:5", "ttft", "ttft:0", "ttft:x", ""):
        with pytest.raises(ValueError, match="it must be like"):
            read_limits(text)
