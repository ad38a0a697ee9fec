"""Which tensors the numba kernels compute, and when. Knows no op.

Kernels beside an op's reference are compiled for float32 and run on one thread. They win while torch's calls cost more
than what they compute, and where torch goes over memory several times.
"""

from __future__ import annotations

import logging
import time
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
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


def floats(*shape: int) -> Tensor:
    """A float32 tensor not yet filled, whatever the caller's process has made torch's default."""
    return torch.empty(shape, dtype=torch.float32, device=CPU)


def takes_tensors(*tensors: Tensor) -> bool:
    """Whether kernels compute on these tensors of one device: float32 on a CPU, no gradients, and numba is there."""
    for x in tensors:
        if x.dtype is not torch.float32:
            return False
    if not tensors[0].is_cpu or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    return is_available()


def is_worth_threads(multiplications: int, needed: int = 2) -> bool:
    """Whether torch's threads together are faster than one, which kernels run on. `needed`: from how many on, because
    torch does more than the kernel."""
    return multiplications > THREAD_WORK and torch.get_num_threads() >= needed


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether there is a numba, and one that the kernels know. Without it torch computes."""
    try:
        for module in ("numba_kernel", "numba_lanes"):
            import_module(f"deltaserve.ops.{module}")
    except ImportError as error:
        logger.warning("no kernels for the CPU, torch computes: %s", error)
        return False
    return True


@cache
def kernels(module: str) -> Any:
    """One of MODULES; its kernels are compiled at the first call, unless an earlier process has left them on the disk.

    A look-up, where an import that has nothing to do would take as long as a kernel's call.
    """
    return import_module(f"deltaserve.ops.{module}")


def prepare() -> None:
    """Loads all kernels, so that no request waits for one to be compiled."""
    if not is_available():
        return
    begin = time.perf_counter()
    for module in MODULES:
        kernels(module)
    logger.info("kernels for the CPU are ready after %.1f s", time.perf_counter() - begin)
