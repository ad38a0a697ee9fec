"""The inverse of I + A inside kernels, A below the diagonal. Knows no key and no gate.

From blocks of 2 x 2 on the diagonal, where it is I - A, the blocks are doubled: with T the inverse of the blocks and A'
what the doubled blocks hold beside them, T - T A' T. Powers of A, which a shorter product for the whole needs, have no
bound; the entries of these T are bounded by 1 where A is a chunk's (see triton_chunk.py).

Up to blocks of SIZE the products are a batch of SIZE x SIZE, in which no warp waits for another where a warp has a
block: on NVIDIA's GPUs blocks of 16 are taken from, and laid into, the whole as it lies in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _doubled(inverse, system, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """From the inverse of blocks of SIZE that of blocks twice as large; [.., N, N] both, products of DTYPE operands."""
    i = tl.arange(0, inverse.shape[-1])
    is_new = ((i // SIZE)[:, None] > (i // SIZE)[None, :]) & ((i // (2 * SIZE))[:, None] == (i // (2 * SIZE))[None, :])
    if len(inverse.shape) == 3:
        is_new = is_new[None, :, :]
    left = tl.dot(tl.where(is_new, system, 0).to(DTYPE), inverse.to(DTYPE), input_precision="ieee")
    if SIZE == 32:  # the others' layouts would cost more than the difference
        return tl.dot(inverse.to(DTYPE), -left.to(DTYPE), inverse, input_precision="ieee")
    return inverse - tl.dot(inverse.to(DTYPE), left.to(DTYPE), input_precision="ieee")


@triton.jit
def _of_pairs(system):
    """The inverse of 2 x 2 blocks of I + system, [.., N, N]."""
    i = tl.arange(0, system.shape[-1])
    is_same = i[:, None] == i[None, :]
    is_near = ((i // 2)[:, None] == (i // 2)[None, :]) & (i[:, None] > i[None, :])
    if len(system.shape) == 3:
        is_same, is_near = is_same[None, :, :], is_near[None, :, :]
    return tl.where(is_same, 1.0, 0.0) - tl.where(is_near, system, 0)


@triton.jit
def inverse_of(system, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """fp32 [64, 64]: of I + what of the system lies below the diagonal; all else of it is not read. SIZE of the blocks
    that are inverted as a batch: 2, none, or 16. DTYPE of the products' operands."""
    ROWS: tl.constexpr = system.shape[0]
    BLOCKS: tl.constexpr = ROWS // SIZE
    if SIZE == 2:
        inverse = _of_pairs(system)
        inverse = _doubled(inverse, system, 2, DTYPE)
        inverse = _doubled(inverse, system, 4, DTYPE)
        inverse = _doubled(inverse, system, 8, DTYPE)
    else:
        block = tl.arange(0, BLOCKS)
        is_own = (block[:, None] == block[None, :])[:, None, :, None]
        blocks = tl.sum(tl.where(is_own, tl.reshape(system, (BLOCKS, SIZE, BLOCKS, SIZE)), 0), 2)
        inverse = _of_pairs(blocks)
        inverse = _doubled(inverse, blocks, 2, DTYPE)
        inverse = _doubled(inverse, blocks, 4, DTYPE)
        inverse = _doubled(inverse, blocks, 8, DTYPE)
        inverse = tl.where(is_own, tl.expand_dims(inverse, 2), 0)
        inverse = tl.reshape(inverse, (ROWS, ROWS))
    inverse = _doubled(inverse, system, 16, DTYPE)
    return _doubled(inverse, system, 32, DTYPE)
