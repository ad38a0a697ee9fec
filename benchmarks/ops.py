"""Times ops on a GPU, each beside the time that its bytes or its operations must take. Needs a GPU.

    python -m benchmarks.ops [WORD ...]      only cases whose names hold one of the words

Every case is captured in a CUDA graph over all its input sets, so that launch gaps of the host do not count and weights
come from memory, not from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    name: str
    make: Callable[[], Sequence[Callable[[], object]]]
    """Allocates input sets on the GPU and returns one call per set. Sets together exceed the L2 cache, where a set is
    small; 2 to 20 of them."""
    num_bytes: float
    """That must move through device memory in one call: inputs read once, outputs written once."""
    flops: float = 0.0
    is_fp8: bool = False
    """Which matrix rate the operations are held against."""
