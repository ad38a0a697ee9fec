"""What the layers of one step share beside the tokens: where each row keeps its memory. Made anew for every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deltaserve.ops.layout import Layout


@dataclass(frozen=True)
class ForwardContext:
    """
    Name      Shape                              Meaning
    layout    -                                  rows, slots and blocks of the step
    kv        [2, num_blocks, 64, G, D] each     keys and values; one pool per full-attention layer, in order
    conv      [S, W - 1, C] each                 convolution windows; one pool per GDN layer, in order
    state     [S, Hv, K, V] each                 recurrent matrices; one pool per GDN layer, in order
    """

    layout: Layout
    kv: Sequence[Tensor]
    conv: Sequence[Tensor]
    state: Sequence[Tensor]
