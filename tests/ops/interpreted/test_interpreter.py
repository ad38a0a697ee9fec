"""The interpreter is on where it should be."""

from __future__ import annotations

import triton


def test_kernels_are_interpreted() -> None:
    assert triton.knobs.runtime.interpret
