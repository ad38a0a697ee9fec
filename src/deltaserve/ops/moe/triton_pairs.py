"""The experts of a few tokens, one pair of a token and an expert after the other. Knows no routing.

Two kernels. `gate_up`: a program owns BI inner columns of one pair: BI rows of the gate and of the up projection,
whole, requested at once (16 KiB for rows of 2,048 bytes). `down`: a program owns BD outputs of some experts of one
token, J together, and requests their rows at once, so that their sum stays in registers: of plain weights all experts
(32 KiB), of quantised ones so few (16 KiB) that all programs are there at once and ask for all weights before what
they multiply is there; the next norm adds up the rest. An expert that several tokens share is read again, but from the
cache. Weights move once at 1 token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, quantize, widen

MAX_TOKENS = 2
"""Beyond, groups are faster on an H200."""
MAX_BLOCK = 4096
TOGETHER = 4
"""Quantised experts of a program of `down`. Programs of all eleven take so many registers that half of them start late:
on an H200 a layer without what mixes tokens takes 33.3 instead of 31.3 us at one token."""
HELD_BYTES, QUANTIZED_BYTES = 32 << 10, 16 << 10
"""Of the down projection, in a program's registers: half of them with 8 warps, and with 4."""


@triton.jit
def gate_up_input(
    x_ptr,
    x_scale_ptr,
    block_stride,
    gate_scale,
    up_scale,
    start,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
):
    """Twice fp32 [BK]: one input from `start` on; quantised, if it is not yet, times its own scales and the gate's or
    the up's."""
    k = start + tl.arange(0, BK)
    x_in = tl.load(x_ptr + k, mask=k < WIDTH, other=0.0)
    x = widen(x_in, FP8 if READY else 0)
    x_gate, x_up = x, x
    if FP8 != 0:
        block = start // 128 + tl.arange(0, BK // 128)
        gate = tl.load(gate_scale + block, mask=block * 128 < WIDTH, other=0.0)
        up = tl.load(up_scale + block, mask=block * 128 < WIDTH, other=0.0)
        blocks = tl.reshape(x, (BK // 128, 128))
        if READY:
            scale = tl.load(x_scale_ptr + block * block_stride, mask=block * 128 < WIDTH, other=0.0)
        else:
            x_q, scale = quantize(blocks, FP8)
            blocks = x_q.to(tl.float32)
        x_gate = tl.reshape(blocks * (scale * gate)[:, None], (BK,))
        x_up = tl.reshape(blocks * (scale * up)[:, None], (BK,))
    return x_gate, x_up


@triton.jit(do_not_specialize=["token_stride", "block_stride"])
def gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    h_ptr,
    token_stride,
    block_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """READY: the input comes quantised, and the strides are those of its scales. SHARED: the expert that is every
    token's last, or -1. Nobody needs to choose it, so it comes first."""
    pair, start = tl.program_id(1), tl.program_id(0) * BI
    if SHARED >= 0:
        pair = pair // K * K + (pair + K - 1) % K
    expert = tl.full((), SHARED, tl.int64)
    if (SHARED < 0) | (pair % K < K - 1):
        wait_for_inputs(EARLY)
        expert = tl.load(ids_ptr + pair).to(tl.int64)
    i = start + tl.arange(0, BI)
    kept = i < INNER
    x_ptr += (pair // K).to(tl.int64) * WIDTH
    ROWS: tl.constexpr = (INNER + 127) // 128
    COLUMNS: tl.constexpr = (WIDTH + 127) // 128
    x_scale_ptr += (pair // K) * token_stride
    gate_scale = scale_ptr + (expert * (2 * ROWS) + start // 128) * COLUMNS
    up_scale = gate_scale + ROWS * COLUMNS
    w_ptrs = w_ptr + expert * (2 * INNER * WIDTH) + i[:, None] * WIDTH
    gate, up = tl.zeros((BI,), tl.float32), tl.zeros((BI,), tl.float32)
    for first in tl.static_range(0, WIDTH, BK):
        k = first + tl.arange(0, BK)[None, :]
        inside = kept[:, None] & (k < WIDTH)
        w1 = tl.load(w_ptrs + k, mask=inside, other=0.0)
        w3 = tl.load(w_ptrs + INNER * WIDTH + k, mask=inside, other=0.0)
        if first == 0:
            wait_for_inputs(EARLY)
            let_next_start(EARLY)  # not sooner: so `down`, which starts then, finds the experts chosen
        x_gate, x_up = gate_up_input(
            x_ptr, x_scale_ptr, block_stride, gate_scale, up_scale, first, WIDTH, BK, FP8, READY
        )
        gate += tl.sum(widen(w1, FP8) * x_gate[None, :], 1)
        up += tl.sum(widen(w3, FP8) * x_up[None, :], 1)
    h = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(h_ptr + pair.to(tl.int64) * INNER + i, h.to(h_ptr.dtype.element_ty), mask=kept)


@triton.jit
def down_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    weights_ptr,
    ids_ptr,
    y_ptr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BD: tl.constexpr,
    J: tl.constexpr,
    IP: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of each token, a row of outputs for each J of its experts."""
    GROUPS: tl.constexpr = (K + J - 1) // J
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BD
    t = row // GROUPS
    j, i, d = row % GROUPS * J + tl.arange(0, J), tl.arange(0, IP), start + tl.arange(0, BD)
    has = j < K
    expert = tl.load(ids_ptr + t * K + j, mask=has, other=0).to(tl.int64)
    rows = w_ptr + expert[None, :, None] * (WIDTH * INNER) + d[:, None, None] * INNER + i[None, None, :]
    w = tl.load(rows, mask=has[None, :, None] & (d < WIDTH)[:, None, None] & (i < INNER)[None, None, :], other=0.0)
    factor = tl.load(weights_ptr + t * K + j, mask=has, other=0.0)
    if FP8 != 0:
        NUM: tl.constexpr = (INNER + 127) // 128
        block = tl.arange(0, IP // 128)
        scales = scale_ptr + (expert * ((WIDTH + 127) // 128) + start // 128)[:, None] * NUM + block[None, :]
        w_scale = tl.load(scales, mask=has[:, None] & (block < NUM)[None, :], other=0.0)
        factor = tl.reshape(w_scale * factor[:, None], (J * (IP // 128),))
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    made = h_ptr + t * (K * INNER) + j[:, None] * INNER + i[None, :]
    h = tl.load(made, mask=has[:, None] & (i < INNER)[None, :], other=0.0).to(tl.float32)
    if FP8 != 0:
        h_q, scale = quantize(tl.reshape(h, (J * (IP // 128), 128)), FP8)
        h = tl.reshape(h_q.to(tl.float32) * (scale * factor)[:, None], (J, IP))
    else:
        h = h * factor[:, None]
    products = widen(w, FP8) * h[None, :, :]
    ROW_BYTES: tl.constexpr = IP * w_ptr.dtype.element_ty.primitive_bitwidth // 8
    # One sum over experts and columns: most of it stays within a thread. Not where several warps share a row: theirs
    # would then be columns, outputs and experts in turn, a layout that Triton 3.6 adds up wrongly.
    is_flat: tl.constexpr = ROW_BYTES <= 512
    y = tl.sum(tl.reshape(products, (BD, J * IP)), 1) if is_flat else tl.sum(tl.sum(products, 1), 1)
    tl.store(y_ptr + row * WIDTH + d, y.to(y_ptr.dtype.element_ty), mask=d < WIDTH)


def gate_up(
    x_TD: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    ids_TK: Tensor,
    shared: bool = False,
    rows: int = 4,
    num_warps: int = 4,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, D], w13 [E, 2I, D] plain or e4m3, ids int32 [T, K] -> silu(gate) * up, [T * K, I] as x. `shared`: each
    token's last id is that of the last expert. `ready`: x as e4m3 and its scales [T, d] at any strides, for
    e4m3 weights.

    Variants: shapes of the weights, K, dtypes; `rows` (a power of two up to 128) is one value for a model.
    """
    inner, width = w13.shape[1] // 2, w13.shape[2]
    h_PI = torch.empty(ids_TK.numel(), inner, dtype=x_TD.dtype, device=x_TD.device)
    weight, way = fp8_way(w13, w13_scale)
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(width)))
    x_in, x_scale = (x_TD.contiguous(), weight) if ready is None else (fp8_way(*ready)[0], ready[1])
    gate_up_kernel[(triton.cdiv(inner, rows), ids_TK.numel())](
        x_in,
        x_scale,
        weight,
        weight if w13_scale is None else w13_scale,
        ids_TK,
        h_PI,
        *(x_scale.stride() if ready is not None else (0, 0)),
        K=ids_TK.shape[1],
        WIDTH=width,
        INNER=inner,
        BI=rows,
        BK=block,
        FP8=way,
        READY=ready is not None,
        SHARED=w13.shape[0] - 1 if shared else -1,
        num_warps=num_warps,
        **early_options(x_TD.device, early),
    )
    return h_PI


def down(
    h_PI: Tensor,
    w2: Tensor,
    w2_scale: Tensor | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    rows: int = 0,
    num_warps: int = 0,
    early: bool | None = None,
) -> Tensor:
    """h [T * K, I] of `gate_up`, w2 [E, D, I] plain or e4m3, weights float32 and ids int32 [T, K] -> [T, D] as h; where
    weights are quantised and K is more than TOGETHER, [T, G, D] float32, rows yet to be summed.

    Variants: as `gate_up`; `rows` outputs (a power of two) of a program's experts are held at once.
    """
    (tokens, top_k), (_, width, inner) = ids_TK.shape, w2.shape
    weight, way = fp8_way(w2, w2_scale)
    together, held = triton.next_power_of_2(top_k), HELD_BYTES
    if way:
        together, held = min(TOGETHER, together), QUANTIZED_BYTES
    groups, columns = triton.cdiv(top_k, together), max(128 if way else 16, triton.next_power_of_2(inner))
    rows = rows or max(1, min(16, held // (together * columns * weight.element_size())))
    shape, dtype = ((tokens, width), h_PI.dtype) if groups == 1 else ((tokens, groups, width), torch.float32)
    y_TD = torch.empty(shape, dtype=dtype, device=h_PI.device)
    down_kernel[(triton.cdiv(width, rows), tokens * groups)](
        h_PI,
        weight,
        weight if w2_scale is None else w2_scale,
        weights_TK,
        ids_TK,
        y_TD,
        K=top_k,
        WIDTH=width,
        INNER=inner,
        BD=rows,
        J=together,
        IP=columns,
        FP8=way,
        num_warps=num_warps or (4 if way else 8),
        **early_options(h_PI.device, early),
    )
    return y_TD
