"""Layers with random weights, and contexts for rows that start from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout

CPU = torch.device("cpu")
F64 = torch.float64

Layer = TypeVar("Layer", bound=nn.Module)


def filled(layer: Layer) -> Layer:
    """The layer with every weight drawn at random."""
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, dtype=F64) / max(1, parameter.shape[-1]) ** 0.5)
    return layer


def context(
    lengths: Sequence[int],
    kv: Sequence[Tensor] = (),
    conv: Sequence[Tensor] = (),
    state: Sequence[Tensor] = (),
    starts: Sequence[int] | None = None,
) -> ForwardContext:
    """Row r owns slot r and the blocks r, r + rows, ...; it reads its slot where it starts above 0."""
    starts = [0] * len(lengths) if starts is None else starts
    rows = range(len(lengths))
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    layout = Layout.from_rows(
        lengths,
        starts=starts,
        read_slots=[row if starts[row] else -1 for row in rows],
        write_slots=[[-1] * (lengths[row] - 1) + [row] for row in rows],
        blocks=[[row + number * len(rows) for number in range(-(-ends[row] // BLOCK))] for row in rows],
    )
    return ForwardContext(layout=layout, kv=kv, conv=conv, state=state)
