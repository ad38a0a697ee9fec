"""Memory for kernels under test: what they allocate is NaN at first, between margins that must stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

MARGIN = 4096
"""Bytes on either side."""


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, `torch.empty` makes such tensors; leaving checks the margins."""
    made: list[tuple[Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        size = torch.Size(sizes).numel() * dtype.itemsize
        memory = torch.full((size + 2 * MARGIN,), 0xA5, dtype=torch.uint8, device=device)
        inside = memory[MARGIN : MARGIN + size]
        inside.fill_(0xFF)
        made.append((memory, size))
        return inside.view(dtype).view(sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert made, "nothing was allocated"
    for memory, size in made:
        assert (memory[:MARGIN] == 0xA5).all(), "bytes before a tensor changed"
        assert (memory[MARGIN + size :] == 0xA5).all(), "bytes behind a tensor changed"


def relative(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, NaN where a number is."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
