"""Every number on /metrics moves when something happens that it counts."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.engine import scripted
from tests.server.running import TOKENIZER, Running, running

PATH = "/v1/completions"
TEXT = "Mia buys 12 apples."


def told(server: Running) -> dict[str, float]:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        "/".join([sample.name.removeprefix("deltaserve_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_each_number_moves() -> None:
    with running("slow", max_num_seqs=1) as server:
        before = told(server)
        assert not any(value for name, value in before.items() if not name.endswith(("_capacity", "_created")))

        server.complete(prompt=[5, 6, 7, 8], max_tokens=5)
        server.complete(prompt=[5, 6, 7, 8, 2034], max_tokens=50, n=2)
        server.complete(prompt=TEXT, max_tokens=50, stop="12")
        with server.http.stream("POST", PATH, json={"prompt": TEXT, "max_tokens": 4000, "stream": True}):
            server.wait_until_running(1)
        server.wait_until_idle()

        now, num_text = told(server), len(TOKENIZER.encode(TEXT))
        assert now["prompt_tokens_total"] == 4 + 5 + 2 * num_text
        assert now["prefilled_tokens_total"] == 4 + 2 * 5 + 2 * num_text
        assert now["requests_finished_total/length"] == 1
        assert now["requests_finished_total/stop"] == 3
        assert now["requests_aborted_total/disconnect"] == 1
        assert now["generated_tokens_total"] >= 5 + 2 * 5
        assert now["steps_total"] >= 5 + 2 * 5
        assert now["request_duration_seconds_count"] == 4
        for name in ("time_to_first_token_seconds", "request_queue_seconds"):
            assert now[f"{name}_count"] == 5
            assert now[f"{name}_sum"] > 0
        assert now["inter_token_latency_seconds_count"] >= 4 + 2 * 4
        assert 0.005 < now["inter_token_latency_seconds_sum"] / now["inter_token_latency_seconds_count"] < 0.5


def test_what_is_held_is_told(slow: Running) -> None:
    with slow.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 4000, "n": 9, "stream": True}):
        slow.wait_until_running(8, waiting=1)
        now = told(slow)
        assert (now["requests_running"], now["requests_waiting"]) == (8, 1)
        assert (now["kv_blocks_used"], now["state_slots_used"]) == (16, 8)
        assert now["cache_usage_ratio"] == 8 / 512
        assert (now["kv_blocks_capacity"], now["state_slots_capacity"]) == (4096, 512)
    slow.wait_until_idle()


def test_what_an_answer_that_fails_takes_along_is_no_disconnect() -> None:
    with running("slow") as server:
        for stream in (False, True):
            server.post(PATH, prompt=TEXT, seed=scripted.NOT_FINITE_LATER, n=3, max_tokens=4000, stream=stream)
        server.wait_until_idle()
        now = told(server)
        assert now["requests_finished_total/error"] == 2
        assert now["requests_aborted_total/error"] == 4
        assert "requests_aborted_total/disconnect" not in now


def test_a_prompt_alone_has_no_first_token() -> None:
    with running("fast") as server:
        server.complete(prompt=[5, 6, 7, 8], max_tokens=0, echo=True, logprobs=1)
        now = told(server)
        assert now["time_to_first_token_seconds_count"] == now["inter_token_latency_seconds_count"] == 0
        assert now["request_duration_seconds_count"] == 1
