"""Four layers at the widths of the 80B model, bf16 and FP8: how far logits are from exact ones, beside how far
transformers in bf16 is. Needs a GPU.

Exact is the model in float64 through the torch ops, on the weights that the file stands for.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.config import Quantization
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.load import load_model
from tests.driver import Driver, Row
from tests.models.equality import theirs
from tests.models.factory import WIDE, tiny_config, write_checkpoint

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PROMPTS, DECODED = (200, 70, 1), 4


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def logits_of(folder: Path, dtype: torch.dtype, quantization: Quantization, rows: list[list[int]]) -> Tensor:
    """All logits of the rows, float64 [tokens, V]: prompts in one step, then some tokens one by one."""
    config = ModelConfig.from_hf(load_config_json(folder))
    model = load_model(folder, config, dtype, CUDA, progress=False, quantization=quantization)
    driver, running = Driver(model, num_blocks=16, num_slots=16), [Row(list(row)) for row in rows]
    steps = [driver.step(running, [len(row) - DECODED for row in rows])]
    steps += [driver.step(running, [1] * len(rows), num_step=len(rows)) for _ in range(DECODED)]
    return torch.cat([step[number] for number in range(len(rows)) for step in steps]).double()


def make(tmp_path: Path, fp8: bool) -> tuple[Path, list[list[int]]]:
    draw = random.Random(1)
    rows = [[draw.randrange(4096) for _ in range(length + DECODED)] for length in PROMPTS]
    return write_checkpoint(tmp_path, tiny_config(**WIDE), dtype=torch.bfloat16, fp8=fp8), rows


def test_bf16(tmp_path: Path) -> None:
    folder, rows = make(tmp_path, fp8=False)
    exact = logits_of(folder, torch.float64, "none", rows)
    with torch.inference_mode():
        model = theirs(folder, torch.bfloat16).to(CUDA)
        parts = [model(torch.tensor([row], device=CUDA), use_cache=False).logits[0] for row in rows]
    yardstick = relative(torch.cat(parts), exact)
    del model
    error = relative(logits_of(folder, torch.bfloat16, "none", rows), exact)
    print(f"bf16: {error:.3e} from exact, transformers {yardstick:.3e}")
    assert error <= 1.2 * yardstick


def test_fp8(tmp_path: Path) -> None:
    """What is added to bf16's own error is that of quantised activations, which float64 shows alone."""
    folder, rows = make(tmp_path, fp8=True)
    exact = logits_of(folder, torch.float64, "none", rows)
    quantised = logits_of(folder, torch.float64, "auto", rows)
    rounded = relative(logits_of(folder, torch.bfloat16, "none", rows), exact)
    activations = relative(quantised, exact)
    error = relative(logits_of(folder, torch.bfloat16, "auto", rows), exact)
    print(f"FP8: {error:.3e} from exact; activations alone {activations:.3e}, bf16 alone {rounded:.3e}")
    assert error <= 1.2 * (activations**2 + rounded**2) ** 0.5
