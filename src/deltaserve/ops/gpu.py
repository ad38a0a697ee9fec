"""Which tensors the Triton kernels compute, and what their device offers. Knows no op.

Tile shapes come from these properties and from tables beside the kernels, never from trials: after the warm-up no
kernel compiles and none is tuned.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Properties:
    """Of one GPU."""

    num_sms: int
    """Multiprocessors (compute units on AMD)."""
    shared_bytes: int
    """Shared memory that one program may use."""
    has_fp8: bool
    """Whether matrix units take e4m3 operands as they are (compute capability 8.9, CDNA 3 takes another e4m3)."""
    is_hopper: bool
    """Compute capability 9.0: asynchronous matrix products over 4 warps."""


def has_kernels(x: Tensor) -> bool:
    """Whether kernels compute on this tensor: it is on a GPU, and its dtype is one that they know."""
    return x.is_cuda and x.dtype != torch.float64


@lru_cache(maxsize=16)
def properties(device: torch.device) -> Properties:
    """Of the device; a small one that exists nowhere for the CPU, where kernels run interpreted in tests."""
    if device.type != "cuda":
        return Properties(num_sms=4, shared_bytes=96 << 10, has_fp8=False, is_hopper=False)
    found = torch.cuda.get_device_properties(device)
    on_amd = torch.version.hip is not None
    capability = (0, 0) if on_amd else (found.major, found.minor)
    shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
    return Properties(
        num_sms=found.multi_processor_count,
        shared_bytes=int(shared),
        has_fp8=capability >= (8, 9),
        is_hopper=capability[0] == 9,
    )


@contextmanager
def compiling_only(num_threads: int) -> Iterator[None]:
    """Inside, a kernel that is called is compiled, in parallel with others, and not launched.

    On leaving all are ready. What a call would have written stays as it was, so outputs hold anything: nothing inside
    may use them as indices.
    """
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = compile_one
        try:
            yield
        finally:
            JITFunction.run = launch
