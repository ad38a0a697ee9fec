"""Rotary embedding against transformers' frequencies and against float64 by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding, apply_rotary_pos_emb

from deltaserve.ops.rope.api import apply_rope, rope_table
from deltaserve.ops.rope.reference import rope_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-one-mscale": {**YARN, "mscale": 0.8},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-factor-1": {**YARN, "factor": 1.0},
    "yarn-short": {**YARN, "factor": 40.0, "original_max_position_embeddings": 32},
}


def transformers_config(scaling: dict[str, Any], head_dim: int, partial: float, theta: float) -> Qwen3NextConfig:
    rope = {**scaling, "rope_theta": theta, "partial_rotary_factor": partial}
    return Qwen3NextConfig(head_dim=head_dim, max_position_embeddings=16384, rope_parameters=rope)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("head_dim", "partial", "theta"), [(64, 0.25, 1e4), (256, 0.25, 1e7), (32, 1.0, 1e4)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_table_equal_transformers(name: str, head_dim: int, partial: float, theta: float) -> None:
    scaling, rotary_dim = SCALINGS[name], int(head_dim * partial)
    theirs = Qwen3NextRotaryEmbedding(transformers_config(scaling, head_dim, partial, theta))
    inv_freq, attention_factor = rope_frequencies(rotary_dim, theta, scaling)
    assert torch.equal(inv_freq, theirs.inv_freq)
    assert attention_factor == pytest.approx(theirs.attention_scaling, abs=0, rel=1e-15)

    table = rope_table(16384, rotary_dim, theta, scaling)
    cos, sin = theirs(torch.zeros(1), torch.arange(16384)[None])
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.cat([cos[0, :, : rotary_dim // 2], sin[0, :, : rotary_dim // 2]], dim=-1))
    if name != "default":
        config = transformers_config(scaling, head_dim, partial, theta)
        assert torch.equal(inv_freq, ROPE_INIT_FUNCTIONS["yarn"](config)[0])


def test_no_scaling_is_the_default() -> None:
    assert torch.equal(rope_table(10, 8, 1e4), rope_table(10, 8, 1e4, {"type": "default"}))
    assert not torch.equal(rope_table(10, 8, 1e4), rope_table(10, 8, 1e4, YARN))


@pytest.mark.parametrize(("width", "rotary_dim"), [(16, 16), (16, 4), (64, 16), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rotation_by_hand(dtype: torch.dtype, width: int, rotary_dim: int) -> None:
    tokens, half = 5, rotary_dim // 2
    q, k = torch.randn(tokens, 4, width).to(dtype), torch.randn(tokens, 2, width).to(dtype)
    before = q.clone(), k.clone()
    position = torch.randint(0, 100, (tokens,))
    table = rope_table(100, rotary_dim, 1e4)
    rotated = apply_rope(q, k, position, table)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    for x, y in zip((q, k), rotated, strict=True):
        assert y.dtype == dtype
        assert y.shape == x.shape
        expected = x.double().clone()
        for t in range(tokens):
            for i in range(half):
                cos, sin = table[position[t], i].double(), table[position[t], half + i].double()
                first, second = x[t, :, i].double(), x[t, :, half + i].double()
                expected[t, :, i] = first * cos - second * sin
                expected[t, :, half + i] = second * cos + first * sin
        eps = max(1e-12, float(torch.finfo(dtype).eps))
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=eps)


def test_rotation_equals_transformers() -> None:
    q, k, position = torch.randn(7, 4, 64), torch.randn(7, 2, 64), torch.randint(0, 4096, (7,))
    ours = apply_rope(q, k, position, rope_table(4096, 16, 1e4))
    cos, sin = Qwen3NextRotaryEmbedding(transformers_config({"rope_type": "default"}, 64, 0.25, 1e4))(q, position[None])
    rotate: Any = apply_rotary_pos_emb
    theirs = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported"),
        ({"type": "linear", "factor": 2.0}, "'linear' is not supported"),
        ({**YARN, "betafast": 3}, "does not know.*betafast"),
        ({"rope_type": "default", "factor": 2.0}, "does not know.*factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, "needs 'factor'"),
    ],
)
def test_unknown_scalings_are_refused_by_name(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rope_table(10, 8, 1e4, scaling)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="is odd"):
        rope_table(10, 7, 1e4)
    with pytest.raises(AssertionError, match="differ in tokens"):
        apply_rope(torch.zeros(2, 1, 8), torch.zeros(3, 1, 8), torch.zeros(2).long(), rope_table(10, 8, 1e4))
    with pytest.raises(AssertionError, match="8 of it to rotate"):
        apply_rope(torch.zeros(2, 1, 6), torch.zeros(2, 1, 6), torch.zeros(2).long(), rope_table(10, 8, 1e4))
