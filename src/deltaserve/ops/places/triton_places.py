"""The places of a step's rows on a GPU: one program for each row, one launch for each question.

Numbers of rows, tokens and blocks make no variants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.layout import BLOCK
from deltaserve.ops.places.entries import Entries

SPAN, TOKENS = 1024, 16
"""Blocks and tokens of a row that a program takes in one turn."""
COLUMNS = 1024
"""Of a hidden state."""
ROWS = 32
"""Of a program that has a number of each."""


@triton.jit
def _copy_blocks(to, source, num_blocks, SPAN: tl.constexpr):
    for first in range(0, num_blocks, SPAN):
        block = first + tl.arange(0, SPAN)
        tl.store(to + block, tl.load(source + block, mask=block < num_blocks, other=-1), mask=block < num_blocks)


@triton.jit
def _kv_places(block, position, BLOCK: tl.constexpr):
    return tl.where(block >= 0, block.to(tl.int64) * BLOCK + position % BLOCK, -1)


@triton.jit(
    do_not_specialize=["length", "num_blocks", "recent_stride", "later_stride"],
    do_not_specialize_on_alignment=[
        "seat_ptr", "num_open_ptr", "later_slot_ptr", "token_ptr", "position_ptr", "kv_index_ptr", "context_ptr",
        "read_slot_ptr", "later_ptr",
    ],
)  # fmt: skip
def begin_kernel(
    seat_ptr,
    recent_ptr,
    gained_ptr,
    block_table_ptr,
    num_open_ptr,
    later_slot_ptr,
    token_ptr,
    position_ptr,
    kv_index_ptr,
    context_ptr,
    read_slot_ptr,
    later_ptr,
    table_ptr,
    length,
    num_blocks,
    recent_stride,
    later_stride,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seat_ptr + row)
    num_open = tl.load(num_open_ptr + row)
    blocks = block_table_ptr + seat * num_blocks
    later = tl.minimum(tl.load(gained_ptr + seat), num_open)
    moved = tl.where(num_open > 0, length, 0)  # tokens whose places the host could not know
    for first in range(0, length, TOKENS):
        i = first + tl.arange(0, TOKENS)
        inside = i < length
        at = row * length + i
        position = tl.load(position_ptr + at, mask=inside, other=0) + later
        tl.store(token_ptr + at, tl.load(recent_ptr + seat * recent_stride + i, mask=inside, other=0), mask=inside)
        tl.store(position_ptr + at, position, mask=inside)
        block = tl.load(blocks + position // BLOCK, mask=i < moved, other=-1)
        tl.store(kv_index_ptr + at, _kv_places(block, position, BLOCK), mask=i < moved)
    tl.store(later_ptr + row, later)
    tl.store(context_ptr + row, tl.load(context_ptr + row) + later.to(tl.int32))
    if num_open > 0:
        tl.store(read_slot_ptr + row, tl.load(later_slot_ptr + row * later_stride + later))
    _copy_blocks(table_ptr + row * num_blocks, blocks, num_blocks, SPAN)


@triton.jit(
    do_not_specialize=["length", "num_blocks", "max_len"],
    do_not_specialize_on_alignment=[
        "seat_ptr", "position_ptr", "context_ptr", "num_given_ptr", "entry_ptr", "kv_index_ptr", "place_ptr",
        "last_ptr",
    ],
)  # fmt: skip
def entries_kernel(
    seat_ptr,
    block_table_ptr,
    position_ptr,
    context_ptr,
    num_given_ptr,
    table_ptr,
    entry_ptr,
    kv_index_ptr,
    entry_context_ptr,
    place_ptr,
    last_ptr,
    length,
    num_blocks,
    max_len,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blocks = block_table_ptr + tl.load(seat_ptr + row) * num_blocks
    for first in range(0, length, TOKENS):
        i = first + tl.arange(0, TOKENS)
        inside = i < length
        at = row * length + i
        behind = tl.load(position_ptr + at, mask=inside, other=0) + 1
        entry = tl.minimum(behind, max_len - 1)
        block = tl.load(blocks + entry // BLOCK, mask=inside & (behind < max_len), other=-1)
        tl.store(entry_ptr + at, entry, mask=inside)
        tl.store(kv_index_ptr + at, _kv_places(block, entry, BLOCK), mask=inside)
    context = tl.load(context_ptr + row)
    tl.store(entry_context_ptr + row, tl.where(context > 0, tl.minimum(context + 1, max_len), 0))
    # A padding row's number is of an older step, which may have had longer rows.
    num_given = tl.minimum(tl.load(num_given_ptr + row), length)
    tl.store(last_ptr + row, row * length + num_given - 1)
    tl.store(place_ptr + row, tl.load(position_ptr + row * length) + num_given)
    _copy_blocks(table_ptr + row * num_blocks, blocks, num_blocks, SPAN)


@triton.jit(
    do_not_specialize=["num_blocks", "max_len"],
    do_not_specialize_on_alignment=["seat_ptr", "place_ptr", "entry_ptr", "kv_index_ptr"],
)
def next_kernel(
    seat_ptr,
    block_table_ptr,
    place_ptr,
    table_ptr,
    entry_ptr,
    kv_index_ptr,
    context_ptr,
    num_blocks,
    max_len,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blocks = block_table_ptr + tl.load(seat_ptr + row) * num_blocks
    place = tl.minimum(tl.load(place_ptr + row) + 1, max_len - 1)
    block = tl.load(blocks + place // BLOCK)
    tl.store(place_ptr + row, place)
    tl.store(entry_ptr + row, place)
    tl.store(kv_index_ptr + row, _kv_places(block, place, BLOCK))
    tl.store(context_ptr + row, tl.where(block >= 0, place + 1, 0).to(tl.int32))
    _copy_blocks(table_ptr + row * num_blocks, blocks, num_blocks, SPAN)


@triton.jit(
    do_not_specialize=["length", "recent_stride"],
    do_not_specialize_on_alignment=["outcome_ptr", "seat_ptr", "token_ptr", "num_given_ptr"],
)
def remember_kernel(
    outcome_ptr,
    seat_ptr,
    recent_ptr,
    gained_ptr,
    token_ptr,
    num_given_ptr,
    length,
    recent_stride,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outcome = outcome_ptr + row * (length + 2)
    seat = tl.load(seat_ptr + row)
    num_given = tl.load(outcome)
    tl.store(recent_ptr + seat * recent_stride, tl.load(outcome + 1 + num_given))
    tl.store(gained_ptr + seat, num_given - 1)
    tl.store(num_given_ptr + row, num_given)
    for first in range(0, length, TOKENS):
        i = first + tl.arange(0, TOKENS)
        tl.store(token_ptr + row * length + i, tl.load(outcome + 2 + i, mask=i < length, other=0), mask=i < length)


@triton.jit(
    do_not_specialize=["rows", "recent_stride", "place"],
    do_not_specialize_on_alignment=["token_ptr", "seat_ptr", "newest_ptr"],
)
def note_kernel(token_ptr, seat_ptr, recent_ptr, newest_ptr, rows, recent_stride, place, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.load(token_ptr + row, mask=row < rows, other=0)
    seat = tl.load(seat_ptr + row, mask=row < rows, other=0)
    tl.store(recent_ptr + seat * recent_stride + place, token, mask=row < rows)
    tl.store(newest_ptr + row, token, mask=row < rows)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["read_slot_ptr", "write_slot_ptr"])
def carry_kernel(
    pool_ptr,
    read_slot_ptr,
    write_slot_ptr,
    hidden_ptr,
    before_ptr,
    length,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid [rows, parts of the width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    slot = tl.load(read_slot_ptr + row)
    from_slot = pool_ptr + tl.where(slot >= 0, slot, 0) * WIDTH
    before = tl.load(from_slot + column, mask=column < tl.where(slot >= 0, WIDTH, 0), other=0)
    tl.store(before_ptr + row * WIDTH + column, before, mask=inside)
    tl.debug_barrier()  # what was read may be written now
    for i in range(length):
        slot = tl.load(write_slot_ptr + row * length + i)
        hidden = tl.load(hidden_ptr + (row * length + i) * WIDTH + column, mask=inside, other=0)
        to_slot = pool_ptr + tl.where(slot >= 0, slot, 0) * WIDTH
        tl.store(to_slot + column, hidden, mask=column < tl.where(slot >= 0, WIDTH, 0))


def begin_rows(
    seat_B: Tensor,
    recent_SG: Tensor,
    gained_S: Tensor,
    block_table_SN: Tensor,
    num_open_B: Tensor,
    later_slot_BO: Tensor,
    token_T: Tensor,
    position_T: Tensor,
    kv_index_T: Tensor,
    context_len_B: Tensor,
    read_slot_B: Tensor,
    later_B: Tensor,
) -> Tensor:
    rows, num_blocks = len(seat_B), block_table_SN.shape[1]
    table_BN = torch.empty(rows, num_blocks, dtype=torch.int32, device=seat_B.device)
    begin_kernel[(rows,)](
        seat_B, recent_SG, gained_S, block_table_SN, num_open_B, later_slot_BO, token_T, position_T, kv_index_T,
        context_len_B, read_slot_B, later_B, table_BN, len(token_T) // rows, num_blocks, recent_SG.stride(0),
        later_slot_BO.stride(0), BLOCK=BLOCK, SPAN=SPAN, TOKENS=TOKENS, num_warps=1,
    )  # fmt: skip
    return table_BN


def entries_of(
    seat_B: Tensor,
    block_table_SN: Tensor,
    position_T: Tensor,
    context_len_B: Tensor,
    num_given_B: Tensor,
    max_len: int,
) -> Entries:
    rows, num_blocks = len(seat_B), block_table_SN.shape[1]
    made = Entries(
        torch.empty(rows, num_blocks, dtype=torch.int32, device=seat_B.device),
        *torch.empty(2, len(position_T), dtype=torch.int64, device=seat_B.device),
        torch.empty(rows, dtype=torch.int32, device=seat_B.device),
        *torch.empty(2, rows, dtype=torch.int64, device=seat_B.device),
    )
    entries_kernel[(rows,)](
        seat_B, block_table_SN, position_T, context_len_B, num_given_B, *made, len(position_T) // rows, num_blocks,
        max_len, BLOCK=BLOCK, SPAN=SPAN, TOKENS=TOKENS, num_warps=1,
    )  # fmt: skip
    return made


def next_entries(seat_B: Tensor, block_table_SN: Tensor, place_B: Tensor, max_len: int) -> Entries:
    rows, num_blocks = len(seat_B), block_table_SN.shape[1]
    table_BN = torch.empty(rows, num_blocks, dtype=torch.int32, device=seat_B.device)
    entry_B, kv_index_B = torch.empty(2, rows, dtype=torch.int64, device=seat_B.device)
    context_len_B = torch.empty(rows, dtype=torch.int32, device=seat_B.device)
    next_kernel[(rows,)](
        seat_B, block_table_SN, place_B, table_BN, entry_B, kv_index_B, context_len_B, num_blocks, max_len,
        BLOCK=BLOCK, SPAN=SPAN, num_warps=1,
    )  # fmt: skip
    return Entries(table_BN, entry_B, kv_index_B, context_len_B, place_B)


def remember(
    outcome_BX: Tensor, seat_B: Tensor, recent_SG: Tensor, gained_S: Tensor, token_T: Tensor, num_given_B: Tensor
) -> None:
    remember_kernel[(len(seat_B),)](
        outcome_BX, seat_B, recent_SG, gained_S, token_T, num_given_B, outcome_BX.shape[1] - 2, recent_SG.stride(0),
        TOKENS=TOKENS, num_warps=1,
    )  # fmt: skip


def note_guess(token_B: Tensor, seat_B: Tensor, recent_SG: Tensor, place: int, newest_B: Tensor) -> None:
    rows = len(token_B)
    note_kernel[(triton.cdiv(rows, ROWS),)](
        token_B, seat_B, recent_SG, newest_B, rows, recent_SG.stride(0), place, ROWS=ROWS, num_warps=1
    )


def carry_hidden(
    hidden_PD: Tensor, read_slot_B: Tensor, write_slot_T: Tensor, hidden_TD: Tensor, before_BD: Tensor
) -> None:
    rows, width = before_BD.shape
    carry_kernel[(rows, triton.cdiv(width, COLUMNS))](
        hidden_PD, read_slot_B, write_slot_T, hidden_TD, before_BD, len(write_slot_T) // rows,
        WIDTH=width, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
