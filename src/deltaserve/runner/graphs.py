"""Steps of fixed shapes: recorded once as CUDA graphs, replayed whenever rows only extend.

A graph has a number of rows and of tokens a row. A step takes the smallest that holds it; the rows that are left over
are *padding*: they read the zero state, have no context, write nothing, and sit in a seat that no request has. What
changes from step to step stands in tensors at fixed places: one copy from the host fills them.

On a CPU nothing is recorded and the same lines run each time. Knows no sampling and no queue.

Shape letters: S seats, M most rows, L tokens a row, D hidden width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout, Segment
from deltaserve.runner.inputs import Batch, Numbers, Seats, to_device
from deltaserve.runner.memory import Pools
from deltaserve.runner.model import Model

COPIES = 4
"""Host buffers taken in turn: at most two steps are in flight, so one is rewritten only after its copy is over."""


def row_counts(most: int) -> list[int]:
    """The rows of the graphs: every count up to 4, then in steps of an eighth to a quarter, up to `most`."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count += max(1, 1 << max(0, count.bit_length() - 3))
    return [*counts, most]


@dataclass(frozen=True)
class Columns:
    """The numbers of a step, in one buffer: on the host to be filled, on the device to be read by a graph."""

    buffer: Tensor
    seat: Tensor
    """[M] int64"""
    read_slot: Tensor
    """[M] int64"""
    token: Tensor
    """[M * L] int64"""
    position: Tensor
    """[M * L] int64"""
    write_slot: Tensor
    """[M * L] int64"""
    kv_index: Tensor
    """[M * L] int64"""
    context_len: Tensor
    """[M] int32"""

    @classmethod
    def make(cls, rows: int, length: int, device: torch.device | str, pinned: bool = False) -> Columns:
        tokens = rows * length
        sizes = [rows, rows, tokens, tokens, tokens, tokens, -(-rows // 2)]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        seat, read_slot, token, position, write_slot, kv_index, context = buffer.split_with_sizes(sizes)
        return cls(buffer, seat, read_slot, token, position, write_slot, kv_index, context.view(torch.int32))


class StepGraphs:
    """Owns the tensors that graphs read, and two tables of the device with one row per seat."""

    def __init__(
        self, model: Model, pools: Pools, seats: Seats, lengths: Sequence[int], hidden_size: int, dtype: torch.dtype
    ) -> None:
        """`lengths`: tokens a row, of the graphs that there will be."""
        device = pools.kv[0].device
        num_seats, num_blocks = seats.block_table.shape
        self._model, self._pools, self._seats, self._device = model, pools, seats, device
        self.rows, self.lengths = row_counts(num_seats), tuple(lengths)
        self.last_token = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        """Each seat's newest token; the last row is that of padding."""
        self._block_table = torch.full((num_seats + 1, num_blocks), -1, dtype=torch.int32, device=device)
        longest, on_gpu = max(lengths), device.type != "cpu"
        self._columns = Columns.make(num_seats, longest, device)
        self._host = [Columns.make(num_seats, longest, "cpu", pinned=on_gpu) for _ in range(COPIES)]
        self._turn = 0
        self._bounds = {n: torch.arange(num_seats + 1, dtype=torch.int32, device=device) * n for n in lengths}
        self._hidden = torch.zeros(num_seats * longest, hidden_size, dtype=dtype, device=device)
        self._replay: dict[tuple[int, int], Callable[[], ForwardContext]] = {}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens a row) of every graph, the largest first: the smaller ones use its memory again."""
        return [(rows, length) for length in sorted(self.lengths, reverse=True) for rows in reversed(self.rows)]

    @torch.inference_mode()
    def record(self, progress: bool = True) -> None:
        """Record all graphs."""
        pool = None
        for rows, length in tqdm(self.shapes, desc="Recording graphs", disable=not progress):
            self._fill(self._nobody(), rows, length)
            if self._device.type == "cpu":
                self._replay[rows, length] = partial(self._forward, rows, length)
                continue
            self._forward(rows, length)  # whatever a first call sets up must not be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                context = self._forward(rows, length)
            pool = graph.pool()
            self._replay[rows, length] = partial(_replay, graph, context)

    def run(self, numbers: Numbers) -> tuple[Batch, Tensor] | None:
        """The step and the hidden states [T, D] of its tokens, which stand until the next call; None where no graph
        fits: some row does not extend, or rows differ in length."""
        length = int(numbers.counts[0])
        is_alike = numbers.num_decode == len(numbers.counts) and bool((numbers.counts == length).all())
        if not is_alike or length not in self.lengths:
            return None
        rows = self.rows[bisect_left(self.rows, len(numbers.counts))]
        self._copy_blocks(numbers.seats)
        self._fill(numbers, rows, length)
        context = self._replay[rows, length]()
        tokens = len(numbers.counts) * length
        batch = Batch(numbers, self._columns.token[:tokens], context, last=None, scored=[])
        return batch, self._hidden[:tokens]

    def _forward(self, rows: int, length: int) -> ForwardContext:
        columns, context = self._columns, self._context(rows, length)
        token_ids = columns.token[: rows * length]
        if length == 1:
            token_ids = self.last_token.index_select(0, columns.seat[:rows])
        self._hidden[: rows * length].copy_(self._model(token_ids, context))
        return context

    def _context(self, rows: int, length: int) -> ForwardContext:
        columns, tokens = self._columns, rows * length
        layout = Layout(
            segments=(Segment(True, 0, rows, 0, tokens, length, self._bounds[length][: rows + 1]),),
            read_slot=columns.read_slot[:rows],
            write_slot=columns.write_slot[:tokens],
            position=columns.position[:tokens],
            block_table=self._block_table.index_select(0, columns.seat[:rows]),
            kv_index=columns.kv_index[:tokens],
            context_len=columns.context_len[:rows],
        )
        return ForwardContext(layout=layout, kv=self._pools.kv, conv=self._pools.conv, state=self._pools.state)

    def _fill(self, numbers: Numbers, rows: int, length: int) -> None:
        """Numbers of the step, then those of padding, into the columns."""
        seats, count, tokens = self._seats, len(numbers.seats), rows * length
        position = (numbers.starts[:, None] + np.arange(length)).ravel()
        seat_T = np.repeat(numbers.seats, length)
        index = seats.block_table[seat_T, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % COPIES
        self._set(host.seat, numbers.seats, rows, len(seats.num_blocks))
        self._set(host.read_slot, numbers.read_slot, rows, -1)
        self._set(host.token, seats.token_ids[seat_T, position], tokens, 0)
        self._set(host.position, position, tokens, 0)
        self._set(host.write_slot, numbers.write_slot, tokens, -1)
        self._set(host.kv_index, index, tokens, -1)
        self._set(host.context_len, numbers.starts + length, rows, 0)
        assert count == 0 or int(index.min()) >= 0, "a token has no KV block"
        self._columns.buffer.copy_(host.buffer, non_blocking=True)

    @staticmethod
    def _set(column: Tensor, values: npt.NDArray[np.int64], size: int, padding: int) -> None:
        array = column.numpy()
        array[: len(values)] = values
        array[len(values) : size] = padding

    def _copy_blocks(self, seat_B: npt.NDArray[np.int64]) -> None:
        """Blocks that rows got since the device's table was last written."""
        seats = self._seats
        behind = seats.num_blocks[seat_B] - seats.num_copied[seat_B]
        if not behind.any():
            return
        seat_N = np.repeat(seat_B, behind)
        first_N = np.repeat(seats.num_copied[seat_B] - (behind.cumsum() - behind), behind)
        place_N = np.arange(len(seat_N)) + first_N
        flat_N, block_N = to_device(
            self._device, seat_N * seats.block_table.shape[1] + place_N, seats.block_table[seat_N, place_N]
        )
        self._block_table.view(-1).index_copy_(0, flat_N, block_N)
        seats.num_copied[seat_B] = seats.num_blocks[seat_B]

    @staticmethod
    def _nobody() -> Numbers:
        none = np.zeros(0, dtype=np.int64)
        return Numbers(none, none, none, none, none, none, np.zeros(1, dtype=np.int64), none, 0)


def _replay(graph: torch.cuda.CUDAGraph, context: ForwardContext) -> ForwardContext:
    graph.replay()
    return context
