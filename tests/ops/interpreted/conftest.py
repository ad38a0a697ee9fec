"""Tests that run kernels on a CPU through Triton's interpreter.

The interpreter is chosen when a kernel is defined, for a whole process, and compiled kernels are tested in another: so
these tests are collected only when it is on. `make test` runs pytest twice.
"""

from __future__ import annotations

from pathlib import Path

import triton


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if triton.knobs.runtime.interpret else True
