"""Which guesses were right, and noise, on a GPU: one launch each for what torch takes a dozen for.

Numbers of rows and tokens make no variants.

Shape letters: B requests, J tokens of each, K = J - 1 guesses, R rows, N guesses of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.sampling import reference

ROWS = 32
"""Of a program."""
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(number) for number in reference.SPLITMIX)


@triton.jit(
    do_not_specialize=["rows", "length", "token_stride", "ok_stride", "guess_stride"],
    do_not_specialize_on_alignment=["token_ptr", "ok_ptr", "guess_ptr"],
)
def right_kernel(
    token_ptr,
    ok_ptr,
    guess_ptr,
    outcome_ptr,
    rows,
    length,
    token_stride,
    ok_stride,
    guess_stride,
    ROWS: tl.constexpr,
):
    """A request of each thread; it has few tokens."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    outcome = outcome_ptr + row * (length + 2)
    num = tl.zeros([ROWS], tl.int64)
    ok = tl.full([ROWS], 1, tl.int64)
    is_meant = inside.to(tl.int64)
    for i in range(length):
        token = tl.load(token_ptr + row * token_stride + i, mask=inside, other=0)
        tl.store(outcome + 2 + i, token, mask=inside)
        num += is_meant
        ok &= tl.load(ok_ptr + row * ok_stride + i, mask=is_meant > 0, other=1).to(tl.int64)
        guess = tl.load(guess_ptr + row * guess_stride + i, mask=row < tl.where(i < length - 1, rows, 0), other=-1)
        is_meant = tl.where(token == guess, is_meant, 0)
    tl.store(outcome, num, mask=inside)
    tl.store(outcome + 1, ok, mask=inside)


@triton.jit
def uniform_of(key, position):
    """As `reference.uniform`; of int64."""
    golden, mix_1, mix_2 = tl.full((), GOLDEN, tl.uint64), tl.full((), MIX_1, tl.uint64), tl.full((), MIX_2, tl.uint64)
    x = key.to(tl.uint64) + (position + 1).to(tl.uint64) * golden
    x = (x ^ (x >> 30)) * mix_1
    x = (x ^ (x >> 27)) * mix_2
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * (2.0**-53)


@triton.jit(
    do_not_specialize=["rows", "key_stride", "position_stride"],
    do_not_specialize_on_alignment=["key_ptr", "position_ptr"],
)
def uniform_kernel(key_ptr, position_ptr, out_ptr, rows, key_stride, position_stride, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(key_ptr + row.to(tl.int64) * key_stride, mask=row < rows, other=0)
    position = tl.load(position_ptr + row.to(tl.int64) * position_stride, mask=row < rows, other=0)
    tl.store(out_ptr + row, uniform_of(key, position), mask=row < rows)


@triton.jit(
    do_not_specialize=["number", "guess_stride", "key_stride", "position_stride", "vocab"],
    do_not_specialize_on_alignment=["token_ptr", "guess_ptr", "key_ptr", "position_ptr"],
)
def pretend_kernel(
    token_ptr,
    row_ptr,
    guess_ptr,
    share_ptr,
    key_ptr,
    position_ptr,
    number,
    guess_stride,
    key_stride,
    position_stride,
    vocab,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < number
    row = tl.load(row_ptr + n, mask=inside, other=0)
    key = tl.load(key_ptr + row * key_stride, mask=inside, other=0)
    noise = uniform_of(key, tl.load(position_ptr + row * position_stride, mask=inside, other=0))
    token = tl.load(token_ptr + row, mask=inside, other=0)
    guess = tl.load(guess_ptr + n.to(tl.int64) * guess_stride, mask=inside, other=0)
    other = tl.where(token == guess, (guess + 1) % vocab, token)
    share = tl.load(share_ptr + n, mask=inside, other=0)
    tl.store(token_ptr + row, tl.where(noise < share, guess, other), mask=inside)


def count_right(token_BJ: Tensor, ok_BJ: Tensor, guess_BK: Tensor) -> Tensor:
    rows, length = token_BJ.shape
    assert token_BJ.stride(1) == ok_BJ.stride(1) == 1, "sampling: tokens have gaps"
    assert guess_BK.shape[1] < 2 or guess_BK.stride(1) == 1, "sampling: guesses have gaps"
    outcome_BX = torch.empty(rows, 2 + length, dtype=torch.int64, device=token_BJ.device)
    right_kernel[(triton.cdiv(rows, ROWS),)](
        token_BJ, ok_BJ.view(torch.uint8), guess_BK, outcome_BX, rows, length, token_BJ.stride(0), ok_BJ.stride(0),
        guess_BK.stride(0), ROWS=ROWS, num_warps=1,
    )  # fmt: skip
    return outcome_BX


def uniform(key_R: Tensor, position_R: Tensor) -> Tensor:
    out_R = torch.empty(len(key_R), dtype=torch.float64, device=key_R.device)
    if len(key_R):
        uniform_kernel[(triton.cdiv(len(key_R), ROWS),)](
            key_R, position_R, out_R, len(key_R), key_R.stride(0), position_R.stride(0), ROWS=ROWS, num_warps=1
        )
    return out_R


def pretend(
    token_R: Tensor, row_N: Tensor, guess_N: Tensor, share_N: Tensor, key_R: Tensor, position_R: Tensor, vocab: int
) -> None:
    pretend_kernel[(triton.cdiv(len(row_N), ROWS),)](
        token_R, row_N, guess_N, share_N, key_R, position_R, len(row_N), guess_N.stride(0), key_R.stride(0),
        position_R.stride(0), vocab, ROWS=ROWS, num_warps=1,
    )  # fmt: skip
