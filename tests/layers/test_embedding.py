"""Ids to vectors, and vectors to logits that are never narrower than float32."""

from __future__ import annotations

import pytest
import torch

from deltaserve.layers.embedding import Embedding
from tests.layers.filled import CPU, F64, filled


@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)]
)
def test_vectors_and_logits(dtype: torch.dtype, logits: torch.dtype) -> None:
    layer = filled(Embedding(7, 4, dtype, CPU))
    vectors = layer(torch.tensor([3, 0, 3]))
    assert torch.equal(vectors, layer.weight[[3, 0, 3]])
    projected = layer.project(vectors)
    assert projected.dtype == logits
    torch.testing.assert_close(projected, (vectors @ layer.weight.T).to(logits))
