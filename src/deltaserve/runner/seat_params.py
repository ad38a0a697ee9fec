"""The sampling parameters of the requests that sit. Knows no logits and no step.

They are numbers that only a new seating changes, so their table is the host's: a step copies its rows to the device in
one piece, together with the positions, and nothing needs to be gathered there.

Shape letters: S seats, R rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import Seating
from deltaserve.core.request import SamplingParams
from deltaserve.ops.sampling.api import stream_key
from deltaserve.runner.token_counts import TokenCounts, send

TOKEN_STREAM = 0
"""The noise that draws tokens. Another use of a request's seed takes another stream."""

LEAST_TEMPERATURE = 1e-30
"""What float32 can still divide by; far below it already, only the most likely token has any weight."""

_NUM_FLOATS = 6
_NUM_INTEGERS = 4


@dataclass(frozen=True)
class Seat:
    """What the host must know of a request to decide which stages a step needs."""

    greedy: bool
    cut_width: int
    """How many logits top-k and top-p must see sorted; 0 when both cut nothing."""
    top_p: bool
    min_p: bool
    num_logprobs: int | None
    count_row: int | None
    """Row of the token counts, for a request with penalties."""
    bias: tuple[Tensor, Tensor] | None
    """Token ids, and what is added to their logits."""
    banned: Tensor | None
    """Token ids that may not come before min_tokens ..."""
    free_from: int
    """... which is the token of this number in the sequence."""

    @property
    def is_plain(self) -> bool:
        """Takes the most likely token of the logits as they are."""
        return self.greedy and self.count_row is None and not self.bias and self.banned is None


class RowParams(NamedTuple):
    """The parameters of the rows of a step, on the device: each [R], float64 or int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    key: Tensor
    """For the noise that draws tokens."""
    top_k: Tensor
    """The size of the vocabulary where nothing is cut."""
    free_from: Tensor
    """Number, in the sequence, of the first token that min_tokens does not restrict."""
    position: Tensor
    """Number, in the sequence, of the token to draw."""

    def pick(self, rows: Tensor) -> RowParams:
        return RowParams(*(column[rows] for column in self))


class SeatParams:
    def __init__(self, num_seats: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the logits."""
        self._vocab_size = vocab_size
        self._device = device
        self._dtype = dtype
        self._seats: dict[int, Seat] = {}
        self.counts = TokenCounts(vocab_size, device)
        # The columns of RowParams in their order; the bits of the float64 ones, so that one copy moves all.
        self._table = np.zeros((num_seats, _NUM_FLOATS + _NUM_INTEGERS), dtype=np.int64)

    def __getitem__(self, seat: int) -> Seat:
        return self._seats[seat]

    def seat(self, seating: Seating) -> None:
        """Take over a request's parameters and count its tokens afresh. Replaces whoever sat there."""
        params = seating.params
        assert params.seed is not None, f"seat {seating.seat} has no seed"
        before = self._seats.get(seating.seat)
        if before is not None and before.count_row is not None:
            self.counts.give_back(before.count_row)

        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        free_from = seating.num_prompt + params.min_tokens
        self._seats[seating.seat] = Seat(
            greedy=params.temperature == 0,
            cut_width=top_k if top_k < self._vocab_size or params.top_p < 1 else 0,
            top_p=params.top_p < 1,
            min_p=params.min_p > 0,
            num_logprobs=None if params.logprobs is None else min(params.logprobs, self._vocab_size),
            count_row=self.counts.take(seating.known, seating.num_prompt) if penalties != (1, 0, 0) else None,
            bias=self._bias(params),
            banned=self._banned(params),
            free_from=free_from,
        )
        floats = (max(params.temperature, LEAST_TEMPERATURE), params.top_p, params.min_p, *penalties)
        integers = (stream_key(params.seed, TOKEN_STREAM), top_k, free_from, 0)
        self._table[seating.seat, :_NUM_FLOATS].view(np.float64)[:] = floats
        self._table[seating.seat, _NUM_FLOATS:] = integers

    def rows(self, seats: Sequence[int], positions: Sequence[int] | Tensor) -> RowParams:
        """Of one seat per row. `positions` [R]: on the host, or an int64 tensor on the device."""
        table = self._table[list(seats)]
        if not isinstance(positions, Tensor):
            table[:, -1] = positions
        table_RX = send(torch.from_numpy(table), self._device)
        floats = table_RX[:, :_NUM_FLOATS].view(torch.float64).unbind(1)
        integers = table_RX[:, _NUM_FLOATS:].unbind(1)
        if isinstance(positions, Tensor):
            integers = (*integers[:-1], positions)
        return RowParams(*floats, *integers)

    def _bias(self, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        if not params.logit_bias:
            return None
        ids, added = zip(*sorted(params.logit_bias.items()), strict=True)
        return self._tensor(ids), self._tensor(added, self._dtype)

    def _banned(self, params: SamplingParams) -> Tensor | None:
        # An id beyond the vocabulary can be asked for as a stop, and never comes.
        ids = sorted({token for token in params.stop_token_ids if 0 <= token < self._vocab_size})
        return self._tensor(ids) if ids and params.min_tokens > 0 else None

    def _tensor(self, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return send(torch.tensor(numbers, dtype=dtype), self._device)
