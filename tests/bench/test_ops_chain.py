"""The chain of layers sends its tokens to experts that nobody prefers, or its times are below the floor."""

from __future__ import annotations

import pytest
import torch

from deltaserve.bench.ops_chain import Sizes, make_layer, touched

SIZES = Sizes(width=256, qkvz=256, values=256, ba=16, experts=64, inner=128, top_k=4)
LAYERS = 6


@pytest.mark.parametrize("tokens", [2, 8, 32])
def test_tokens_are_routed_as_if_at_random(tokens: int) -> None:
    cpu = torch.device("cpu")
    layers = [make_layer(SIZES, cpu) for _ in range(LAYERS)]
    x, mixed = torch.randn(tokens, SIZES.width).bfloat16(), torch.randn(tokens, SIZES.values).bfloat16()
    found = touched(layers, x, mixed)
    expected = SIZES.experts * (1 - (1 - SIZES.top_k / SIZES.experts) ** tokens)
    assert len(found) == LAYERS
    assert sum(found) / LAYERS == pytest.approx(expected, rel=0.12), found
    assert min(found[-2:]) > 0.75 * expected, f"tokens become alike: {found}"
