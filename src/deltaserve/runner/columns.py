"""The numbers of a step at fixed places: filled on the host, sent in one copy, read on the device by graphs.

Shape letters: B rows, T tokens; both are the most that there may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.ops.layout import BLOCK
from deltaserve.runner.inputs import Numbers, Seats

COPIES = 4
"""Host buffers taken in turn: of two steps in flight none waits for the copy of an older one."""
NOBODY = -1


@dataclass(frozen=True)
class Columns:
    """
    Name         Shape   Dtype   Meaning, and what padding gets
    seat         [B]     int64   each row's seat; the one behind the last, which no request has
    read_slot    [B]     int64   as the layout's; -1
    last         [B]     int64   the last token of each row that samples; 0
    token        [T]     int64   token ids; 0
    position     [T]     int64   as the layout's; 0, 1, 2 ...
    write_slot   [T]     int64   as the layout's; -1
    kv_index     [T]     int64   as the layout's; -1
    num_open     [B]     int64   by how much a row may start later; 0
    later_slot   [B, O]  int64   read slots: if the row starts where it says, one later ...; -1
    context_len  [B]     int32   as the layout's; 0
    bounds       [B+1]   int32   first token of each row

    O is the most tokens of a row that extends.
    """

    buffer: Tensor
    seat: Tensor
    read_slot: Tensor
    last: Tensor
    token: Tensor
    position: Tensor
    write_slot: Tensor
    kv_index: Tensor
    num_open: Tensor
    later_slot: Tensor
    context_len: Tensor
    bounds: Tensor

    @classmethod
    def make(cls, rows: int, tokens: int, longest: int, device: torch.device | str, pinned: bool = False) -> Columns:
        sizes = [*[rows] * 3, *[tokens] * 4, rows, rows * longest, -(-rows // 2), -(-(rows + 1) // 2)]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        *wide, num_open, later_slot, context_len, bounds = buffer.split_with_sizes(sizes)
        seat, read_slot, last, token, position, write_slot, kv_index = wide
        narrow = (context_len.view(torch.int32), bounds.view(torch.int32))
        later_slot = later_slot.view(rows, longest)
        return cls(
            *(buffer, seat, read_slot, last, token, position, write_slot, kv_index, num_open, later_slot), *narrow
        )


class Feed:
    """Columns on the device, and host copies of them that are filled in turn."""

    def __init__(self, seats: Seats, rows: int, tokens: int, longest: int, device: torch.device) -> None:
        self._seats = seats
        self.columns = Columns.make(rows, tokens, longest, device)
        self._host = [Columns.make(rows, tokens, longest, "cpu", pinned=device.type != "cpu") for _ in range(COPIES)]
        self._copied = [None if device.type == "cpu" else torch.Event(device) for _ in range(COPIES)]
        self._turn = 0

    def send(self, numbers: Numbers, rows: int, tokens: int) -> None:
        """A step's numbers, padded to so many rows and tokens: rows of padding share its tokens equally."""
        seats, own, spare = self._seats, int(numbers.row_starts[-1]), rows - len(numbers.counts)
        seat_T = np.repeat(numbers.seats, numbers.counts)
        position = np.arange(own) + np.repeat(numbers.starts - numbers.row_starts[:-1], numbers.counts)
        index = seats.block_table[seat_T, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
        assert own == 0 or int(index.min()) >= 0, "a token has no KV block"
        host, copied = self._host[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        self._turn = (self._turn + 1) % COPIES
        _set(host.seat, numbers.seats, rows, len(seats.num_blocks))
        _set(host.read_slot, numbers.read_slot, rows, NOBODY)
        _set(host.token, seats.token_ids[seat_T, position], tokens, 0)
        _set(host.position, position, tokens, np.arange(tokens - own) % seats.max_len)
        _set(host.write_slot, numbers.write_slot, tokens, NOBODY)
        _set(host.kv_index, index, tokens, NOBODY)
        _set(host.context_len, numbers.ends, rows, 0)
        _set(host.bounds, numbers.row_starts, rows + 1, own + (tokens - own) * np.arange(1, spare + 1) // max(spare, 1))
        _set(host.num_open, numbers.num_open, len(host.num_open), 0)
        if numbers.most_open:
            later_slot = host.later_slot.numpy()
            later_slot[:] = NOBODY
            later_slot[: len(numbers.seats), 0] = numbers.read_slot
            later_slot[: len(numbers.seats), 1 : 1 + numbers.most_open] = numbers.later_slot
        _set(host.last, numbers.row_starts[1:][numbers.sampling] - 1, rows, 0)
        self.columns.buffer.copy_(host.buffer, non_blocking=True)
        if copied is not None:
            copied.record()


def _set(column: Tensor, values: npt.NDArray[np.int64], size: int, padding: int | npt.NDArray[np.int64]) -> None:
    array = column.numpy()
    array[: len(values)] = values
    array[len(values) : size] = padding
