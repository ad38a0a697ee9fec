"""Positions turn pairs of dimensions, the first of a head only; scores depend on distances only."""

from __future__ import annotations

import torch

from deltaserve.layers.rotary import Rotary
from tests.layers.filled import CPU, F64


def test_only_the_first_dimensions_turn_and_distances_count() -> None:
    rotary = Rotary(64, 8, 100.0, None, CPU)
    q_THD, k_TGD = torch.randn(1, 2, 12, dtype=F64), torch.randn(1, 1, 12, dtype=F64)
    scores = []
    for shift in (0, 17, 40):
        q, _ = rotary(q_THD, k_TGD, torch.tensor([shift + 5]))
        _, k = rotary(q_THD, k_TGD, torch.tensor([shift]))
        assert torch.equal(q[..., 8:], q_THD[..., 8:])
        assert torch.equal(k[..., 8:], k_TGD[..., 8:])
        scores.append((q * k).sum(-1))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-5, rtol=0)
    assert not torch.allclose(scores[0], (q_THD * k_TGD).sum(-1), atol=1e-2)


def test_scaling_reaches_the_table() -> None:
    plain = Rotary(64, 8, 100.0, None, CPU)
    yarn = Rotary(64, 8, 100.0, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, CPU)
    assert plain.cos_sin.shape == yarn.cos_sin.shape == (64, 8)
    assert not torch.allclose(plain.cos_sin, yarn.cos_sin)


def test_the_table_is_no_weight() -> None:
    rotary = Rotary(64, 8, 100.0, None, CPU)
    assert not list(rotary.parameters())
    assert not rotary.state_dict()
