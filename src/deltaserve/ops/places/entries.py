"""What is answered about the entries behind a step's rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Entries(NamedTuple):
    """
    Name          Shape    Dtype   Meaning
    block_table   [B, N]   int32   of each row's seat
    position      [T]      int64   of each entry
    kv_index      [T]      int64   where it goes; -1 goes nowhere
    context_len   [B]      int32   entries that the row's last one sees, itself included; 0 for padding
    place         [B]      int64   the position of each row's last true entry
    last          [B]      int64   its number among the T; None: rows have one entry each
    """

    block_table: Tensor
    position: Tensor
    kv_index: Tensor
    context_len: Tensor
    place: Tensor
    last: Tensor | None = None
