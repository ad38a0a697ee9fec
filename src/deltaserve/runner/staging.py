"""Numbers of the host on their way to a device. Knows no meaning of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


def to_device(device: torch.device, *arrays: npt.NDArray[np.int32] | Ints) -> list[Tensor]:
    """The arrays as tensors: on a CPU the same memory, elsewhere one pinned buffer and one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    size = sum(array.nbytes + -array.nbytes % 8 for array in arrays)
    return _unpack(_staging(device).send(lambda buffer: _pack(buffer, arrays), size), arrays)


class Staging:
    """Pinned buffers on their way to one device. A buffer is filled again once its last copy is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, torch.Event]] = []

    def send(self, fill: Callable[[npt.NDArray[np.uint8]], None], size: int) -> Tensor:
        """uint8 [size] on the device, as `fill` wrote it."""
        for number, (buffer, copied) in enumerate(self._buffers):
            if len(buffer) >= size and copied.query():
                self._buffers.append(self._buffers.pop(number))  # the next call looks at those that are longest over
                break
        else:
            buffer = torch.empty(1 << max(16, size.bit_length()), dtype=torch.uint8, pin_memory=True)
            copied = torch.Event(self._device)
            self._buffers.append((buffer, copied))
        fill(buffer.numpy())
        sent = buffer[:size].to(self._device, non_blocking=True)
        copied.record()
        return sent


@lru_cache(maxsize=16)
def _staging(device: torch.device) -> Staging:
    return Staging(device)


def _pack(buffer: npt.NDArray[np.uint8], arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> None:
    """Each array starts at a multiple of 8."""
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += array.nbytes + -array.nbytes % 8


def _unpack(buffer: Tensor, arrays: Sequence[npt.NDArray[np.int32] | Ints]) -> list[Tensor]:
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        tensors.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += array.nbytes + -array.nbytes % 8
    return tensors
