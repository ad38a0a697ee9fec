"""Every legal config gives transformers' logits and greedy tokens in float32, and the paper's in float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.driver import Driver, Row
from tests.models.equality import (
    TOLERANCE,
    TOLERANCE_64,
    assert_close,
    assert_greedy,
    draw_tokens,
    ours,
    their_logits,
    theirs,
)
from tests.models.factory import BUILTIN, Json, random_config, random_tensors, tiny_config, write_checkpoint
from tests.models.reference import Reference


@pytest.mark.parametrize("seed", range(24))
def test_random_configs(seed: int, tmp_path: Path) -> None:
    """Whole prompts in both dtypes, and the greedy tokens of a ragged batch of 1 to 16 rows."""
    config = random_config(seed)
    folder = write_checkpoint(tmp_path, config, seed=seed, shards=1 + seed % 3, mtp=seed % 2 == 0)
    draw = random.Random(seed)
    reference, model = theirs(folder), ours(folder)
    token_ids = draw_tokens(draw, config, 150)
    assert_close(Driver(model).prefill(Row(token_ids)), their_logits(reference, [token_ids])[0], TOLERANCE)
    exact = Reference(config, random_tensors(config, seed=seed)).logits(token_ids[:70])
    assert_close(Driver(ours(folder, torch.float64)).prefill(Row(token_ids[:70])), exact, TOLERANCE_64)

    prompts = [draw_tokens(draw, config, draw.choice([1, 2, 7, 33, 64, 65, 90])) for _ in range(1 + seed % 16)]
    answers = Driver(model).greedy(prompts, 8, chunk=draw.choice([5, 16, 64, 1000]))
    assert_greedy(reference, prompts, answers)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 80},
        {"hidden_size": 96},
        {"hidden_size": 320},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
        {"linear_num_value_heads": 6},
        {"linear_num_value_heads": 8},
        {"linear_key_head_dim": 24, "linear_value_head_dim": 8},
        {"norm_topk_prob": False},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3]},
        {"num_experts": 0},
        {"tie_word_embeddings": True},
        {"full_attention_interval": None, "layer_types": ["full_attention", "linear_attention"] * 2},
        {"full_attention_interval": 1},
        {"full_attention_interval": 5},
        {"partial_rotary_factor": 1.0},
        {"rope_theta": None, "partial_rotary_factor": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                          "attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2, "truncate": False}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                          "mscale": 0.7, "mscale_all_dim": 1.3}},
        {"linear_conv_kernel_dim": 2},
        {"rms_norm_eps": 0.1},
        {"num_attention_heads": 6, "num_key_value_heads": 1},
        {"num_experts": 1, "num_experts_per_tok": 1},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items())[:60],
)  # fmt: skip
def test_each_variation_of_the_config(changes: Json, tmp_path: Path) -> None:
    config = tiny_config(**changes)
    folder = write_checkpoint(tmp_path, config)
    token_ids = draw_tokens(random.Random(0), config, 100)
    (expected,) = their_logits(theirs(folder), [token_ids])
    assert_close(Driver(ours(folder)).prefill(Row(token_ids), [70, 1, 29]), expected, TOLERANCE)


def test_bfloat16_is_as_close_to_the_truth_as_transformers(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_checkpoint(tmp_path, config, dtype=torch.bfloat16)
    exact = Reference(config, {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()})
    model, reference = ours(folder, torch.bfloat16), theirs(folder, torch.bfloat16)
    our_error, their_error = 0.0, 0.0
    for _ in range(3):
        token_ids = draw_tokens(random.Random(1), config, 100)
        truth = exact.logits(token_ids)
        logits = Driver(model).prefill(Row(token_ids), [60, 1, 39])
        assert logits.dtype == torch.float32
        our_error += (logits - truth).abs().mean().item()
        their_error += (their_logits(reference, [token_ids])[0] - truth).abs().mean().item()
    assert our_error <= 1.1 * their_error


QUESTIONS = (
    "Tom has 17 apples and gives 5 of them to Mia. How many apples does he have?",
    "Reverse the letters: planet",
    "Hello!",
    "What is 12 * 11?",
)


def test_the_builtin_model() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    start, end = "<|im_start|>", "<|im_end|>"
    prompts: list[list[int]] = [
        tokenizer(f"{start}user\n{text}{end}\n{start}assistant\n")["input_ids"] for text in QUESTIONS
    ]
    model, reference = ours(BUILTIN), theirs(BUILTIN)
    for prompt, expected in zip(prompts, their_logits(reference, prompts), strict=True):
        assert_close(Driver(model).prefill(Row(prompt)), expected, TOLERANCE)
    answers = Driver(model).greedy(prompts, 40, chunk=32)
    assert_greedy(reference, prompts, answers)
    assert "12" in tokenizer.decode(answers[0])
    assert "132" in tokenizer.decode(answers[3])
