"""The engine as a whole on the built-in model: answers, refusals, deaths, and what it tells of itself."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.engine.engine import Engine, EngineDeadError
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.runner.memory import weight_bytes
from tests.models.factory import tiny_config, write_checkpoint

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 64}


@pytest.fixture(scope="module")
def builtin() -> Iterator[Engine]:
    engine = Engine(EngineConfig(**SMALL))
    yield engine
    engine.check()
    assert not engine.has_work(), "a test has left work behind"
    engine.close()


@pytest.fixture
def own_engine() -> Engine:
    """For tests that ruin it."""
    return Engine(EngineConfig(**SMALL))


def request(name: str, prompt: list[int], **params: Any) -> Request:
    defaults = {"temperature": 0.0, "max_tokens": 8}
    return Request(
        request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{**defaults, **params}), arrival=0.0
    )


def finish(engine: Engine) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_answers_a_question(builtin: Engine) -> None:
    tokenizer = Tokenizer.load(builtin.tokenizer_path)
    assert tokenizer is not None
    text = tokenizer.render_chat([{"role": "user", "content": "What is 17 + 25?"}])
    prompt = tokenizer.encode(text, add_special_tokens=False)
    builtin.add(request("sum", prompt, max_tokens=60))
    outputs = finish(builtin)["sum"]
    assert "42" in tokenizer.decode(tokens_of(outputs))
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id in builtin.model_config.eos_token_ids


def test_tells_of_itself(builtin: Engine) -> None:
    assert builtin.max_model_len == 4096
    assert builtin.model_config.vocab_size == 2048
    assert builtin.generation_defaults.sampling["top_k"] == 20
    assert (builtin.tokenizer_path / "tokenizer.json").is_file()
    before = builtin.stats()
    builtin.add(request("a", [5] * 100, ignore_eos=True))
    assert builtin.stats().waiting == 1
    builtin.step()
    during = builtin.stats()
    # Its own slots, and the state after the first block, which is kept and read next.
    own = builtin.blueprint.memory.max_keep
    assert (during.running, during.cache.blocks_used, during.cache.slots_used) == (1, 1, own + 1)
    finish(builtin)
    after = builtin.stats()
    assert after.prefilled_tokens - before.prefilled_tokens == 100
    assert after.generated_tokens - before.generated_tokens == 8
    assert (after.running, after.cache.blocks_used, after.cache.blocks_total) == (0, 0, 64)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "prompt is empty"),
        ([2048], {}, "token id 2048; the vocabulary has ids 0 to 2047"),
        ([1] * 4096, {}, "4096 tokens, but the context of 4096"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias has token id 5000"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_refusals_change_nothing(prompt: list[int], params: dict[str, Any], words: str, builtin: Engine) -> None:
    before = builtin.stats()
    with pytest.raises(ValueError, match=words):
        builtin.add(request("bad", prompt, **params))
    assert builtin.stats() == before


def test_id_in_use_is_refused_until_it_is_free(builtin: Engine) -> None:
    builtin.add(request("twin", [1, 2, 3]))
    with pytest.raises(ValueError, match="'twin' is in use"):
        builtin.add(request("twin", [4]))
    finish(builtin)
    builtin.add(request("twin", [4]))
    assert builtin.abort("twin", "disconnect")
    assert not builtin.abort("twin", "disconnect")
    assert not builtin.has_work()


def test_lives_up_to_its_context() -> None:
    engine = Engine(EngineConfig(**{**SMALL, "max_model_len": 100}))
    engine.add(request("echo", [3] * 100, max_tokens=0, prompt_logprobs=0))
    engine.add(request("long", [9] * 94, max_tokens=None, ignore_eos=True))
    outputs = finish(engine)
    [echo], long = outputs["echo"], outputs["long"]
    assert (echo.finish_reason, echo.token_ids, len(echo.prompt_logprobs or [])) == ("length", [], 100)
    assert (long[-1].finish_reason, len(tokens_of(long))) == ("length", 6)
    with pytest.raises(ValueError, match="101 tokens, but the context of 100 tokens leaves room for 100"):
        engine.add(request("echo", [3] * 101, max_tokens=0, prompt_logprobs=0))


def test_requests_without_a_seed_repeat_from_start_to_start() -> None:
    params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12}
    runs = []
    for seed in (0, 0, 1):
        engine = Engine(EngineConfig(seed=seed, **SMALL))
        for name in "ab":
            engine.add(request(name, [1, 2, 3], **params))
        outputs = finish(engine)
        runs.append([tokens_of(outputs[name]) for name in "ab"])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_logits_that_are_not_finite_end_their_request_only(own_engine: Engine) -> None:
    engine, bad = own_engine, 77
    assert engine.workers.runner is not None
    good = [request(f"good {i}", list(range(100 + i, 150 + i)), max_tokens=16, ignore_eos=True) for i in range(3)]
    for one in good:
        engine.add(one)
    expected = {name: tokens_of(outputs) for name, outputs in finish(engine).items()}
    model: Any = engine.workers.runner.model
    with torch.inference_mode():
        model.embed_tokens.weight[bad] = float("nan")
    for one in (good[0], request("bad", [1] * 40 + [bad] + [2] * 30), good[1], good[2]):
        engine.add(one)
    outputs = finish(engine)
    [ending] = outputs.pop("bad")
    assert ending.finish_reason == "error"
    assert "not finite" in (ending.error or "")
    assert {name: tokens_of(told) for name, told in outputs.items()} == expected
    engine.check()
    # Its blocks and states are free again, and whoever gets them is not disturbed by what they hold.
    for one in good:
        engine.add(one)
    assert {name: tokens_of(told) for name, told in finish(engine).items()} == expected


def test_step_that_fails_ends_the_engine(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: Plan) -> Pending:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(own_engine.workers, "launch", fail)
    own_engine.add(request("a", [1]))
    with pytest.raises(EngineDeadError, match="the engine has died: MemoryError: no room for the logits"):
        own_engine.step()
    for call in (own_engine.step, lambda: own_engine.add(request("b", [1]))):
        with pytest.raises(EngineDeadError, match="no room for the logits"):
            call()
    own_engine.close()


def test_a_step_in_flight_is_ended_before_the_engine_is_idle() -> None:
    engine = Engine(EngineConfig(**SMALL, overlap="on"))
    for name in "ab":
        engine.add(request(name, [1, 2, 3], max_tokens=20, ignore_eos=True))
    assert [len(output.token_ids) for output in engine.step()] == [1, 1]
    assert engine.stats().steps == 2, "one has ended, and one is in flight"
    assert engine.abort("a", "disconnect")
    [output] = engine.step()
    assert output.request_id == "b"
    assert engine.abort("b", "disconnect")
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()
    assert engine.step() == []
    engine.add(request("a", [1, 2, 3]))
    engine.step()
    engine.close()


def test_books_that_do_not_balance_end_the_engine(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own_engine.add(request("a", [1], max_tokens=2))
    own_engine.step()
    monkeypatch.setattr(own_engine.scheduler._cache, "release", lambda *args, **kwargs: None)
    with pytest.raises(EngineDeadError, match="AssertionError"):
        finish(own_engine)


def test_interrupted_step_ends_the_engine(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(plan: Plan) -> Pending:
        raise KeyboardInterrupt

    monkeypatch.setattr(own_engine.workers, "launch", interrupt)
    own_engine.add(request("a", [1]))
    with pytest.raises(KeyboardInterrupt):
        own_engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        own_engine.step()


def test_closed_engine_takes_nothing_and_holds_nothing(own_engine: Engine) -> None:
    own_engine.close()
    own_engine.close()
    assert own_engine.workers.runner is None
    with pytest.raises(RuntimeError, match="the engine is closed"):
        own_engine.add(request("a", [1]))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        own_engine.step()


def test_an_engine_with_wrong_books_lets_go_all_the_same(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own_engine.add(request("a", [1], max_tokens=1))
    own_engine.step()

    def check() -> None:
        raise AssertionError("wrong books")

    monkeypatch.setattr(own_engine.scheduler, "check", check)
    with pytest.raises(EngineDeadError, match="wrong books"):
        own_engine.close()
    assert own_engine.workers.runner is None


def test_no_request_waits_for_the_books(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    for name in ("a", "b"):
        own_engine.add(request(name, [1], max_tokens=1))
        assert not checks
        while own_engine.scheduler.has_work:
            own_engine.step()
        monkeypatch.setattr(own_engine.scheduler, "check", lambda name=name: checks.append(name))
    assert not own_engine.has_work()
    assert checks == ["b"]


def test_start_prints_the_memory_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = Engine(EngineConfig(max_num_batched_tokens=64, cache_memory_gib=0.004))
    text = caplog.text
    assert "memory plan" in text
    assert "state slots" in text
    assert f"max_num_seqs is {engine.blueprint.memory.max_num_seqs}, not 64" in text
    assert engine.max_model_len < 4096
    assert engine.workers.runner is not None
    model: Any = engine.workers.runner.model
    assert weight_bytes(model) == engine.blueprint.memory.sizes.weights


def test_what_is_reduced_is_said_where_the_plan_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Engine(EngineConfig(max_num_batched_tokens=64, cache_memory_gib=0.004))
    assert "memory plan" not in caplog.text
    assert re.search(r"max_num_seqs is \d+, not 64", caplog.text)
    assert re.search(r"max_model_len is [\d,]+, not the model's 4,096", caplog.text)


def test_sizes_that_cannot_be_are_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaserve.engine.workers.load_model", None)
    with pytest.raises(ValueError, match=r"max_num_seqs is 2000: .* the largest legal value is \d+"):
        Engine(EngineConfig(max_num_seqs=2000, max_num_batched_tokens=2000, cache_memory_gib=0.5))
    with pytest.raises(ValueError, match="max_model_len is 5000, beyond the model's context of 4096"):
        Engine(EngineConfig(max_model_len=5000))


@pytest.mark.parametrize("kinds", [["linear_attention"] * 2, ["full_attention"] * 2])
def test_models_of_one_kind_of_layer(kinds: list[str], tmp_path: Path) -> None:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=None, layer_types=kinds)
    engine = Engine(EngineConfig(model=str(write_checkpoint(tmp_path, shape)), **SMALL))
    for name in "abcdef":
        engine.add(request(name, [3] * 90, ignore_eos=True))
    assert {len(tokens_of(outputs)) for outputs in finish(engine).values()} == {8}


def test_books_are_balanced_after_the_last_outputs(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    monkeypatch.setattr(own_engine.scheduler, "check", lambda: checks.append(1))
    own_engine.add(request("a", [1], max_tokens=1))
    [output] = own_engine.step()
    assert output.finish_reason == "length"
    assert not checks, "whoever waits for the output need not wait for the books"
    assert not own_engine.has_work()
    assert not own_engine.has_work()
    assert len(checks) == 1
    own_engine.add(request("b", [1], max_tokens=1))
    own_engine.step()
    own_engine.close()
    assert len(checks) == 2


def test_long_books_are_balanced_less_often(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, checks = iter(range(1000)), []
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(own_engine.scheduler, "check", lambda: checks.append(1))
    for number in range(10):
        own_engine.add(request(str(number), [1], max_tokens=1))
        own_engine.step()
        assert not own_engine.has_work()
    assert len(checks) == 1, "a check of one second is followed by 99 without"
