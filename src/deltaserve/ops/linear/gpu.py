"""Which way a projection is computed on a GPU, by its sizes. Knows no kernel's inside.

| tokens   | plain weight       | quantised weight                                             |
|----------|--------------------|--------------------------------------------------------------|
| 1        | triton_gemv        | triton_gemv                                                  |
| to 3     | the same, if small | triton_gemv if the input comes quantised, else triton_gemm   |
| 4        | the same, if small | triton_gemm                                                  |
| to 64    | triton_gemm        | triton_gemm                                                  |
| more     | torch, if even     | the vendor's blockwise product where it is, else triton_gemm |
| MANY     | torch              | the same                                                     |
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear import reference
from deltaserve.ops.linear.api import EVEN

Ready = tuple[Tensor, Tensor]
"""An input that comes quantised too, as `quantize_rows` gives it."""
SMALL = 64
"""Tokens up to which streaming the weight is the cost."""
READY_GEMV = 3
"""Tokens up to which a quantised input goes to `triton_gemv`. On an H200 eight layers of 2 tokens take 388 instead of
458 us, of 3 461 instead of 496; of 4, which it can take too, 514 instead of 502."""
GATHERED = 1024
"""Tokens beyond which experts gather whole rows of scales (`moe/triton_roles.py`)."""
MANY = 256
"""Tokens from which an uneven plain weight goes to torch together with the rows that lie behind it. On an H200 a router
of 513 rows takes 5.6 us for 256 of them, 7.0 for 1,024 and 27 for 8,192; by `triton_gemm` 8.1, 18.5 and 50."""
NORMS_INSIDE = {False: True, True: False}
"""Whether the projection of one token norms its input itself, a launch less, by whether its weight is quantised: then
programs are many, and it is better that a norm quantises for all of them."""


def linear(
    x_TI: Tensor, weight_OI: Tensor, scale_oi: Tensor | None, dtype: torch.dtype, ready: Ready | None = None
) -> Tensor:
    """As api.linear, for T of at least 0."""
    assert ready is None or scale_oi is not None, "linear: a quantised input of a plain weight"
    tokens = x_TI.shape[0]
    if tokens == 0:
        return x_TI.new_empty(0, weight_OI.shape[0], dtype=dtype)
    if takes_gemv(tokens, weight_OI, scale_oi, ready):
        from deltaserve.ops.linear.triton_gemv import MAX_BLOCK, gemv

        return gemv(x_TI, weight_OI, scale_oi, dtype, ready=ready if x_TI.shape[1] <= MAX_BLOCK else None)
    if tokens > SMALL:
        if scale_oi is None:
            if not is_uneven(weight_OI):
                return dense(x_TI, weight_OI, dtype)
            even_OI = with_rows_behind(weight_OI) if tokens >= MANY else None
            if even_OI is not None:
                return dense(x_TI, even_OI, dtype)[:, : weight_OI.shape[0]]
        elif has_blockwise(x_TI, weight_OI, dtype):
            return blockwise(x_TI, weight_OI, scale_oi, ready)
    from deltaserve.ops.linear.triton_gemm import gemm

    return gemm(x_TI, weight_OI, scale_oi, dtype, ready=ready)


def linear_beside(
    x_TI: Tensor, weight_OI: Tensor, scale_oi: Tensor | None, beside_PI: Tensor, ready: Ready | None = None
) -> tuple[Tensor, Tensor]:
    """As api.linear_beside."""
    if x_TI.shape[0] and takes_gemv(x_TI.shape[0], weight_OI, scale_oi, ready):
        from deltaserve.ops.linear.triton_gemv import MAX_BLOCK, gemv_beside

        own = ready if x_TI.shape[1] <= MAX_BLOCK else None
        return gemv_beside(x_TI, weight_OI, scale_oi, beside_PI, ready=own)
    if 0 < x_TI.shape[0] <= SMALL and scale_oi is not None:
        from deltaserve.ops.linear.triton_gemm import gemm_beside

        return gemm_beside(x_TI, weight_OI, scale_oi, beside_PI, ready=ready)
    return linear(x_TI, weight_OI, scale_oi, x_TI.dtype, ready), linear(x_TI, beside_PI, None, x_TI.dtype)


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor,
    gain_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor | None,
    quantizes: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Ready | None]:
    """As api.norm_linear."""
    from deltaserve.ops.linear import triton_gemv
    from deltaserve.ops.norm.triton_norm import add_norm_rows, add_norm_rows_quantized

    is_one = residual_TI.shape[0] == 1 and residual_TI.shape[1] <= triton_gemv.MAX_BLOCK
    if is_one and x_TI.dim() == 2 and NORMS_INSIDE[scale_oi is not None]:
        return *triton_gemv.norm_gemv(x_TI, residual_TI, gain_I, eps, weight_OI, scale_oi, beside_PI), None
    ready: Ready | None = None
    if quantizes or scale_oi is not None:
        by_row = scale_oi is None and len(residual_TI) > GATHERED  # then it is for others: experts
        normed_TI, total_TI, ready = add_norm_rows_quantized(x_TI, residual_TI, gain_I, eps, by_row)
    else:
        normed_TI, total_TI = add_norm_rows(x_TI, residual_TI, gain_I, eps)
    own = None if scale_oi is None else ready
    if beside_PI is None:
        return linear(normed_TI, weight_OI, scale_oi, normed_TI.dtype, own), None, normed_TI, total_TI, ready
    return *linear_beside(normed_TI, weight_OI, scale_oi, beside_PI, own), normed_TI, total_TI, ready


def takes_gemv(tokens: int, weight_OI: Tensor, scale_oi: Tensor | None, ready: Ready | None = None) -> bool:
    """Whether a product is too small for matrix units. On an H200 these are faster from 2 tokens on with a quantised
    weight and an input that every program would quantise, and from 3 on with a large plain weight."""
    if tokens > 1 and ready is not None:
        return tokens <= READY_GEMV and weight_OI.shape[1] <= 4096
    return tokens == 1 or (scale_oi is None and (tokens == 2 or (tokens <= 4 and weight_OI.shape[0] <= 4096)))


def is_uneven(weight_OI: Tensor) -> bool:
    """Whether a weight of 16 bits has a height or width that takes the vendor's slow way: a router with a row more than
    experts costs 252 us for 8,192 tokens on an H200, ten times its share."""
    return weight_OI.element_size() == 2 and (weight_OI.shape[0] % EVEN != 0 or weight_OI.shape[1] % EVEN != 0)


def with_rows_behind(weight_OI: Tensor) -> Tensor | None:
    """The weight and what follows in its memory, up to a height that is even, as `allocate` leaves room for; None where
    there is less. What these rows hold does not matter: nobody sees their products."""
    height, width = weight_OI.shape
    height += -height % EVEN
    if not weight_OI.is_contiguous() or width % EVEN:
        return None
    room = weight_OI.untyped_storage().nbytes() // weight_OI.element_size() - weight_OI.storage_offset()
    return weight_OI.as_strided((height, width), (width, 1)) if room >= height * width else None


def dense(x_TI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's product, without a second pass where the output is wider than the input."""
    if dtype == torch.float32 and x_TI.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)
    return reference.linear(x_TI, weight_OI, None, dtype)


def has_blockwise(x_TI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies these in blocks: Hopper only, sizes that fill its blocks and rows of scales, and enough
    tiles of 128 x 128 for half of the multiprocessors, since it splits none."""
    height, width = weight_OI.shape
    tiles = -(-height // 128) * -(-x_TI.shape[0] // 128)
    fits = width % 512 == 0 and height % 16 == 0 and tiles >= properties(x_TI.device).num_sms // 2
    return fits and dtype == torch.bfloat16 and properties(x_TI.device).is_hopper


def blockwise(x_TI: Tensor, weight_OI: Tensor, scale_oi: Tensor, ready: Ready | None = None) -> Tensor:
    """bf16 [T, O]. `has_blockwise` must hold."""
    from deltaserve.ops.linear.triton_fp8 import quantize_rows

    x_q, x_scale = ready or quantize_rows(x_TI)
    y_TO = torch._scaled_mm(x_q, weight_OI.t(), x_scale, scale_oi.t(), out_dtype=torch.bfloat16)
    return y_TO[: x_TI.shape[0]]
