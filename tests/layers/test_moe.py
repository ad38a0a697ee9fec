"""The router's last row is the shared expert's gate; the others choose."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deltaserve.layers.moe import SparseMoe
from tests.layers.filled import CPU, F64, filled


@pytest.mark.parametrize("renormalize", [True, False])
def test_chosen_experts_and_the_shared_one(renormalize: bool) -> None:
    layer = filled(
        SparseMoe(
            hidden_size=6,
            num_experts=5,
            top_k=2,
            inner_size=4,
            shared_size=3,
            renormalize=renormalize,
            dtype=F64,
            device=CPU,
        )
    )
    x_TD = torch.randn(7, 6, dtype=F64)
    probabilities = (x_TD @ layer.router.weight[:5].T).softmax(-1)
    expected = (x_TD @ layer.router.weight[5:].T).sigmoid() * layer.shared_expert(x_TD)
    for token, row in enumerate(probabilities):
        chosen = row.argsort(descending=True)[:2].tolist()
        for expert in chosen:
            gate, up = layer.w13[expert, :4], layer.w13[expert, 4:]
            inner = functional.silu(gate @ x_TD[token]) * (up @ x_TD[token])
            share = row[expert] / (row[chosen].sum() if renormalize else 1)
            expected[token] += share * (layer.w2[expert] @ inner)
    torch.testing.assert_close(layer(x_TD), expected)
