"""Projection of one to four inputs: a weight is streamed once, straight into registers. Knows no other sizes.

A program owns BO rows of the weight, whole (up to 4,096 wide): 16 KiB, or 8 of a plain weight, all of them requested at
once, 16 bytes per load, before the input is looked at; several programs per multiprocessor keep about 100 KiB in
flight. Scales of weight and input are multiplied into the input, which is tiny: a weight costs its conversion and one
multiplication. A second, plain weight of the same input may stand beside the first: the last programs own its rows.

The input of one token may come as a sum that is yet to be normed: every program then norms it for itself, from the
cache, while its part of the weight is on the way, and the first program also leaves the sum and the norm in memory.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, quantize, scaled_input, widen

MAX_TOKENS = 4
MAX_BLOCK = 4096
QUANTIZED_BYTES, PLAIN_BYTES = 16 << 10, 8 << 10
"""Of a weight that a program holds: the fastest on an H200 of 4 to 64 KiB. Several tokens keep a weight converted to
fp32 in registers: then a quantised one is held as a plain one is."""


@triton.jit
def ready_input(q_ptr, q_scale_ptr, stride, w_scale, WIDTH: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr):
    """As `scaled_input`, of an input that comes quantised, its scales `stride` apart; `w_scale` are the weight's."""
    k, block = tl.arange(0, BK), tl.arange(0, BK // 128)
    q = widen(tl.load(q_ptr + k, mask=k < WIDTH, other=0.0), FP8)
    scale = tl.load(q_scale_ptr + block * stride, mask=block * 128 < WIDTH, other=0.0) * w_scale
    return tl.reshape(tl.reshape(q, (BK // 128, 128)) * scale[:, None], (BK,))


@triton.jit
def row_products(x_ptr, w, scale_ptr, y_ptrs, kept, WIDTH: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr):
    """One token's outputs from rows of the weight [BO, BK]."""
    x = scaled_input(x_ptr, scale_ptr, 0, WIDTH, BK, FP8)
    y = tl.sum(widen(w, FP8) * x[None, :], 1)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=kept)


@triton.jit
def scaled_norm(
    x_ptr,
    residual_ptr,
    gain_ptr,
    scale_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    is_first,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
):
    """As `scaled_input`, of the norm of x + residual: both are rounded to x's dtype. The first program stores them."""
    k = tl.arange(0, BK)
    inside = k < WIDTH
    gain = tl.load(gain_ptr + k, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + k, mask=inside, other=0.0).to(tl.float32)
    total = (x + residual).to(x_ptr.dtype.element_ty)
    wide = total.to(tl.float32)
    normed = (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)) * gain).to(x_ptr.dtype.element_ty)
    if is_first:
        tl.store(sum_ptr + k, total, mask=inside)
        tl.store(normed_ptr + k, normed, mask=inside)
    x = normed.to(tl.float32)
    if FP8 != 0:
        x_q, scale = quantize(tl.reshape(x, (BK // 128, 128)), FP8)
        block = tl.arange(0, BK // 128)
        scale *= tl.load(scale_ptr + block, mask=block * 128 < WIDTH, other=0.0)
        x = tl.reshape(x_q.to(tl.float32) * scale[:, None], (BK,))
    return x


@triton.jit
def project_norm(
    x_ptr,
    residual_ptr,
    gain_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    w_ptr,
    scale_ptr,
    y_ptr,
    start,
    is_first,
    height,
    WIDTH: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As `project`, of one token's x + residual after its norm."""
    o = start + tl.arange(0, BO)
    kept = o < height
    k = tl.arange(0, BK)[None, :]
    w_ptrs = w_ptr + o.to(tl.int64)[:, None] * WIDTH + k
    w = tl.load(w_ptrs, mask=kept[:, None] & (k < WIDTH), other=0.0, eviction_policy="evict_first")
    scale_ptr += (start // 128) * ((WIDTH + 127) // 128)
    wait_for_inputs(EARLY)
    x = scaled_norm(x_ptr, residual_ptr, gain_ptr, scale_ptr, sum_ptr, normed_ptr, eps, is_first, WIDTH, BK, FP8)
    y = tl.sum(widen(w, FP8) * x[None, :], 1)
    tl.store(y_ptr + o, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["height", "height_beside", "eps"])
def norm_gemv_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    w_ptr,
    scale_ptr,
    y_ptr,
    beside_ptr,
    y_beside_ptr,
    height,
    height_beside,
    WIDTH: tl.constexpr,
    BO: tl.constexpr,
    BESIDE: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token's. BESIDE as in `gemv_kernel`."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    own = tl.cdiv(height, BO)
    if program < own:
        project_norm(
            x_ptr,
            residual_ptr,
            gain_ptr,
            sum_ptr,
            normed_ptr,
            eps,
            w_ptr,
            scale_ptr,
            y_ptr,
            program * BO,
            program == 0,
            height,
            WIDTH,
            BO,
            BK,
            FP8,
            EARLY,
        )
    elif BESIDE > 0:
        project_norm(
            x_ptr,
            residual_ptr,
            gain_ptr,
            sum_ptr,
            normed_ptr,
            eps,
            beside_ptr,
            beside_ptr,
            y_beside_ptr,
            (program - own) * BESIDE,
            False,
            height_beside,
            WIDTH,
            BESIDE,
            BK,
            0,
            EARLY,
        )


@triton.jit
def project_ready(
    q_ptr,
    q_scale_ptr,
    stride,
    w_ptr,
    scale_ptr,
    y_ptr,
    start,
    tokens,
    height,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As `project`, of 1, 2 or 4 tokens that come quantised; a fourth that is not there as anything. Each row of the
    weight is widened once, and all inputs are on their way before the first output is stored."""
    o = start + tl.arange(0, BO)
    kept = o < height
    k = tl.arange(0, BK)[None, :]
    w_ptrs = w_ptr + o.to(tl.int64)[:, None] * WIDTH + k
    w = tl.load(w_ptrs, mask=kept[:, None] & (k < WIDTH), other=0.0, eviction_policy="evict_first")
    block = tl.arange(0, BK // 128)
    scale_ptr += (start // 128) * ((WIDTH + 127) // 128)
    w_scale = tl.load(scale_ptr + block, mask=block * 128 < WIDTH, other=0.0)
    wait_for_inputs(EARLY)
    x = ready_input(q_ptr, q_scale_ptr, stride, w_scale, WIDTH, BK, FP8)
    x_1, x_2, x_3 = x, x, x
    if T > 1:
        x_1 = ready_input(q_ptr + WIDTH, q_scale_ptr + 1, stride, w_scale, WIDTH, BK, FP8)
    if T > 2:
        x_2 = ready_input(q_ptr + 2 * WIDTH, q_scale_ptr + 2, stride, w_scale, WIDTH, BK, FP8)
        x_3 = ready_input(q_ptr + 3 * WIDTH, q_scale_ptr + 3, stride, w_scale, WIDTH, BK, FP8)
    wide = widen(w, FP8)
    tl.store(y_ptr + o, tl.sum(wide * x[None, :], 1).to(y_ptr.dtype.element_ty), mask=kept)
    if T > 1:
        tl.store(y_ptr + height + o, tl.sum(wide * x_1[None, :], 1).to(y_ptr.dtype.element_ty), mask=kept)
    if T > 2:
        tl.store(y_ptr + 2 * height + o, tl.sum(wide * x_2[None, :], 1).to(y_ptr.dtype.element_ty), mask=kept)
        last = o < tl.where(tokens > 3, height, 0)
        tl.store(y_ptr + 3 * height + o, tl.sum(wide * x_3[None, :], 1).to(y_ptr.dtype.element_ty), mask=last)


@triton.jit
def project(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    start,
    tokens,
    height,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The outputs `start` to `start + BO` of a weight."""
    o = start + tl.arange(0, BO)
    kept = o < height
    scale_ptr += (start // 128) * ((WIDTH + 127) // 128)
    w_ptrs = w_ptr + o.to(tl.int64)[:, None] * WIDTH
    if WIDTH <= BK:
        k = tl.arange(0, BK)[None, :]
        w = tl.load(w_ptrs + k, mask=kept[:, None] & (k < WIDTH), other=0.0, eviction_policy="evict_first")
        wait_for_inputs(EARLY)
        for t in tl.static_range(T):
            if t > T // 2:  # of 3 tokens and of 4, the last
                if t < tokens:
                    row_products(x_ptr + t * WIDTH, w, scale_ptr, y_ptr + t * height + o, kept, WIDTH, BK, FP8)
            else:
                row_products(x_ptr + t * WIDTH, w, scale_ptr, y_ptr + t * height + o, kept, WIDTH, BK, FP8)
    else:
        wait_for_inputs(EARLY)
        for t in range(tokens):
            y = tl.zeros((BO,), tl.float32)
            for first in range(0, WIDTH, BK):
                k = first + tl.arange(0, BK)[None, :]
                w = tl.load(w_ptrs + k, mask=kept[:, None] & (k < WIDTH), other=0.0)
                x = scaled_input(x_ptr + t * WIDTH, scale_ptr, first, WIDTH, BK, FP8)
                y += tl.sum(widen(w, FP8) * x[None, :], 1)
            tl.store(y_ptr + t * height + o, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["stride", "tokens", "height", "height_beside"])
def gemv_kernel(
    x_ptr,
    q_ptr,
    q_scale_ptr,
    stride,
    w_ptr,
    scale_ptr,
    y_ptr,
    beside_ptr,
    y_beside_ptr,
    tokens,
    height,
    height_beside,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
    BO: tl.constexpr,
    BESIDE: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BESIDE: rows of the second weight that a program owns, 0 without one. READY: the first weight's input comes
    quantised as well."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    own = tl.cdiv(height, BO)
    start = program * BO
    if program < own:
        if READY:
            project_ready(
                q_ptr, q_scale_ptr, stride, w_ptr, scale_ptr, y_ptr, start, tokens, height, WIDTH, T, BO, BK, FP8, EARLY
            )
        else:
            project(x_ptr, w_ptr, scale_ptr, y_ptr, start, tokens, height, WIDTH, T, BO, BK, FP8, EARLY)
    else:
        start = (program - own) * BESIDE
        if BESIDE > 0:
            project(
                x_ptr,
                beside_ptr,
                beside_ptr,
                y_beside_ptr,
                start,
                tokens,
                height_beside,
                WIDTH,
                T,
                BESIDE,
                BK,
                0,
                EARLY,
            )


def rows_per_program(height: int, row_bytes: int, share: int, num_sms: int) -> int:
    """As many as make `share` bytes, but fewer where there would not be two programs for each multiprocessor."""
    rows = max(1, min(16, share // row_bytes))
    while rows > 1 and -(-height // rows) < 2 * num_sms:
        rows //= 2
    return rows


def gemv(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    dtype: torch.dtype,
    rows: int = 0,
    num_warps: int = 4,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, I] with T up to 4, weight [O, I] plain or e4m3 with scales [o, i] -> [T, O] in `dtype`. `ready`: x as
    `quantize_rows` gives it, four rows of it for 3 tokens, for an e4m3 weight up to MAX_BLOCK wide.

    Variants: 1, 2, or 3 and 4 tokens, I, dtypes, and `rows` (a power of two), which follows from the shape.
    """
    return _launch(x_TI, weight_OI, scale_oi, None, dtype, rows, num_warps, early, ready)[0]


def gemv_beside(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor,
    rows: int = 0,
    num_warps: int = 4,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `gemv`, and the products with a second, plain weight [P, I]: [T, O] and [T, P], as x in dtype."""
    return _launch(x_TI, weight_OI, scale_oi, beside_PI.contiguous(), x_TI.dtype, rows, num_warps, early, ready)


def norm_gemv(
    x_TI: Tensor,
    residual_TI: Tensor,
    gain_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor | None,
    rows: int = 0,
    num_warps: int = 4,
    early: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The products [1, O] and, with a second weight, [1, P] of the Gemma norm of x + residual [1, I], whose gain is
    1 + w; then that norm and that sum. All as x in dtype; I up to MAX_BLOCK.

    Variants: I, dtypes, whether there is a second weight, and `rows`.
    """
    width, height = x_TI.shape[1], weight_OI.shape[0]
    assert x_TI.shape == (1, width) == residual_TI.shape, f"linear: {tuple(x_TI.shape)} is not one token"
    assert width <= MAX_BLOCK, f"linear: {width} inputs, at most {MAX_BLOCK}"
    new = partial(torch.empty, dtype=x_TI.dtype, device=x_TI.device)
    y_TO, normed_TI, total_TI = new(1, height), new(1, width), new(1, width)
    y_TP = None if beside_PI is None else new(1, beside_PI.shape[0])
    weight, way = fp8_way(weight_OI.contiguous(), scale_oi)
    rows, rows_beside, programs = _shares(weight, way, beside_PI, 1, rows)
    norm_gemv_kernel[(programs,)](
        x_TI.contiguous(),
        residual_TI.contiguous(),
        gain_I,
        total_TI,
        normed_TI,
        eps,
        weight,
        weight if scale_oi is None else scale_oi,
        y_TO,
        weight if beside_PI is None else beside_PI,
        y_TO if y_TP is None else y_TP,
        height,
        0 if beside_PI is None else beside_PI.shape[0],
        WIDTH=width,
        BO=rows,
        BESIDE=rows_beside,
        BK=max(128, triton.next_power_of_2(width)),
        FP8=way,
        num_warps=num_warps,
        **early_options(x_TI.device, early),
    )
    return y_TO, y_TP, normed_TI, total_TI


def _shares(weight: Tensor, way: int, beside: Tensor | None, tokens: int, rows: int) -> tuple[int, int, int]:
    """Rows of a program, those of a second weight (0 without one), and programs."""
    height, width = weight.shape
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(width)))
    share = QUANTIZED_BYTES if way and tokens == 1 else PLAIN_BYTES
    num_sms = properties(weight.device).num_sms
    rows = rows or rows_per_program(height, block * weight.element_size(), share, num_sms)
    programs = triton.cdiv(height, rows)
    if beside is None:
        return rows, 0, programs
    rows_beside = max(1, min(rows, QUANTIZED_BYTES // (block * beside.element_size())))
    return rows, rows_beside, programs + triton.cdiv(beside.shape[0], rows_beside)


def _launch(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    num_warps: int,
    early: bool | None,
    ready: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    (tokens, width), height = x_TI.shape, weight_OI.shape[0]
    assert tokens <= MAX_TOKENS, f"linear: {tokens} tokens, at most {MAX_TOKENS}"
    y_TO = torch.empty(tokens, height, dtype=dtype, device=x_TI.device)
    weight, way = fp8_way(weight_OI.contiguous(), scale_oi)
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(width)))
    # A weight of two tokens that come quantised fits the registers as it does of one.
    held_as_of = 1 if ready is not None and tokens == 2 else tokens
    rows, rows_beside, programs = _shares(weight, way, beside_PI, held_as_of, rows)
    y_TP, height_beside = y_TO, 0
    if beside_PI is not None:
        height_beside = beside_PI.shape[0]
        y_TP = torch.empty(tokens, height_beside, dtype=dtype, device=x_TI.device)
    x_q, q_scale = (weight, weight) if ready is None else (fp8_way(*ready)[0], ready[1])
    in_rows = triton.next_power_of_2(tokens)
    if ready is not None:
        assert len(x_q) >= in_rows, f"linear: {tuple(x_q.shape)} quantised for {tokens} tokens"
        assert width <= MAX_BLOCK, f"linear: {width} quantised inputs, at most {MAX_BLOCK}"
        assert tokens == 1 or q_scale.stride(0) == 1, f"linear: scales with strides {q_scale.stride()}"
    gemv_kernel[(programs,)](
        x_TI.contiguous(),
        x_q,
        q_scale,
        q_scale.stride(1),
        weight,
        weight if scale_oi is None else scale_oi,
        y_TO,
        weight if beside_PI is None else beside_PI,
        y_TP,
        tokens,
        height,
        height_beside,
        WIDTH=width,
        T=in_rows,
        BO=rows,
        BESIDE=rows_beside,
        BK=block,
        FP8=way,
        READY=ready is not None,
        num_warps=num_warps,
        **early_options(x_TI.device, early),
    )
    return y_TO, y_TP
