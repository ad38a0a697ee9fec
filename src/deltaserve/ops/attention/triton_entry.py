"""What attention does to a step's queries, keys and values before it looks back, in one launch on a GPU.

Queries and keys are normed head by head and rotated, all in fp32, and rounded once; keys and values go into the pool.
Knows positions and where a token's entry goes; knows no context.

A program takes one token and a handful of its query heads, or its key and value heads: at one token of the large model
five programs, each of one trip to memory. What is rotated is read once more (cached lines), in halves that belong
together, instead of being moved between threads; one by one its dimensions would be most of a program's loads.

Variants: heads, widths and dtypes only.

Shape letters: T tokens, H query heads, G key heads, D head width, R rotary width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.layout import BLOCK
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs

HEADS, MANY_HEADS, FEW = 4, 16, 1024
"""Query heads of a program, up to FEW tokens and beyond."""


@triton.jit
def _norm_and_turn(
    x_ptr,
    weight_ptr,
    cos_sin_ptr,
    to_ptr,
    eps,
    head,
    is_head,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Heads [N] of one token, in fp32, rounded as x. `cos_sin_ptr` is at the token's position."""
    HALF: tl.constexpr = ROTARY // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (column < WIDTH)[None, :]
    at = head[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    turn = tl.arange(0, BLOCK_R)
    turns = turn < HALF
    turn_mask = is_head[:, None] & turns[None, :]
    turn_at = head[:, None] * WIDTH + turn[None, :]
    first = tl.load(x_ptr + turn_at, mask=turn_mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + turn_at, mask=turn_mask, other=0.0).to(tl.float32)
    first_weight = tl.load(weight_ptr + turn, mask=turns, other=0.0).to(tl.float32)
    second_weight = tl.load(weight_ptr + HALF + turn, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + turn, mask=turns, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + HALF + turn, mask=turns, other=0.0)[None, :]
    scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps))[:, None]
    normed = x * scale * weight[None, :]
    # The model's dtype first, whatever the pool's is.
    kept = normed.to(DTYPE).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + at, kept, mask=mask & (column >= ROTARY)[None, :])
    first = first * scale * first_weight[None, :]
    second = second * scale * second_weight[None, :]
    turned = (first * cos - second * sin).to(DTYPE).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + turn_at, turned, mask=turn_mask)
    turned = (second * cos + first * sin).to(DTYPE).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + HALF + turn_at, turned, mask=turn_mask)


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["position_ptr", "kv_index_ptr"])
def entry_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    position_ptr,
    kv_index_ptr,
    out_ptr,
    pool_ptr,
    q_token,
    k_token,
    v_token,
    plane_stride,
    entry_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """q [T, H, D], k and v [T, G, D] with packed heads; pool [2, entries, G, D] with packed heads.

    IS_PLAIN: keys are stored as they are, and there are no queries.
    """
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if not IS_PLAIN:
        cos_sin_ptr += tl.load(position_ptr + token) * ROTARY
    entry = tl.load(kv_index_ptr + token)
    wait_for_inputs(EARLY)
    if part * HEADS < NUM_Q:
        q_head = part * HEADS + tl.arange(0, HEADS)
        q_to = out_ptr + token * (NUM_Q * WIDTH)
        _norm_and_turn(
            *(q_ptr + token * q_token, q_weight_ptr, cos_sin_ptr, q_to, eps, q_head, q_head < NUM_Q),
            *(WIDTH, ROTARY, BLOCK_D, BLOCK_R),
        )
    else:
        is_kept = entry >= 0
        head = tl.arange(0, BLOCK_G)
        is_head = tl.where(is_kept, head, NUM_KV) < NUM_KV
        column = tl.arange(0, BLOCK_D)
        mask = is_head[:, None] & (column < WIDTH)[None, :]
        at = head[:, None] * WIDTH + column[None, :]
        v = tl.load(v_ptr + token * v_token + at, mask=mask, other=0.0)
        to = pool_ptr + tl.where(is_kept, entry, 0) * entry_stride
        if IS_PLAIN:
            plain_k = tl.load(k_ptr + token * k_token + at, mask=mask, other=0.0)
            tl.store(to + at, plain_k.to(pool_ptr.dtype.element_ty), mask=mask)
        else:
            _norm_and_turn(
                *(k_ptr + token * k_token, k_weight_ptr, cos_sin_ptr, to, eps, head, is_head),
                *(WIDTH, ROTARY, BLOCK_D, BLOCK_R),
            )
        tl.store(to + plane_stride + at, v.to(pool_ptr.dtype.element_ty), mask=mask)


def enter(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin: Tensor,
    position_T: Tensor,
    kv_pool: Tensor,
    kv_index_T: Tensor,
    heads: int | None = None,
) -> Tensor:
    """Stores keys and values [T, G, D] in the pool [2, num_blocks, 64, G, D] at kv_index [T] int64 (-1: nowhere).

    q [T, H, D]; weights [D] are 1 + w; cos_sin [max_len, R] float32; position [T] int64. Returns the queries as
    attention wants them, [T, H, D] contiguous, as q in dtype. `heads` of queries in a program, a power of two.
    """
    tokens, num_q, width = q_THD.shape
    num_kv = k_TGD.shape[1]
    q_THD, k_TGD, v_TGD = (_packed(x) for x in (q_THD, k_TGD, v_TGD))
    _check_pool(kv_pool)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if not tokens:
        return out_THD
    block = triton.next_power_of_2(width)
    if heads is None:
        heads = HEADS if tokens <= FEW else MANY_HEADS
    entry_kernel[(tokens, triton.cdiv(num_q, heads) + 1)](
        q_THD,
        k_TGD,
        v_TGD,
        q_weight_D,
        k_weight_D,
        cos_sin,
        position_T,
        kv_index_T,
        out_THD,
        kv_pool,
        q_THD.stride(0),
        k_TGD.stride(0),
        v_TGD.stride(0),
        kv_pool.stride(0),
        kv_pool.stride(2),
        eps,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        WIDTH=width,
        ROTARY=cos_sin.shape[1],
        HEADS=heads,
        BLOCK_G=triton.next_power_of_2(num_kv),
        BLOCK_D=block,
        BLOCK_R=triton.next_power_of_2(cos_sin.shape[1] // 2),
        IS_PLAIN=False,
        num_warps=max(1, min(4, heads * block // 256)),
        **early_options(kv_pool.device, tokens=len(out_THD)),
    )
    return out_THD


def store(k_TGD: Tensor, v_TGD: Tensor, kv_pool: Tensor, kv_index_T: Tensor) -> None:
    """Stores keys and values [T, G, D] as they are, at kv_index [T] int64 (-1: nowhere)."""
    tokens, num_kv, width = k_TGD.shape
    k_TGD, v_TGD = _packed(k_TGD), _packed(v_TGD)
    _check_pool(kv_pool)
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    entry_kernel[(tokens, 1)](
        k_TGD,
        k_TGD,
        v_TGD,
        k_TGD,
        k_TGD,
        k_TGD,
        kv_index_T,
        kv_index_T,
        k_TGD,
        kv_pool,
        k_TGD.stride(0),
        k_TGD.stride(0),
        v_TGD.stride(0),
        kv_pool.stride(0),
        kv_pool.stride(2),
        0.0,
        NUM_Q=0,
        NUM_KV=num_kv,
        WIDTH=width,
        ROTARY=2,
        HEADS=HEADS,
        BLOCK_G=triton.next_power_of_2(num_kv),
        BLOCK_D=block,
        BLOCK_R=1,
        IS_PLAIN=True,
        num_warps=max(1, min(4, HEADS * block // 256)),
        **early_options(kv_pool.device, tokens=tokens),
    )


def _check_pool(kv_pool: Tensor) -> None:
    entry = kv_pool.shape[3] * kv_pool.shape[4]
    packed = (BLOCK * entry, entry, kv_pool.shape[4], 1)
    assert kv_pool.stride()[1:] == packed, f"attention: strides {kv_pool.stride()} of the pool are not those of blocks"


def _packed(x_THD: Tensor) -> Tensor:
    """Heads one behind the other; tokens anywhere."""
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()
