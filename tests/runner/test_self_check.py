"""A layer that gives no numbers turns speculation off, one that guesses badly is told of, a good one passes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from tests.models.factory import tiny_config, write_checkpoint


def warnings_of(caplog: pytest.LogCaptureFixture, **config: Any) -> tuple[Engine, list[str]]:
    with caplog.at_level(logging.WARNING):
        engine = Engine(EngineConfig(device="cpu", speculative_tokens="2", max_num_seqs=2, num_blocks=8, **config))
    return engine, [record.getMessage() for record in caplog.records if "MTP" in record.getMessage()]


def test_the_built_in_model_passes(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog)[1] == []


def damage(folder: Path, value: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = tensors["mtp.norm.weight"]
    tensors["mtp.norm.weight"] = torch.full_like(norm, value)
    save_file(tensors, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, tiny_config(num_hidden_layers=2, full_attention_interval=2), seed=3, mtp=True)


def test_numbers_that_are_not_finite_turn_it_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(folder, float("nan"))
    engine, [warning] = warnings_of(caplog, model=str(folder))
    assert "mtp.*" in warning
    assert "not finite" in warning
    assert "speculation is off" in warning
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add(Request(request_id="one", prompt_token_ids=[1, 2, 3], params=params, arrival=0.0))
    tokens = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
    assert len(tokens) == 5
    assert engine.stats().draft_tokens == 0
    engine.check()


def test_guesses_worse_than_chance_are_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(folder, 40.0)  # large logits, and wrong ones
    _, [warning] = warnings_of(caplog, model=str(folder))
    assert "mtp.*" in warning
    assert "chance" in warning
