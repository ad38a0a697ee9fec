"""Kernels that start before the one before them has ended (programmatic dependent launch). Knows no op.

Such a kernel may read what nobody writes any more, weights, at once; it waits before it reads what the kernel before it
made, and before it writes anything. Hopper and later; elsewhere, and where `EARLY` is false, kernels follow each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deltaserve.ops.gpu import properties

BY_DEFAULT = False


def early_options(device: torch.device, early: bool | None) -> dict[str, Any]:
    """Arguments of a launch: EARLY, and the launch attribute that goes with it."""
    if (BY_DEFAULT if early is None else early) and properties(device).is_hopper:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Until all kernels before this one have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The next kernel may start once all programs of this one have come here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
