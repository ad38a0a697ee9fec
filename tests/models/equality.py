"""What tests of the whole model compare: ours, transformers' and the exact logits of the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.load import load_model
from deltaserve.models.qwen3_next import Qwen3Next
from tests.models.factory import Json

TOLERANCE = 1e-4
TOLERANCE_64 = 1e-9


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3Next:
    config = ModelConfig.from_hf(load_config_json(folder))
    return load_model(folder, config, dtype, torch.device("cpu"), progress=False)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen3NextForCausalLM

    model: Any = Qwen3NextForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def their_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each prompt's logits [tokens, V], whole and without a cache; what pads a prompt on the right is in its future."""
    longest = max(map(len, prompts))
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    with torch.inference_mode():
        logits = model(torch.tensor(padded), use_cache=False).logits
    return [part[: len(prompt)] for part, prompt in zip(logits, prompts, strict=True)]


def draw_tokens(draw: random.Random, config: Json, count: int) -> list[int]:
    return [draw.randrange(config["vocab_size"]) for _ in range(count)]


def assert_close(logits: Tensor, expected: Tensor, tolerance: float) -> None:
    worst = (logits.double() - expected.double()).abs().max().item()
    assert worst <= tolerance, f"the logits differ by {worst:.3g}"


def assert_greedy(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Every token of each answer is the most likely one to transformers, given those before it."""
    logits = their_logits(model, [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)])
    for prompt, answer, part in zip(prompts, answers, logits, strict=True):
        assert part[len(prompt) - 1 :].argmax(-1).tolist() == list(answer)
