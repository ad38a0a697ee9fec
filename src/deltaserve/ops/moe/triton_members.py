"""Gathers the pairs of each expert into tiles, and adds up a token's outputs. Knows no weights and no scores.

A pair is a token and one of its experts; token t's are the pairs t * K to t * K + K - 1. Up to 16 tokens: whoever wants
a tile looks for it (`tile_of`). Few pairs: one launch, a program per expert that looks at all of them. Many: each takes
a number at its expert (`count_kernel`; the last program to end turns the numbers given into each expert's first tile),
then goes to its place (`place_kernel`): bytes move once. Which tile a pair is in, and where, depends on who came first
and changes nothing of its result.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs

FEW = 512
"""Pairs up to which one launch is faster."""
MAX_EXPERTS = 4096


@triton.jit
def tile_of(members_ptr, experts_ptr, count_ptr, pairs, tile, K: tl.constexpr, BM: tl.constexpr, DIRECT: tl.constexpr):
    """Whether there is this tile, its expert, and its pairs [BM], -1 where it has no more.

    DIRECT: the power of two that holds K, where `members_ptr` is the ids of at most BM tokens. Each pair is then a tile
    of its expert's, which has one pair of a token at most, and the first of them is the one that counts.
    """
    if DIRECT > 0:
        t, place = tl.arange(0, BM)[:, None], tl.arange(0, DIRECT)[None, :]
        number = t * K + place
        expert = tl.load(members_ptr + tile)
        its = tl.load(members_ptr + number, mask=(place < K) & (number < pairs), other=-1) == expert
        pair = tl.max(tl.where(its, number, -1), 1)
        is_tile = tl.min(tl.where(pair >= 0, pair, pairs), 0) == tile
    else:
        is_tile = tile < tl.load(count_ptr)
        expert = tl.load(experts_ptr + tile)
        pair = tl.load(members_ptr + tile.to(tl.int64) * BM + tl.arange(0, BM))
    return is_tile, expert.to(tl.int64), pair


@triton.jit(do_not_specialize=["pairs"])
def group_kernel(
    ids_ptr, sorted_ptr, expert_ptr, count_ptr, pairs, BM: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    e = tl.program_id(0)
    hits = tl.zeros((BP,), tl.int32)
    for start in range(0, pairs, BP):
        p = start + tl.arange(0, BP)
        hits += (tl.load(ids_ptr + p, mask=p < pairs, other=-1) == e).to(tl.int32)
    number = tl.sum(hits, 0)
    if number > 0:
        tiles = tl.cdiv(number, BM)
        # Whoever comes first gets the first tiles.
        first = tl.atomic_add(count_ptr, tiles, sem="relaxed")
        sorted_ptr += first.to(tl.int64) * BM
        for tile in range(tiles):
            tl.store(expert_ptr + first + tile, e)
        done = 0
        for start in range(0, pairs, BP):
            p = start + tl.arange(0, BP)
            mine = (tl.load(ids_ptr + p, mask=p < pairs, other=-1) == e).to(tl.int32)
            tl.store(sorted_ptr + done + tl.cumsum(mine, 0) - 1, p, mask=mine == 1)
            done += tl.sum(mine, 0)
        FILL: tl.constexpr = triton.next_power_of_2(BM)
        rest = number + tl.arange(0, FILL)
        tl.store(sorted_ptr + rest, tl.full((FILL,), -1, tl.int32), mask=rest < tiles * BM)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    ids_ptr,
    turn_ptr,
    first_ptr,
    number_ptr,
    count_ptr,
    given_ptr,
    pairs,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    # Of the expert that all tokens take, a token's number is its own: nobody stands in line for it.
    asks = (p < pairs) & ((p % K != K - 1) if SHARED else (p >= 0))
    expert = tl.load(ids_ptr + p, mask=asks, other=0)
    turn = tl.atomic_add(given_ptr + expert, 1, mask=asks, sem="relaxed")
    tl.store(turn_ptr + p, tl.where(asks, turn, p // K), mask=p < pairs)
    tl.debug_barrier()  # every thread has its numbers before the program counts itself
    if tl.atomic_add(given_ptr + E, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        e = tl.arange(0, EP)
        number = tl.load(given_ptr + e, mask=e < E, other=0, cache_modifier=".cg")
        if SHARED:
            number = tl.where(e == E - 1, pairs // K, number)
        tiles = (number + BM - 1) // BM
        tl.store(number_ptr + e, number, mask=e < E)
        tl.store(first_ptr + e, tl.cumsum(tiles, 0) - tiles, mask=e < E)
        tl.store(count_ptr, tl.sum(tiles, 0))
        tl.store(given_ptr + e, tl.zeros((EP,), tl.int32), mask=e < E)
        tl.store(given_ptr + E, 0)


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids_ptr,
    turn_ptr,
    first_ptr,
    number_ptr,
    sorted_ptr,
    expert_ptr,
    pairs,
    E: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    if program * BE < E:  # the first programs fill the experts' last tiles up
        e = program * BE + tl.arange(0, BE)
        first = tl.load(first_ptr + e, mask=e < E, other=0)
        number = tl.load(number_ptr + e, mask=e < E, other=0)
        tiles = (number + BM - 1) // BM
        FILL: tl.constexpr = triton.next_power_of_2(BM)
        rest = number[:, None] + tl.arange(0, FILL)[None, :]
        empty = sorted_ptr + first.to(tl.int64)[:, None] * BM + rest
        tl.store(empty, tl.full((BE, FILL), -1, tl.int32), mask=rest < tiles[:, None] * BM)
        for start in range(0, tl.max(tiles, 0), 32):
            tile = start + tl.arange(0, 32)[None, :]
            own = tl.broadcast_to(e[:, None], (BE, 32))
            tl.store(expert_ptr + first[:, None] + tile, own, mask=tile < tiles[:, None])
    else:
        p = (program - tl.cdiv(E, BE)) * BP + tl.arange(0, BP)
        kept = p < pairs
        its_first = tl.load(first_ptr + tl.load(ids_ptr + p, mask=kept, other=0), mask=kept, other=0)
        turn = tl.load(turn_ptr + p, mask=kept, other=0)
        tl.store(sorted_ptr + its_first.to(tl.int64) * BM + turn, p, mask=kept)


@triton.jit
def sum_kernel(y_ptr, out_ptr, K: tl.constexpr, WIDTH: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(K):
        total += tl.load(y_ptr + (t * K + i) * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * WIDTH + d, total.to(out_ptr.dtype.element_ty), mask=d < WIDTH)


@lru_cache(maxsize=16)
def _given(device: torch.device) -> Tensor:
    """Numbers given at each expert, and programs that have ended: zero between launches."""
    return torch.zeros(MAX_EXPERTS + 1, dtype=torch.int32, device=device)


def same(ids_TK: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place of `group`'s tables, for at most 16 tokens and tiles of 16: the ids themselves, among which each tile
    finds its pairs. A launch less."""
    return ids_TK.view(-1), ids_TK.view(-1), count


def direct(tables: tuple[Tensor, Tensor, Tensor], top_k: int) -> int:
    """`tile_of`'s DIRECT of these tables."""
    return triton.next_power_of_2(top_k) if tables[0].dim() == 1 else 0


def group(
    ids_TK: Tensor, count: Tensor, num_experts: int, size: int, shared: bool = False, early: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Cuts each expert's pairs into tiles of `size`. `shared`: each token's last expert is the last of
    all, and no other.

    Returns the pairs, int32 [tiles, size] with -1 where a tile is not full, and the tiles' experts [tiles]. `count`,
    zero before, is the number of tiles after; what stands behind them is anything.

    Variants: K, `num_experts`, `size`, few pairs or many.
    """
    pairs, device = ids_TK.numel(), ids_TK.device
    tiles = min(pairs, num_experts) + pairs // size
    members = torch.empty(tiles, size, dtype=torch.int32, device=device)
    experts = torch.empty(tiles, dtype=torch.int32, device=device)
    options = early_options(device, early, len(ids_TK))
    if pairs <= FEW:
        group_kernel[(num_experts,)](ids_TK, members, experts, count, pairs, BM=size, BP=FEW, num_warps=4, **options)
        return members, experts
    assert num_experts <= MAX_EXPERTS, f"moe: {num_experts} experts, at most {MAX_EXPERTS}"
    turn = torch.empty(pairs, dtype=torch.int32, device=device)
    first, number = torch.empty(2, num_experts, dtype=torch.int32, device=device)
    block, each = 512, 16
    programs, fillers = triton.cdiv(pairs, block), triton.cdiv(num_experts, each)
    count_kernel[(programs,)](
        ids_TK,
        turn,
        first,
        number,
        count,
        _given(device),
        pairs,
        E=num_experts,
        K=ids_TK.shape[1],
        EP=triton.next_power_of_2(num_experts),
        BM=size,
        BP=block,
        SHARED=shared,
        num_warps=4,
        **options,
    )
    place_kernel[(fillers + programs,)](
        ids_TK,
        turn,
        first,
        number,
        members,
        experts,
        pairs,
        E=num_experts,
        BM=size,
        BP=block,
        BE=each,
        num_warps=4,
        **options,
    )
    return members, experts


def add_up(y_TKD: Tensor, dtype: torch.dtype, early: bool | None = None) -> Tensor:
    """The sums of K rows after another, always in their order: contiguous [T, K, D] -> [T, D] in `dtype`."""
    tokens, top_k, width = y_TKD.shape
    out = torch.empty(tokens, width, dtype=dtype, device=y_TKD.device)
    block = min(1024, triton.next_power_of_2(width))
    sum_kernel[(tokens, triton.cdiv(width, block))](
        y_TKD, out, K=top_k, WIDTH=width, BD=block, num_warps=4, **early_options(y_TKD.device, early, tokens)
    )
    return out
