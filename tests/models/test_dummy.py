"""Weights drawn at random are as lively as a real model's: none is zero, all experts are used, nothing runs away."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.core.request import SamplingParams
from deltaserve.engine.llm import LLM
from deltaserve.model_config import ModelConfig
from deltaserve.models import presets
from deltaserve.models.dummy import _e4m3_rms, _fill_e4m3
from deltaserve.models.load import quantized_units, random_model
from deltaserve.models.presets import PRESETS, preset_config
from deltaserve.models.qwen3_next import Qwen3Next
from deltaserve.runner.blueprint import Blueprint, inspect
from tests.driver import Driver, Row
from tests.models.factory import fp8_config, write_checkpoint

CPU = torch.device("cpu")
SMALLER = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 64,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""The published model's shape in a hundredth of each size."""


def shrunk(name: str) -> ModelConfig:
    return ModelConfig.from_hf(preset_config(name) | SMALLER)


def drawn(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen3Next:
    config = shrunk(name)
    return random_model(config, dtype, CPU, True, quantized_units(None, config, True), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESETS)
def test_no_weight_is_zero_or_no_number(name: str, dtype: torch.dtype) -> None:
    for weight, parameter in drawn(name, dtype).named_parameters():
        numbers = parameter.detach().float()
        assert numbers.isfinite().all(), weight
        assert (numbers != 0).all(), weight
        some = numbers.flatten()[:1000]
        assert len(set(some.tolist())) > min(len(some), 200) * 0.9, f"{weight} is nearly constant"


def test_the_seed_decides() -> None:
    first, same, other = (dict(drawn("qwen3-next-80b-a3b-fp8", seed=seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter.float(), same[name].float()), name
        assert not torch.equal(parameter.float(), other[name].float()), name


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_spread_over_the_experts_and_nothing_runs_away(name: str) -> None:
    model = drawn(name)
    chosen: dict[str, Tensor] = {}

    def watch(layer: str) -> Any:
        def count(module: Any, inputs: Any, scores: Tensor) -> None:
            ids = scores[:, :-1].topk(10).indices.flatten()
            chosen[layer] = chosen.get(layer, torch.zeros(64)) + torch.bincount(ids, minlength=64)

        return count

    for layer, module in model.named_modules():
        if layer.endswith("mlp.router") and not layer.startswith("mtp"):
            module.register_forward_hook(watch(layer))
    driver, draw = Driver(model), random.Random(0)
    for _ in range(8):
        logits = driver.prefill(Row([draw.randrange(2048) for _ in range(500)]))
        assert logits.isfinite().all()
        assert 0.2 < logits.std() < 5
    assert len(chosen) == 4
    for layer, counts in chosen.items():
        assert counts.sum() == 40_000
        assert counts.min() > 0, f"{layer} never takes some experts"
        assert counts.max() < 5 * counts.mean(), f"{layer} crowds on one expert"


@pytest.mark.parametrize("count", [1, 7, 8, 1000, 4099])
def test_every_code_but_zero_and_nan(count: int) -> None:
    flat = torch.zeros(count + 3, dtype=torch.uint8).view(torch.float8_e4m3fn)[3:]
    _fill_e4m3(flat, torch.Generator().manual_seed(0))
    numbers = flat.double()
    assert numbers.isfinite().all()
    assert (numbers != 0).all()
    if count > 4000:
        assert len(set(numbers.tolist())) == 252
        assert abs(numbers.square().mean().sqrt() / _e4m3_rms() - 1) < 0.05
        assert abs(numbers.mean()) < 5


# ---- without files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in PRESETS.items():
        monkeypatch.setitem(presets.PRESETS, name, config | SMALLER)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_answers(small_presets: None, name: str) -> None:
    with LLM(preset=name, device="cpu", num_blocks=8, speculative_tokens="2") as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
        for prompt in ([5, 2047, 9], "Who are you?"):
            (answer,) = llm.generate(prompt, params)
            assert len(answer.outputs[0].token_ids) == 5


def test_inspect_needs_no_files(small_presets: None) -> None:
    plain, fp8 = (inspect(EngineConfig(preset=name, device="cpu")) for name in PRESETS)
    assert "model preset qwen3-next-80b-a3b-fp8\n" in fp8
    assert "float32, 8 of 8 mixers and MLPs in FP8, with float32 states" in fp8
    assert "weights drawn at random" in fp8
    assert "in FP8" not in plain
    assert "speculation off" in fp8
    quantised = inspect(EngineConfig(preset="qwen3-next-80b-a3b", quantization="fp8", device="cpu"))
    assert quantised.splitlines()[1:6] == fp8.splitlines()[1:6]
    assert "in FP8" not in inspect(EngineConfig(preset="qwen3-next-80b-a3b-fp8", quantization="none", device="cpu"))


def test_a_folder_needs_only_its_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, fp8_config(), fp8=True)
    (folder / "model.safetensors").unlink()
    config = EngineConfig(model=str(folder), load_format="dummy", device="cpu", speculative_tokens="1", num_blocks=4)
    blueprint = Blueprint.draw(config)
    assert len(blueprint.quantized) == 10
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Blueprint.draw(EngineConfig(model=str(folder), device="cpu"))


def test_the_published_model_takes_the_bytes_that_it_is_known_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaserve.runner.blueprint.free_memory", lambda device: 400 << 30)
    fp8 = Blueprint.draw(EngineConfig(preset="qwen3-next-80b-a3b-fp8", dtype="bfloat16", device="cpu"))
    assert 74.85 <= fp8.memory.sizes.weights / 2**30 <= 75.0
    plain = Blueprint.draw(EngineConfig(preset="qwen3-next-80b-a3b", dtype="bfloat16", device="cpu"))
    assert 148 <= plain.memory.sizes.weights / 2**30 <= 149
    assert fp8.num_parameters == plain.num_parameters
    assert 79.6e9 < plain.num_parameters < 79.8e9


def test_refusals() -> None:
    with pytest.raises(ValueError, match="preset is 'x'; there are qwen3-next-80b-a3b, qwen3-next-80b-a3b-fp8"):
        Blueprint.draw(EngineConfig(preset="x"))
    with pytest.raises(ValueError, match="preset is 'x', and a model or a revision is given too; give one of them"):
        EngineConfig(preset="x", model="y")
