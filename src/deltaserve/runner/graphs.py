"""Steps of fixed shapes: recorded once as CUDA graphs, replayed whenever a step fits one.

Two kinds. *Decode*: rows that only extend, all by as many tokens. *Prompt*: rows of prompts of any lengths, whose
launches would keep the host busier than the device. What a step leaves over of the graph's rows and tokens is
*padding*: it reads the zero state, has no context, writes nothing, and sits in a seat that no request has. What changes
from step to step stands in tensors at fixed places.

On a CPU nothing is recorded and the same lines run each time. Knows no sampling and no queue.

Shape letters: S seats, T tokens, D hidden width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deltaserve.core.plan import Plan
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import Layout, Segment
from deltaserve.ops.places.api import begin_rows, carry_hidden
from deltaserve.runner.columns import Columns, Feed
from deltaserve.runner.inputs import Batch, Numbers, Seats
from deltaserve.runner.memory import Pools
from deltaserve.runner.model import Model
from deltaserve.runner.staging import Ints, to_device

Kept = TypeVar("Kept")

PROMPT_TOKENS = (
    *(32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
)
"""Prompts of together as many tokens as each of these share a graph. Up to 64, products stream weights
(ops/linear/gpu.py); above, a graph's tokens fill the tiles of 128 that the vendor's products have: one token more would
be a row of tiles more. Beyond the last, steps keep the device busy for longer than their launches take."""
MAX_PROMPTS = 16
"""Rows of a prompt graph that are not padding, at most."""


def row_counts(most: int) -> list[int]:
    """The rows of the decode graphs: every count up to 8, then in steps of an eighth to a quarter, up to `most`."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count += max(1, 1 << max(0, count.bit_length() - 3))
    return [*counts, most]


@dataclass(frozen=True)
class Shape:
    """Of a graph."""

    rows: int
    tokens: int
    is_decode: bool
    """Else the rows are prompts; of which at least one is padding, with or without tokens."""

    @property
    def length(self) -> int:
        """Of the longest row."""
        return self.tokens // self.rows if self.is_decode else self.tokens


class StepGraphs:
    """Owns the tensors that graphs read, and the block tables of the seats on the device."""

    def __init__(
        self,
        model: Model,
        pools: Pools,
        seats: Seats,
        recent: Tensor,
        gained: Tensor,
        *,
        lengths: Sequence[int],
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """
        recent: [S + 1, 1 + guesses] int64, each seat's newest token and the guesses behind it.
        gained: [S + 1] int64, tokens that each seat got in the newest step beyond the first.
        lengths: tokens a row, of the decode graphs.
        max_tokens: of a step.
        """
        num_seats, num_blocks = seats.block_table.shape
        self.model, self.pools, self.seats = model, pools, seats
        self._recent, self._gained = recent, gained
        self.device = recent.device
        self.rows, self.lengths = row_counts(num_seats), tuple(lengths)
        longest = min(max_tokens, PROMPT_TOKENS[-1])  # whatever a step holds up to there fits
        self.prompts = sorted({longest, *(size for size in PROMPT_TOKENS if size < longest)})
        self.prompt_rows = min(num_seats, MAX_PROMPTS) + 1
        most = max(num_seats * max(lengths), *self.prompts, 1)
        self.block_table = torch.full((num_seats + 1, num_blocks), -1, dtype=torch.int32, device=self.device)
        most_rows = max(num_seats, self.prompt_rows)
        # One for each kind: a step sends the whole of it, and the rows of decoding are few numbers.
        decode = Feed(seats, num_seats, num_seats * max(lengths), max(lengths), self.device)
        self._feeds = {True: decode, False: Feed(seats, self.prompt_rows, self.prompts[-1], 1, self.device)}
        self._later = torch.zeros(num_seats, dtype=torch.int64, device=self.device)
        """[S] int64: by how much the last step's rows start later than was said."""
        self.hidden = torch.zeros(most, hidden_size, dtype=dtype, device=self.device)
        """[T, D]: of the last step's tokens."""
        before = most_rows if pools.hidden else 0
        self._before = torch.zeros(before, hidden_size, dtype=dtype, device=self.device)
        self._replay: dict[Shape, Callable[[], ForwardContext]] = {}
        self.memory: Any = None
        """Which all graphs share."""

    @property
    def columns(self) -> Columns:
        """The numbers of the last step of decoding, on the device."""
        return self._feeds[True].columns

    @property
    def shapes(self) -> list[Shape]:
        """Of every graph, the largest first: the smaller ones use its memory again."""
        decode = [Shape(rows, rows * length, True) for length in self.lengths for rows in self.rows]
        prompts = [Shape(self.prompt_rows, size, False) for size in self.prompts]
        return sorted(decode + prompts, key=lambda shape: -shape.tokens)

    @torch.inference_mode()
    def record(self, progress: bool = True) -> None:
        """Record all graphs."""
        for shape in tqdm(self.shapes, desc="Recording graphs", disable=not progress):
            self.show_nothing(shape)
            self._replay[shape] = recorded(partial(self._forward, shape), self, partial(self._rehearse, shape))

    def show_nothing(self, shape: Shape) -> None:
        """The numbers of a step that is all padding."""
        self._feeds[shape.is_decode].send(_nothing(), shape.rows, shape.tokens)

    def run(self, numbers: Numbers) -> tuple[Batch, Tensor] | None:
        """The step and the hidden states [T, D] of its tokens, which stand until the next call; None where no graph
        fits."""
        shape = self._shape_of(numbers)
        if shape is None:
            return None
        self._copy_blocks(numbers.seats)
        feed = self._feeds[shape.is_decode]
        feed.send(numbers, shape.rows, shape.tokens)
        context = self._replay[shape]()
        later = self._later[: len(numbers.counts)] if numbers.most_open else None
        tokens, columns = int(numbers.row_starts[-1]), feed.columns
        last = None if shape.is_decode else columns.last[: len(numbers.sampling)]
        rows = shape.rows if shape.is_decode else None
        before = self._before[: len(numbers.counts)] if self.pools.hidden else None
        batch = Batch(numbers, columns.token[:tokens], context, last, before, rows, later)
        return batch, self.hidden[:tokens]

    def _shape_of(self, numbers: Numbers) -> Shape | None:
        count, length, tokens = len(numbers.counts), int(numbers.counts[0]), int(numbers.row_starts[-1])
        if numbers.num_decode == 0 and count < self.prompt_rows and self.prompts and tokens <= self.prompts[-1]:
            return Shape(self.prompt_rows, self.prompts[bisect_left(self.prompts, tokens)], False)
        is_alike = numbers.num_decode == count and bool((numbers.counts == length).all())
        if not is_alike or length not in self.lengths:
            return None
        rows = self.rows[bisect_left(self.rows, count)]
        return Shape(rows, rows * length, True)

    def _rehearse(self, shape: Shape) -> None:
        with self.model.shortened():
            self._forward(shape)

    def _forward(self, shape: Shape) -> ForwardContext:
        context = self._context(shape)
        hidden_TD = self.hidden[: shape.tokens]
        hidden_TD.copy_(self.model(self._feeds[shape.is_decode].columns.token[: shape.tokens], context))
        if self.pools.hidden:
            [hidden_SD], layout = self.pools.hidden, context.layout
            slots = (layout.read_slot, layout.write_slot)
            carry_hidden(hidden_SD, *slots, hidden_TD, self._before[: shape.rows], shape.is_decode)
        return context

    def _context(self, shape: Shape) -> ForwardContext:
        columns, rows, tokens = self._feeds[shape.is_decode].columns, shape.rows, shape.tokens
        bounds = columns.bounds[: rows + 1]
        if shape.is_decode:
            table_BN = self._begin(rows, tokens)
        else:
            table_BN = self.block_table.index_select(0, columns.seat[:rows])
        layout = Layout(
            segments=(Segment(shape.is_decode, 0, rows, 0, tokens, shape.length, bounds),),
            read_slot=columns.read_slot[:rows],
            write_slot=columns.write_slot[:tokens],
            position=columns.position[:tokens],
            block_table=table_BN,
            kv_index=columns.kv_index[:tokens],
            context_len=columns.context_len[:rows],
            # Tokens of a prompt's padding differ. Those of decoding rows' are alike, and choose experts alike.
            is_padded=not shape.is_decode,
        )
        return ForwardContext(layout=layout, kv=self.pools.kv, conv=self.pools.conv, state=self.pools.state)

    def _begin(self, rows: int, tokens: int) -> Tensor:
        """What the host could not know of extending rows; their blocks [B, N]."""
        columns = self.columns
        return begin_rows(
            *(columns.seat[:rows], self._recent, self._gained, self.block_table),
            *(columns.num_open[:rows], columns.later_slot[:rows], columns.token[:tokens], columns.position[:tokens]),
            *(columns.kv_index[:tokens], columns.context_len[:rows], columns.read_slot[:rows], self._later[:rows]),
        )

    def _copy_blocks(self, seat_B: Ints) -> None:
        """Blocks that rows got since the device's table was last written. The first ones of a request replace all that
        its seat had: an entry that is made behind the row's own blocks must not be one in somebody else's."""
        seats = self.seats
        new_M = seat_B[(seats.num_copied[seat_B] == 0) & (seats.num_blocks[seat_B] > 0)]
        if len(new_M):  # whole rows: they end in -1
            index_M, row_MN = to_device(self.device, new_M, seats.block_table[new_M])
            self.block_table.index_copy_(0, index_M, row_MN)
            seats.num_copied[new_M] = seats.num_blocks[new_M]
        behind = seats.num_blocks[seat_B] - seats.num_copied[seat_B]
        if not behind.any():
            return
        seat_N = np.repeat(seat_B, behind)
        first_N = np.repeat(seats.num_copied[seat_B] - (behind.cumsum() - behind), behind)
        place_N = np.arange(len(seat_N)) + first_N
        flat_N, block_N = to_device(
            self.device, seat_N * seats.block_table.shape[1] + place_N, seats.block_table[seat_N, place_N]
        )
        self.block_table.view(-1).index_copy_(0, flat_N, block_N)
        seats.num_copied[seat_B] = seats.num_blocks[seat_B]


def _nothing() -> Numbers:
    return Numbers.of(Plan(step=-1, rows=[], num_decode=0))


def recorded(
    run: Callable[[], Kept], steps: StepGraphs, rehearse: Callable[[], object] | None = None
) -> Callable[[], Kept]:
    """What does over again what `run` does, with the same tensors, and returns what that returned; in the memory that
    all graphs of `steps` share. On a CPU it is `run` itself.

    rehearse: does all that `run` does for the first time, in less time.
    """
    if steps.device.type == "cpu":
        return run
    (rehearse or run)()  # whatever a first call sets up must not be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=steps.memory):
        kept = run()
    steps.memory = graph.pool()
    return partial(_replay, graph, kept)


def _replay(graph: torch.cuda.CUDAGraph, kept: Kept) -> Kept:
    graph.replay()
    return kept
