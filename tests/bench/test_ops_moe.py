"""How the cases of experts are routed."""

from __future__ import annotations

import pytest
import torch

from deltaserve.bench.ops_moe import EXPERTS, TOP_K, scores_of
from deltaserve.ops.moe.reference import route


@pytest.mark.parametrize(("tokens", "least", "most"), [(8192, 55, 110), (512, 2, 4)])
def test_pairs_of_experts_are_as_uneven_as_a_models(tokens: int, least: float, most: float) -> None:
    """A binomial share of 8,192 tokens has a deviation of 12.5, of 512 tokens 3.1."""
    _, ids = route(scores_of(tokens, torch.device("cpu"))[:, :EXPERTS].float(), TOP_K, True)
    pairs = torch.bincount(ids.flatten().long(), minlength=EXPERTS).double()
    assert least < float(pairs.std()) < most
