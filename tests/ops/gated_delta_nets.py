"""Gated delta nets under test: random inputs as parts of one projection, poisoned pools, and float64 to compare with.

Memory around every pool is watched: it may not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltaserve.ops.gated_delta import api
from deltaserve.ops.layout import BLOCK, Layout

PAGE = 4096
"""Elements watched on either side of a pool."""


@dataclass(frozen=True)
class Shape:
    k_heads: int = 1
    ratio: int = 2
    k_dim: int = 16
    v_dim: int = 16

    @property
    def v_heads(self) -> int:
        return self.k_heads * self.ratio

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass
class Rows:
    """What a step does: see `Layout.from_rows`."""

    lengths: Sequence[int]
    num_step: int
    starts: Sequence[int]
    read: Sequence[int]
    write: list[list[int]]

    def layout(self, device: torch.device | str) -> Layout:
        return Layout.from_rows(
            self.lengths,
            num_step=self.num_step,
            starts=self.starts,
            read_slots=self.read,
            write_slots=self.write,
            device=device,
        )

    @property
    def written(self) -> list[int]:
        return [slot for slots in self.write for slot in slots if slot >= 0]

    @property
    def num_slots(self) -> int:
        return max([0, *self.read, *self.written]) + 2


def chunk_rows(
    lengths: Sequence[int], starts: Sequence[int], *, in_place: bool = True, keeps_blocks: bool = True
) -> Rows:
    """Rows of a prompt: resumed where they start above 0, kept at their ends and at the ends of blocks inside them."""
    slot = iter(range(1, 10_000))
    read = [next(slot) if start else -1 for start in starts]
    write = []
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        ends = [(start + t) % BLOCK == BLOCK - 1 and keeps_blocks for t in range(length)]
        slots = [next(slot) if is_end else -1 for is_end in ends]
        slots[-1] = read[row] if in_place and read[row] >= 0 else next(slot)
        write.append(slots)
    return Rows(lengths, 0, starts, read, write)


def step_rows(rows: int, length: int, *, padding: Sequence[int] = (), fresh: Sequence[int] = ()) -> Rows:
    """Rows that keep the state after every token, the last in place; `padding` rows read and write nothing."""
    slot = iter(range(1, 10_000))
    read = [-1 if row in (*padding, *fresh) else next(slot) for row in range(rows)]
    write = []
    for row in range(rows):
        slots = [-1 if row in padding else next(slot) for _ in range(length)]
        if read[row] >= 0:
            slots[-1] = read[row]
        write.append(slots)
    return Rows([length] * rows, rows, [0 if slot < 0 else 5 for slot in read], read, write)


def with_rows_behind(layout: Layout, count: int) -> Layout:
    """The layout and so many rows of padding without a token."""
    [segment] = layout.segments
    cu_seqlens = torch.cat([segment.cu_seqlens, segment.cu_seqlens[-1:].repeat(count)])
    read_slot = torch.cat([layout.read_slot, torch.full_like(layout.read_slot[:1], -1).repeat(count)])
    longer = replace(segment, row_end=segment.row_end + count, cu_seqlens=cu_seqlens)
    return replace(layout, segments=(longer,), read_slot=read_slot, memo={})


@dataclass
class Net:
    shape: Shape
    rows: Rows
    projected: Tensor
    """[T, C + Hv * V + 2 * Hv]: mixed, z, b and a are its parts."""
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    conv_memory: Tensor
    state_memory: Tensor

    @staticmethod
    def random(
        shape: Shape, rows: Rows, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Net:
        tokens, values = sum(rows.lengths), shape.v_heads * shape.v_dim
        width = shape.channels + values + 2 * shape.v_heads
        window, state = 3 * shape.channels, shape.v_heads * shape.k_dim * shape.v_dim
        # Extra columns: rows have a stride of their own.
        projected = torch.randn(tokens, width + 16, device=device).to(dtype)[:, :width]
        # Queries and keys lean to one side: the norm of a fresh row's first output, which is q.k times a value, would
        # magnify the rounding of a product near zero.
        projected[:, : 2 * shape.k_heads * shape.k_dim] += 0.5
        conv_weight = (torch.randn(4, shape.channels, device=device) / 2).to(dtype).t()
        conv_weight[: 2 * shape.k_heads * shape.k_dim].abs_()
        memories = []
        for size, kind in ((window, dtype), (state, state_dtype)):
            memory = torch.full((2 * PAGE + rows.num_slots * size,), torch.nan, dtype=kind, device=device)
            pool = memory[PAGE:-PAGE].view(rows.num_slots, size)
            for slot in rows.read:
                if slot >= 0:
                    pool[slot] = torch.randn(size, device=device).to(kind) * (1.0 if kind is dtype else 0.1)
            memories.append(memory)
        return Net(
            shape,
            rows,
            projected,
            conv_weight,
            torch.randn(shape.v_heads, device=device),
            torch.randn(shape.v_heads, device=device) - 2,
            1 + torch.randn(shape.v_dim, device=device) / 10,
            *memories,
        )

    @property
    def conv_pool(self) -> Tensor:
        return self.conv_memory[PAGE:-PAGE].view(-1, 3, self.shape.channels)

    @property
    def state_pool(self) -> Tensor:
        return self.state_memory[PAGE:-PAGE].view(-1, self.shape.v_heads, self.shape.k_dim, self.shape.v_dim)

    def arguments(self) -> dict[str, Any]:
        """Of the facade."""
        widths = [self.shape.channels, self.shape.v_heads * self.shape.v_dim, self.shape.v_heads, self.shape.v_heads]
        parts = self.projected.split_with_sizes(widths, dim=-1)
        return {
            **dict(zip(("mixed_TC", "z_TX", "b_TV", "a_TV"), parts, strict=True)),
            "conv_weight_CW": self.conv_weight,
            "A_log_V": self.A_log,
            "dt_bias_V": self.dt_bias,
            "norm_weight_D": self.norm_weight,
            "eps": 1e-6,
            "conv_pool_SWC": self.conv_pool,
            "state_pool_SVKD": self.state_pool,
            "layout": self.rows.layout(self.projected.device),
        }

    def copy(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Net:
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        made = {name: part.to(device, dtype or part.dtype, copy=True) for name, part in tensors.items()}
        made["conv_weight"] = made["conv_weight"].t().contiguous().t()
        return Net(self.shape, self.rows, **made)

    def run(self) -> Tensor:
        """By the facade."""
        return api.gated_delta_net(**self.arguments())[0]

    def run_kernels(self) -> Tensor:
        """By the kernels, wherever the tensors are."""
        return api._by_kernels(**self.arguments())[0]


def relative(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to the expected."""
    expected = expected.double()
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected).norm() / expected.norm())


def check(net: Net, actual: Tensor, before: Net, tolerance: float, state_tolerance: float) -> None:
    """Outputs and kept states against float64 from the same inputs; all else of the pools bit for bit as before.

    `net` has been run and `before` is a copy from before it was.
    """
    exact = before.copy(before.projected.device, torch.float64)
    with torch.inference_mode():
        expected = exact.run()
    first = 0
    for row, length in enumerate(net.rows.lengths):
        part = slice(first, first + length)
        assert torch.isfinite(actual[part]).all()
        if net.rows.read[row] >= 0 or any(slot >= 0 for slot in net.rows.write[row]):  # else it is padding
            assert relative(actual[part], expected[part]) <= tolerance, f"row {row}"
        first += length
    for slot in net.rows.written:
        assert torch.equal(net.conv_pool[slot].double(), exact.conv_pool[slot]), f"window {slot}"
        assert relative(net.state_pool[slot], exact.state_pool[slot]) <= state_tolerance, f"state {slot}"
    for now, then in ((net.conv_memory, before.conv_memory), (net.state_memory, before.state_memory)):
        for memory in (now, then):
            memory[PAGE:-PAGE].view(net.rows.num_slots, -1)[net.rows.written] = 0
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
