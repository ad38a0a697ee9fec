"""Causal depthwise convolution with SiLU. Knows the window it keeps per sequence, not what the channels mean.

Shape letters: T tokens of the step, C channels, W taps, S slots of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.conv import reference
from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.layout import Layout


def causal_conv(x_TC: Tensor, weight_CW: Tensor, pool_SWC: Tensor, layout: Layout) -> Tensor:
    """`silu(sum_j weight[:, j] * x[t - W + 1 + j])` along each row, with the window before it read from the pool.

    Name       Shape           Dtype       Meaning
    x          [T, C]          any float   rows one after the other, without padding
    weight     [C, W]          any float   oldest tap first; W >= 2. Fastest as the transpose of a [W, C] tensor
    pool       [S, W - 1, C]   as x        a slot holds the last W - 1 inputs, oldest first. Read at layout.read_slot
                                           (-1: zeros). Written at layout.write_slot after each token (-1: not kept);
                                           nothing else of it changes
    returns    [T, C]          as x        computed in fp32 (fp64 for fp64 input)

    All reads of a row come before its writes: the same slot may be both. A slot that one row writes is read and
    written by no other row of the step.
    """
    channels, taps = weight_CW.shape
    assert x_TC.shape == (layout.write_slot.shape[0], channels), (
        f"conv: input {tuple(x_TC.shape)}, expected [{layout.write_slot.shape[0]} tokens, {channels} channels]"
    )
    assert pool_SWC.shape[1:] == (taps - 1, channels), (
        f"conv: pool {tuple(pool_SWC.shape)} does not hold windows of {taps - 1} x {channels}"
    )
    assert taps >= 2, f"conv: {taps} tap leaves no window to keep"
    assert pool_SWC.dtype == x_TC.dtype, f"conv: pool is {pool_SWC.dtype}, input {x_TC.dtype}"
    if has_kernels(x_TC) and taps <= 4:
        from deltaserve.ops.conv import triton_conv

        parts = [triton_conv.conv(x_TC, weight_CW, pool_SWC, layout, segment) for segment in layout.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    parts = [
        (reference.step if segment.is_step else reference.chunk)(x_TC, weight_CW, pool_SWC, layout, segment)
        for segment in layout.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
