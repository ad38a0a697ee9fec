"""The pass over chunks by warps with roles, which nothing chooses yet, on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deltaserve.ops.gpu import properties

pytestmark = pytest.mark.gpu


def test_it_is_right() -> None:
    """In a process of its own: what a new kernel may do to a GPU ends with it."""
    if not properties(torch.device("cuda", 0)).is_hopper:
        pytest.skip("the kernel is for Hopper")
    command = [sys.executable, "-m", "tests.ops.gpu.pass_on_hopper"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
