"""Slot pools under test: filled with what must never be read, and checked for what must never be written."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

POISONS = (float("nan"), 1e3)


class SlotPool:
    """A poisoned pool that hands out random slots and knows the contents of those in use."""

    def __init__(self, shape: Sequence[int], num_slots: int, poison: float, dtype: torch.dtype) -> None:
        self.tensor = torch.full((num_slots, *shape), poison, dtype=dtype)
        self.before = self.tensor.clone()
        self._free = random.sample(range(num_slots), num_slots)

    def take(self) -> int:
        return self._free.pop()

    def put(self, state: Tensor) -> int:
        """A slot that holds `state`."""
        slot = self.take()
        self.tensor[slot] = state
        self.before = self.tensor.clone()
        return slot

    def assert_changed_only(self, written: Iterable[int]) -> None:
        """Bit for bit, NaN included."""
        kept = torch.ones(len(self.tensor), dtype=torch.bool)
        kept[list(written)] = False
        torch.testing.assert_close(self.tensor[kept], self.before[kept], rtol=0, atol=0, equal_nan=True)
