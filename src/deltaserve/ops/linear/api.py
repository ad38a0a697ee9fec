"""Dense projection, of plain and of block-quantised weights. Knows nothing of what is projected or why.

A quantised weight is e4m3 with one fp32 scale per 128 x 128 block. A product with one quantises its input too, per row
and 128 inputs: its value is the sum over blocks of `(x_q . w_q) * x_scale * w_scale`, in fp32, on every device.

Shape letters: T tokens, I input width, O output width; o, i the blocks of 128 of O and I, the last may be short.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.linear import cpu, reference
from deltaserve.ops.norm.api import add_gemma_rms_norm

EVEN = 8
"""A vendor's product of 16 bits wants heights and widths that are multiples of it: rows of 16 bytes."""
Ready = tuple[Tensor, Tensor]
"""An input that a kernel has quantised while it made it, for products that would do so themselves: the same numbers,
e4m3 [T', I] and float32 scales [T', i], with T' of at least T. What makes one says so; None on a CPU."""


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None = None,
    dtype: torch.dtype | None = None,
    ready: Ready | None = None,
) -> Tensor:
    """`x @ weight.T`, without bias.

    Name        Shape    Dtype            Meaning
    x           [T, I]   any float        input
    weight      [O, I]   as x, or e4m3    one row per output, as checkpoints store it
    scale       [o, i]   float32          of an e4m3 weight: multiplied with its blocks
    dtype       -        -                of the output, x's by default
    ready       -        -                x quantised already, if it is; only with an e4m3 weight. Of more tokens than
                                          `triton_fp8.READY_ALONE` x is not read then
    returns     [T, O]   `dtype`
    """
    assert x_TI.shape[-1] == weight_OI.shape[1], (
        f"linear: the input is {x_TI.shape[-1]} wide, the weight expects {weight_OI.shape[1]}"
    )
    assert scale_oi is None or scale_oi.shape == scale_shape(weight_OI.shape), (
        f"linear: a weight {tuple(weight_OI.shape)} has no scales {tuple(scale_oi.shape)}"
    )
    if has_kernels(x_TI):
        from deltaserve.ops.linear import gpu

        return gpu.linear(x_TI, weight_OI, scale_oi, x_TI.dtype if dtype is None else dtype, ready)
    if scale_oi is None and dtype in (None, x_TI.dtype) and cpu.takes(x_TI, weight_OI):
        return cpu.linear(x_TI, weight_OI)
    return reference.linear(x_TI, weight_OI, scale_oi, dtype)


def linear_beside(x_TI: Tensor, weight_OI: Tensor, scale_oi: Tensor | None, beside_PI: Tensor) -> tuple[Tensor, Tensor]:
    """`linear` with a weight, and with a second, plain one [P, I] of the same input: [T, O] and [T, P], as x."""
    if has_kernels(x_TI):
        from deltaserve.ops.linear import gpu

        return gpu.linear_beside(x_TI, weight_OI, scale_oi, beside_PI)
    return linear(x_TI, weight_OI, scale_oi), linear(x_TI, beside_PI)


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor,
    weight_plus_one_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    scale_oi: Tensor | None = None,
    beside_PI: Tensor | None = None,
    quantizes: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Ready | None]:
    """`add_gemma_rms_norm` of x and residual, and `linear` or, with a second weight, `linear_beside` of that norm.

    Returns [T, O]; [T, P] or None; the norm and the sum [T, I], all as the residual in dtype; and the norm quantised,
    where that was made. `quantizes`: products with quantised weights follow that this function does not know.
    """
    if has_kernels(x_TI):
        from deltaserve.ops.linear import gpu

        return gpu.norm_linear(x_TI, residual_TI, weight_plus_one_I, eps, weight_OI, scale_oi, beside_PI, quantizes)
    if scale_oi is None and cpu.takes_norm(x_TI, residual_TI, weight_plus_one_I, weight_OI, beside_PI):
        return *cpu.norm_linear(x_TI, residual_TI, weight_plus_one_I, eps, weight_OI, beside_PI), None
    normed_TI, total_TI = add_gemma_rms_norm(x_TI, residual_TI, weight_plus_one_I, eps)
    y_TP = None if beside_PI is None else linear(normed_TI, beside_PI)
    return linear(normed_TI, weight_OI, scale_oi), y_TP, normed_TI, total_TI, None


def allocate(out_width: int, in_width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight [O, I] not yet filled. On a GPU there is memory behind it up to a multiple of EVEN rows."""
    if device.type == "cpu":
        # [I, O] in memory: of few inputs, BLAS then makes many outputs up to five times as fast.
        return torch.empty(in_width, out_width, dtype=dtype, device=device).t()
    return torch.empty(-(-out_width // EVEN) * EVEN, in_width, dtype=dtype, device=device)[:out_width]


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a weight [.., O, I]: [.., o, i]."""
    *batch, out_width, in_width = weight_shape
    return (*batch, -(-out_width // reference.BLOCK), -(-in_width // reference.BLOCK))


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [.., O, I] as e4m3 [.., O, I] and float32 scales [.., o, i]; an all-zero block has scale 1."""
    return reference.quantize_weight(weight_OI)


def dequantize_weight(weight_OI: Tensor, scale_oi: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [.., O, I] that e4m3 and scales stand for."""
    return reference.dequantize_weight(weight_OI, scale_oi, dtype)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """An input as e4m3 [T, I] and float32 scales [T, i]: amax / 448 of each row's 128 inputs, 1 where all are zero."""
    return reference.quantize_rows(x_TI)
