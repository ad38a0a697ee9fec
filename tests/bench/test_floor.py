"""The floors of the 80B model, from its shapes alone, are those that were counted by hand for one H200."""

from __future__ import annotations

import pytest
import torch

from deltaserve.bench.floor import Rates, Weights, decode_bytes, distinct_experts, prefill_seconds, weights_of
from deltaserve.model_config import ModelConfig
from deltaserve.models.load import empty_model, quantized_units
from deltaserve.models.presets import preset_config
from deltaserve.runner.memory import footprint

RATES = Rates(copy=4.27e12, matrix=680e12, matrix_fp8=1255e12)


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, Weights]:
    config = ModelConfig.from_hf(preset_config("qwen3-next-80b-a3b-fp8"))
    outline = empty_model(config, torch.bfloat16, quantized=quantized_units(None, config))
    return config, weights_of(outline, config)


@pytest.mark.parametrize(
    ("rows", "state", "milliseconds"),
    [
        (1, torch.bfloat16, 0.94),
        (1, torch.float32, 0.96),
        (8, torch.bfloat16, 3.37),
        (8, torch.float32, 3.52),
        (32, torch.float32, 10.3),
        (128, torch.bfloat16, 19.9),
        (128, torch.float32, 22.1),
        (256, torch.float32, 28.4),
    ],
)
def test_decode(model: tuple[ModelConfig, Weights], rows: int, state: torch.dtype, milliseconds: float) -> None:
    config, weights = model
    sizes = footprint(config, torch.bfloat16, state, 0)
    moved = decode_bytes(config, weights, sizes.block, sizes.slot, rows, 512 + 64)
    assert moved / RATES.copy * 1e3 == pytest.approx(milliseconds, rel=0.04)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(1024, 19), (8192, 50), (32768, 320)])
def test_prefill(model: tuple[ModelConfig, Weights], tokens: int, milliseconds: float) -> None:
    config, weights = model
    assert prefill_seconds(config, weights, True, tokens, RATES) * 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_experts_that_tokens_touch(model: tuple[ModelConfig, Weights]) -> None:
    config, _ = model
    assert distinct_experts(config, 1) == pytest.approx(10)
    assert distinct_experts(config, 2) == pytest.approx(20 - 100 / 512)
    assert distinct_experts(config, 100_000) == pytest.approx(512)
