"""Which tensors the numba kernels compute, and when. Knows no op.

Kernels beside an op's reference are compiled for float32 and run on one thread. They win while calls cost more than what
they compute, and where a step goes over memory once that torch goes over several times.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LANES = 8
"""Numbers that kernels compute at once: the widths that they know are multiples of it."""
THREAD_WORK = 1 << 22
"""Multiplications of a call that are worth waking torch's other threads for."""
MODULES = (
    "norm.numba_norm",
    "linear.numba_linear",
    "gated_delta.numba_net",
    "attention.numba_attention",
    "moe.numba_moe",
    "sampling.numba_greedy",
)


def takes_tensors(*tensors: Tensor) -> bool:
    """Whether kernels compute on these tensors: float32 on a CPU, no gradients, and numba is there."""
    for x in tensors:
        if not x.is_cpu or x.dtype is not torch.float32 or x.requires_grad:
            return False
    return is_available()


def is_worth_threads(multiplications: int) -> bool:
    """Whether torch's threads together are faster than one, which kernels run on."""
    return multiplications > THREAD_WORK and torch.get_num_threads() > 1


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether there is a numba that works. Without it torch computes."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        logger.warning("no kernels for the CPU, torch computes: %s", error)
        return False
    return True


def prepare() -> None:
    """Loads the kernels; compiles those that no earlier process has left on the disk."""
    if not is_available():
        return
    begin = time.perf_counter()
    for module in MODULES:
        import_module(f"deltaserve.ops.{module}")
    logger.info("kernels for the CPU are ready after %.1f s", time.perf_counter() - begin)
