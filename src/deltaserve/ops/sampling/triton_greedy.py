"""The most likely token of each row of logits and whether the row is finite, in one pass over the logits on a GPU.

Two launches: the vocabulary is cut into slices, so that one row fills many multiprocessors; each leaves its largest
logit, where it first stands, and its smallest; a second launch joins a row's slices. Every logit is read once, 16 bytes
at a time. Equal logits give the lowest token because numbers of tokens are compared, never the order of arrival.

Variants: the vocabulary and the logits' dtype.

Shape letters: R rows, V vocabulary, N slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE = 4096
"""Logits of a program: 32 of each of its threads."""
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize_on_alignment=["largest_ptr", "smallest_ptr"])
def slice_kernel(
    logits_ptr,
    largest_ptr,
    smallest_ptr,
    token_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = part * SLICE + tl.arange(0, SLICE)
    inside = token < VOCAB
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # NaN counts as the smallest, and makes the row not finite
    largest = tl.max(x, 0)
    at = row * NUM_SLICES + part
    tl.store(largest_ptr + at, largest)
    tl.store(smallest_ptr + at, tl.min(tl.where(inside, x, float("inf")), 0))
    tl.store(token_ptr + at, tl.min(tl.where(inside & (x == largest), token, NOWHERE), 0))


@triton.jit(do_not_specialize_on_alignment=["largest_ptr", "smallest_ptr"])
def join_kernel(
    largest_ptr,
    smallest_ptr,
    part_token_ptr,
    token_ptr,
    finite_ptr,
    row_largest_ptr,
    NUM_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_N)
    inside = part < NUM_SLICES
    at = row * NUM_SLICES + part
    larges = tl.load(largest_ptr + at, mask=inside, other=float("-inf"))
    largest = tl.max(larges, 0)
    smallest = tl.min(tl.load(smallest_ptr + at, mask=inside, other=float("inf")), 0)
    tokens = tl.load(part_token_ptr + at, mask=inside, other=NOWHERE)
    tl.store(token_ptr + row, tl.min(tl.where(larges == largest, tokens, NOWHERE), 0).to(tl.int64))
    tl.store(finite_ptr + row, (largest - smallest < float("inf")).to(tl.uint8))
    tl.store(row_largest_ptr + row, largest)


def extremes(logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [R, V], any float but float64: the most likely token, int64 [R], of equals the lowest; whether the row
    holds neither NaN nor infinity, bool [R]; and the largest logit, float32 [R]. Tokens of rows that are not finite
    are some tokens.
    """
    rows, vocab = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    device, num_slices = logits_RV.device, triton.cdiv(vocab, SLICE)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    largest = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return token, finite, largest
    part = torch.empty(2, rows, num_slices, dtype=torch.float32, device=device)
    part_token = torch.empty(rows, num_slices, dtype=torch.int32, device=device)
    slice_kernel[(num_slices, rows)](
        logits_RV, part[0], part[1], part_token, logits_RV.stride(0),
        VOCAB=vocab, NUM_SLICES=num_slices, SLICE=SLICE, num_warps=4,
    )  # fmt: skip
    join_kernel[(rows,)](
        part[0], part[1], part_token, token, finite.view(torch.uint8), largest,
        NUM_SLICES=num_slices, BLOCK_N=triton.next_power_of_2(num_slices), num_warps=1,
    )  # fmt: skip
    return token, finite, largest
