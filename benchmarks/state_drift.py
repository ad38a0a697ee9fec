"""How far a bf16 state drifts from a float32 one over thousands of decoded tokens.

    python -m benchmarks.state_drift [--tokens 4000] [--layers 8]

Two models: one of random weights at the widths of the 80B one, with few layers and experts, in float32, and the
built-in one. Each gets the same tokens one by one, with float32 and with bfloat16 states; told is the relative
difference of the logits (root mean square over the vocabulary), averaged over stretches of tokens, and how often the
most likely token differs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import deltaserve
from deltaserve.bench.report import environment, table
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.load import load_model, random_model
from deltaserve.models.presets import preset_config
from deltaserve.models.qwen3_next import Qwen3Next
from tests.driver import Driver, Row


def drift(model: Qwen3Next, tokens: int, stretches: int = 8) -> list[dict[str, Any]]:
    draw, vocab = random.Random(0), model.config.vocab_size
    text = [draw.randrange(vocab) for _ in range(tokens)]
    drivers = [
        Driver(model, num_blocks=-(-tokens // 64), num_slots=2, state_dtype=dtype, in_place=True)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    rows = [Row(list(text)) for _ in drivers]
    found: list[tuple[float, bool]] = []
    for number in range(tokens):
        exact, rounded = (
            driver.step([row], [1], num_step=min(number, 1))[0][0].double()
            for driver, row in zip(drivers, rows, strict=True)
        )
        difference = float((rounded - exact).norm() / exact.norm())
        found.append((difference, int(exact.argmax()) != int(rounded.argmax())))
    size = tokens // stretches
    return [
        {
            "tokens": f"{first} to {first + size}",
            "relative difference": sum(d for d, _ in found[first : first + size]) / size,
            "other token": sum(other for _, other in found[first : first + size]) / size,
        }
        for first in range(0, size * stretches, size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(environment(device))
    wide = preset_config("qwen3-next-80b-a3b") | {"num_hidden_layers": asked.layers, "num_experts": 32}
    config = replace(ModelConfig.from_hf(wide), vocab_size=4096)
    print(f"random weights, {asked.layers} layers at full width")
    print(table(drift(random_model(config, torch.float32, device), asked.tokens)))
    folder = Path(deltaserve.__file__).parent / "builtin"
    builtin = load_model(folder, ModelConfig.from_hf(load_config_json(folder)), torch.float32, device, progress=False)
    print("built-in model, random tokens")
    print(table(drift(builtin, min(asked.tokens, 4000))))


if __name__ == "__main__":
    main()
