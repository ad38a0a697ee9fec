"""Where the rows of a step stand: what the host could not know of it, moved on the device in one launch each.

All of it is integers, but for the hidden states of `carry_hidden`. Fixed shapes and no waiting: each can be part of a
graph. Rows without blocks and slots are padding: they write nothing.

Shape letters: S seats and one that is nobody's, B rows, L tokens of each row, T = B * L, N blocks of a row, G tokens
that are kept for each seat, O outcomes that a slot is known for, P slots, D hidden width.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.places import reference
from deltaserve.ops.places.entries import Entries


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
    """The tokens and blocks of rows that extend; and those that may start later than was said do so by what their seats
    gained, at most `num_open`.

    Name          Shape      Dtype   Meaning
    seat          [B]        int64   of each row
    recent        [S, G]     int64   the newest tokens of each seat, of which a row takes the first L
    gained        [S]        int64
    block_table   [S, N]     int32   -1: no block
    num_open      [B]        int64   0: the row's numbers are right
    later_slot    [B, O]     int64   the slot to read if the row starts so much later, from 0
    token         [T]        int64   written
    position      [T]        int64   moved on, as all that follow
    kv_index      [T]        int64
    context_len   [B]        int32
    read_slot     [B]        int64
    later         [B]        int64   written: by how much each row starts later
    returns       [B, N]     int32   the rows' blocks
    """
    if has_kernels(token_T):
        from deltaserve.ops.places import triton_places

        return triton_places.begin_rows(
            *(seat_B, recent_SG, gained_S, block_table_SN, num_open_B, later_slot_BO),
            *(token_T, position_T, kv_index_T, context_len_B, read_slot_B, later_B),
        )
    return reference.begin_rows(
        *(seat_B, recent_SG, gained_S, block_table_SN, num_open_B, later_slot_BO),
        *(token_T, position_T, kv_index_T, context_len_B, read_slot_B, later_B),
    )


def entries_of(
    seat_B: Tensor,
    block_table_SN: Tensor,
    position_T: Tensor,
    context_len_B: Tensor,
    num_given_B: Tensor,
    max_len: int,
) -> Entries:
    """One entry behind each token of a step, of which the first `num_given` [B] int64 of each row are true. Those
    behind `max_len` tokens are kept nowhere."""
    if has_kernels(position_T):
        from deltaserve.ops.places import triton_places

        return triton_places.entries_of(seat_B, block_table_SN, position_T, context_len_B, num_given_B, max_len)
    return reference.entries_of(seat_B, block_table_SN, position_T, context_len_B, num_given_B, max_len)


def next_entries(seat_B: Tensor, block_table_SN: Tensor, place_B: Tensor, max_len: int) -> Entries:
    """One entry of each row behind `place`, which moves on with it, to `max_len` - 1 at most."""
    if has_kernels(place_B):
        from deltaserve.ops.places import triton_places

        return triton_places.next_entries(seat_B, block_table_SN, place_B, max_len)
    return reference.next_entries(seat_B, block_table_SN, place_B, max_len)


def remember(
    outcome_BX: Tensor, seat_B: Tensor, recent_SG: Tensor, gained_S: Tensor, token_T: Tensor, num_given_B: Tensor
) -> None:
    """What rows have given, for whoever comes next.

    Name        Shape        Dtype   Meaning
    outcome     [B, 2 + L]   int64   tokens given, anything, the tokens
    seat        [B]          int64   of each row; no two are one
    recent      [S, G]       int64   the last token given is written to the first place
    gained      [S]          int64   tokens given but one are written
    token       [>= B * L]   int64   all tokens are written, row after row
    num_given   [>= B]       int64   written
    """
    if has_kernels(outcome_BX):
        from deltaserve.ops.places import triton_places

        triton_places.remember(outcome_BX, seat_B, recent_SG, gained_S, token_T, num_given_B)
        return
    reference.remember(outcome_BX, seat_B, recent_SG, gained_S, token_T, num_given_B)


def note_guess(token_B: Tensor, seat_B: Tensor, recent_SG: Tensor, place: int, newest_B: Tensor) -> None:
    """A guess of each row [B] int64 goes to a place of its seat in `recent` [S, G], and to `newest` [>= B]."""
    if has_kernels(token_B):
        from deltaserve.ops.places import triton_places

        triton_places.note_guess(token_B, seat_B, recent_SG, place, newest_B)
        return
    reference.note_guess(token_B, seat_B, recent_SG, place, newest_B)


def carry_hidden(
    hidden_PD: Tensor, read_slot_B: Tensor, write_slot_T: Tensor, hidden_TD: Tensor, before_BD: Tensor, alike: bool
) -> None:
    """Hidden states go to the slots of their tokens, after those before each row's first token are taken to `before`
    from the slots that rows read; anything where these are -1. The last slot may hold anything. `alike`: of L tokens
    each.

    A slot that one row writes is read and written by no other row.
    """
    if alike and has_kernels(hidden_TD):
        from deltaserve.ops.places import triton_places

        triton_places.carry_hidden(hidden_PD, read_slot_B, write_slot_T, hidden_TD, before_BD)
        return
    reference.carry_hidden(hidden_PD, read_slot_B, write_slot_T, hidden_TD, before_BD)
