"""On a GPU weights are what they are on the CPU, whether read, quantised on the way or multiplied out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.config import Quantization
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models import fill
from deltaserve.models.load import load_model, quantized_units, random_model
from deltaserve.models.presets import preset_config
from deltaserve.models.qwen3_next import Qwen3Next
from tests.models.factory import fp8_config, write_checkpoint

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def load(folder: Path, device: str, quantization: Quantization) -> Qwen3Next:
    config = ModelConfig.from_hf(load_config_json(folder))
    return load_model(folder, config, BF16, torch.device(device), False, True, quantization)


@pytest.mark.parametrize("buffer", [64 << 20, 100_000])
@pytest.mark.parametrize("shared", [128, 256])
@pytest.mark.parametrize(
    ("form", "quantization"),
    [
        ({"fp8": True}, "auto"),
        ({"fp8": True, "shards": 3}, "none"),
        ({}, "fp8"),
        ({}, "auto"),
        ({"stacked_experts": True, "split_in_proj": True}, "fp8"),
    ],
)
def test_weights_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, quantization: Quantization, shared: int, buffer: int
) -> None:
    monkeypatch.setattr(fill, "BATCH_BYTES", buffer)
    config = fp8_config(shared_expert_intermediate_size=shared)
    folder = write_checkpoint(tmp_path, config, dtype=BF16, mtp=True, **form)
    there = dict(load(folder, "cuda", quantization).named_parameters())
    for name, parameter in load(folder, "cpu", quantization).named_parameters():
        assert there[name].dtype == parameter.dtype
        assert torch.equal(there[name].cpu().float(), parameter.float()), name


@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="measures time: with other tests beside it says nothing; run it with -n 0",
)
@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b-fp8", "qwen3-next-80b-a3b"])
def test_random_weights_come_at_the_speed_of_memory(name: str) -> None:
    """Two layers of the full model: 6.6 GB or half of it."""
    config = ModelConfig.from_hf(preset_config(name) | {"num_hidden_layers": 2})
    device = torch.device("cuda")
    quantized = quantized_units(None, config)
    first = random_model(config, BF16, device, quantized=quantized)  # loads the kernels
    nbytes = sum(parameter.nbytes for parameter in first.parameters())
    del first
    torch.cuda.synchronize()
    took = []
    for _ in range(3):
        start = time.perf_counter()
        model = random_model(config, BF16, device, quantized=quantized)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    seconds = min(took)
    print(f"{nbytes / 1e9:.1f} GB in {seconds:.3f} s: {nbytes / seconds / 1e9:.0f} GB/s")
    assert nbytes / seconds > 20e9
    for weight, parameter in model.named_parameters():
        numbers = parameter.flatten()[:100_000].float() if parameter.dim() < 3 else parameter[-1].float()
        assert numbers.isfinite().all(), weight
        assert (numbers != 0).all(), weight
