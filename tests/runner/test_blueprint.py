"""What is settled before a weight is read, and that no weight is read for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.models.load import load_model
from deltaserve.runner.blueprint import Blueprint, inspect
from deltaserve.runner.memory import weight_bytes
from tests.models.factory import random_config, tiny_config, write_checkpoint


def config_for(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("seed_of_shape", [1, 2, 3, 4])
def test_weights_take_the_bytes_that_were_foretold(seed_of_shape: int, dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_config(seed_of_shape), dtype=torch.bfloat16)
    plan = Blueprint.draw(config_for(folder, dtype=dtype, num_blocks=1))
    model = load_model(folder, plan.model, plan.dtype, plan.device, progress=False)
    assert weight_bytes(model) == plan.memory.sizes.weights
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_dtypes_are_the_ones_chosen(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config(), dtype=torch.bfloat16)
    auto = Blueprint.draw(config_for(folder))
    assert (auto.dtype, auto.state_dtype) == (torch.float32, torch.float32)
    chosen = Blueprint.draw(config_for(folder, dtype="bfloat16", state_dtype="bfloat16"))
    assert (chosen.dtype, chosen.state_dtype) == (torch.bfloat16, torch.bfloat16)
    assert chosen.memory.sizes.slot < auto.memory.sizes.slot


def test_inspect_tells_the_plan_and_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reading(*args: object, **kwargs: object) -> None:
        raise AssertionError("reads a weight")

    monkeypatch.setattr("deltaserve.models.fill.read", no_reading)
    folder = write_checkpoint(tmp_path, tiny_config())
    text = inspect(config_for(folder, max_num_seqs=3, num_blocks=48))
    print(text)
    assert re.search(r"4 layers \(3 gated delta net, 1 attention\), 4 with 8 experts, 3 used", text)
    assert re.search(r"float32 with float32 states on cpu, context of 1,024 tokens", text)
    assert re.search(r"KV blocks +48 x 32 KiB +1.5 MiB +3,072 tokens: 3 requests of 1,024 tokens", text)
    # A slot for each request and, at most, one to keep after each block.
    assert re.search(r"state slots +51 x .* 3 requests of any length and 48 snapshots", text)
    assert "prefixes from 64 tokens are reused; 48 snapshots fit beside 3 requests, 51 when none runs" in text
    without = inspect(config_for(folder, max_num_seqs=3, num_blocks=48, prefix_cache="off"))
    assert re.search(r"state slots +3 x ", without)
    assert "prefix cache off" in without
    assert "up to 3 tokens ahead" in inspect(EngineConfig(speculative_tokens="3"))
    assert "5,074,144 parameters" in inspect(EngineConfig(speculative_tokens="0"))
    assert "speculation off" in inspect(EngineConfig(device="cpu")), "on a CPU guesses wait to be asked for"
    with pytest.raises(AssertionError, match="reads a weight"):
        load_model(folder, Blueprint.draw(config_for(folder)).model, torch.float32, torch.device("cpu"), progress=False)


def test_inspect_plans_for_a_gpu_that_is_elsewhere() -> None:
    config = EngineConfig(preset="qwen3-next-80b-a3b-fp8", max_num_seqs=256, max_model_len=40960)
    text = inspect(config, 138.0)
    assert re.search(r"weights +74.92 GiB", text)
    assert re.search(r"bfloat16, 96 of 96 mixers and MLPs in FP8, with float32 states on cuda:0", text)
    assert "of 138.00 GiB free on the cuda" in text
    assert "at most 256 requests at once, 40,960 tokens each" in text
    with pytest.raises(ValueError, match=r"weights take 74\.92 GiB, but only 24\.00 GiB are free on the cuda"):
        inspect(config, 24)
    with pytest.raises(ValueError, match=r"gpu_memory_gib is -1; give the GiB"):
        inspect(config, -1)
    with pytest.raises(ValueError, match=r"gpu_memory_gib is 138, but device is cpu"):
        inspect(EngineConfig(device="cpu"), 138)


def test_inspect_refuses_a_checkpoint_that_lacks_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    write_checkpoint(tmp_path / "other", tiny_config(num_hidden_layers=3))
    (tmp_path / "other" / "model.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \d+ tensors"):
        inspect(config_for(folder))
