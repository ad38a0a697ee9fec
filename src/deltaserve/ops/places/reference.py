"""The places of a step's rows in torch; the contracts are in `api`."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops.layout import BLOCK
from deltaserve.ops.places.entries import Entries


def kv_places(block_T: Tensor, position_T: Tensor) -> Tensor:
    """Where the keys of these positions are kept, by their blocks; -1 without a block."""
    return torch.where(block_T >= 0, block_T.long() * BLOCK + position_T % BLOCK, -1)


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
    rows = len(seat_B)
    token_T.view(rows, -1).copy_(recent_SG.index_select(0, seat_B)[:, : len(token_T) // rows])
    torch.minimum(gained_S.index_select(0, seat_B), num_open_B, out=later_B)
    position_BL = position_T.view(rows, -1)
    position_BL += later_B[:, None]
    block_BL = block_table_SN[seat_B[:, None], position_BL // BLOCK]
    is_open_B1 = num_open_B[:, None] > 0
    kv_index_BL = kv_index_T.view(rows, -1)
    kv_index_BL.copy_(torch.where(is_open_B1, kv_places(block_BL, position_BL), kv_index_BL))
    context_len_B += later_B.int()
    later_slot_B = later_slot_BO.gather(1, later_B[:, None]).squeeze(1)
    read_slot_B.copy_(torch.where(is_open_B1[:, 0], later_slot_B, read_slot_B))
    return block_table_SN.index_select(0, seat_B)


def entries_of(
    seat_B: Tensor,
    block_table_SN: Tensor,
    position_T: Tensor,
    context_len_B: Tensor,
    num_given_B: Tensor,
    max_len: int,
) -> Entries:
    rows, length = len(seat_B), len(position_T) // len(seat_B)
    table_BN = block_table_SN.index_select(0, seat_B)
    behind_T = position_T + 1
    entry_T = behind_T.clamp(max=max_len - 1)
    block_T = table_BN.gather(1, (entry_T // BLOCK).view(rows, -1)).view(-1)
    kv_index_T = torch.where(behind_T < max_len, kv_places(block_T, entry_T), -1)
    context_B = torch.where(context_len_B > 0, context_len_B + 1, 0).clamp(max=max_len)
    # A padding row's number is of an older step, which may have had longer rows.
    num_B = num_given_B.clamp(max=length)
    last_B = torch.arange(rows, device=seat_B.device) * length + num_B - 1
    return Entries(table_BN, entry_T, kv_index_T, context_B, position_T[::length] + num_B, last_B)


def next_entries(seat_B: Tensor, block_table_SN: Tensor, place_B: Tensor, max_len: int) -> Entries:
    place_B.copy_((place_B + 1).clamp(max=max_len - 1))
    table_BN = block_table_SN.index_select(0, seat_B)
    block_B = table_BN.gather(1, (place_B // BLOCK)[:, None]).view(-1)
    context_len_B = torch.where(block_B >= 0, place_B + 1, 0).int()
    return Entries(table_BN, place_B.clone(), kv_places(block_B, place_B), context_len_B, place_B)


def remember(
    outcome_BX: Tensor, seat_B: Tensor, recent_SG: Tensor, gained_S: Tensor, token_T: Tensor, num_given_B: Tensor
) -> None:
    num_B, token_BL = outcome_BX[:, 0], outcome_BX[:, 2:]
    recent_SG[:, 0].index_copy_(0, seat_B, token_BL.gather(1, num_B[:, None] - 1).squeeze(1))
    gained_S.index_copy_(0, seat_B, num_B - 1)
    token_T[: token_BL.numel()].view(token_BL.shape).copy_(token_BL)
    num_given_B[: len(num_B)].copy_(num_B)


def note_guess(token_B: Tensor, seat_B: Tensor, recent_SG: Tensor, place: int, newest_B: Tensor) -> None:
    recent_SG[:, place].index_copy_(0, seat_B, token_B)
    newest_B[: len(token_B)].copy_(token_B)


def carry_hidden(
    hidden_PD: Tensor, read_slot_B: Tensor, write_slot_T: Tensor, hidden_TD: Tensor, before_BD: Tensor
) -> None:
    torch.index_select(hidden_PD, 0, read_slot_B.clamp(min=0), out=before_BD)
    hidden_PD.index_copy_(0, torch.where(write_slot_T >= 0, write_slot_T, len(hidden_PD) - 1), hidden_TD)
