"""From logits to tokens. Knows seats and positions; knows no queue and no text.

A row of logits predicts one token. A request with K drafts has 1 + K rows in a step: its row j predicts the token after
its first j drafts. All rows get their token at once; then each request keeps its tokens up to and including the first
that differs from the draft. A token is a function of its own logits, its seed and its position, so what a request says
depends neither on how many of its tokens came in one step nor on who shares the batch. Plain decoding is K = 0.

Order of operations on a row: repetition penalty, frequency and presence penalties, logit bias, the ban of min_tokens;
then temperature, top-k, top-p, min-p; then the draw. A stage that no row of the step needs is not run.

Shape letters: B requests of the step, R = sum(1 + drafts) rows, V vocabulary, J = 1 + the most drafts, X = 2 + J,
S seats; P, D, C, N rows picked for a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltaserve.core.plan import RowResult, Seating
from deltaserve.core.request import TokenLogprobs
from deltaserve.ops.sampling import api as ops
from deltaserve.runner import guess_rows
from deltaserve.runner.seat_params import RowParams, Seat, SeatParams
from deltaserve.runner.token_counts import send

_PIECE = 2**24
"""Logits that `prompt_logprobs` looks at at once; its temporaries are a few times as large."""


PRETENDED_STREAM = 1
"""Added to a request's key: noise apart from the tokens'."""


class NonFiniteLogitsError(ArithmeticError):
    """Some logit is NaN or infinite: the request they belong to cannot go on."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite (NaN or infinity)")


@dataclass(frozen=True)
class Drafts:
    """Guessed tokens of a step. `counts[b]` are request b's; `token_ids` [sum(counts)] int64 lies on the device."""

    counts: tuple[int, ...]
    token_ids: Tensor


@dataclass(frozen=True)
class Sampled:
    """What one step drew, on the device until somebody asks.

    Name          Shape      Dtype   Meaning
    outcome       [B, 2+J]   int64   the columns that follow
    num_tokens    [B]        int64   how many of the tokens are meant: accepted drafts + 1
    ok            [B]        int64   1 if the logits that they came from were finite
    token_ids     [B, J]     int64   the new tokens
    """

    outcome: Tensor
    logprobs: dict[int, tuple[int, int]]
    """Request (its number in the step) -> its first row in `logprob_columns`, and how many it asks for."""
    logprob_columns: tuple[Tensor, ...]
    _copied: list[_Copied] = field(default_factory=list, repr=False)

    @property
    def num_tokens(self) -> Tensor:
        return self.outcome[:, 0]

    @property
    def token_ids(self) -> Tensor:
        return self.outcome[:, 2:]

    def start_copy(self) -> None:
        """Begin to copy to the host all that `results` needs, without waiting. Later calls do nothing."""
        if not self._copied:
            self._copied.append(_Copied.of([self.outcome, *self.logprob_columns]))

    def results(self) -> list[RowResult]:
        """Waits for the copy, no longer: tokens and logprobs, or the error, one per request."""
        self.start_copy()
        outcome, *columns = self._copied[0].wait()
        results = []
        for request, (num_tokens, ok, *token_ids) in enumerate(outcome):
            if not ok:
                results.append(RowResult(error=str(NonFiniteLogitsError())))
                continue
            logprobs = None
            if request in self.logprobs:
                first, num_top = self.logprobs[request]
                logprobs = _as_logprobs(columns, range(first, first + num_tokens), num_top)
            results.append(RowResult(token_ids=token_ids[:num_tokens], logprobs=logprobs))
        return results


@dataclass(frozen=True)
class _Copied:
    """Tensors on their way to the host."""

    tensors: list[Tensor]
    arrived: torch.Event | None
    """None on a CPU, where they are the tensors themselves."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Copied:
        device = tensors[0].device
        if device.type == "cpu":
            return cls(list(tensors), None)
        pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        arrived = torch.Event(device)
        arrived.record()
        return cls(pinned, arrived)

    def wait(self) -> list[list[Any]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return [values.tolist() for values in self.tensors]


class _Rows:
    """The rows of one step, request after request."""

    def __init__(self, seats: Sequence[Seat], positions: Sequence[int] | Tensor, drafts: Drafts, behind: int) -> None:
        counts = drafts.counts
        assert len(seats) == len(positions) == len(counts), (
            f"sampling: {len(seats)} seats, {len(positions)} positions, {len(counts)} counts of drafts"
        )
        assert sum(counts) == len(drafts.token_ids), f"sampling: {len(drafts.token_ids)} drafts, {counts} are counted"
        self.seats = seats
        self._positions = positions if isinstance(positions, Tensor) or not behind else [p + behind for p in positions]
        self._behind = behind
        self._drafts = drafts
        self._device = drafts.token_ids.device
        # Row r is row offset[r] of request[r]. Request b's rows start at start[b], its drafts at start[b] - b.
        self.request = [b for b, count in enumerate(counts) for _ in range(count + 1)]
        self.offset = [j for count in counts for j in range(count + 1)]
        self.start = [row for row, offset in enumerate(self.offset) if offset == 0]

    def __len__(self) -> int:
        return len(self.request)

    def pick(self, wanted: Callable[[Seat], object]) -> list[int]:
        """Rows of the requests that want something."""
        if not any(wanted(seat) for seat in self.seats):
            return []
        return [row for row, request in enumerate(self.request) if wanted(self.seats[request])]

    @property
    def are_plain(self) -> bool:
        """Whether each takes the most likely token of its logits as they are, and nobody asks for more."""
        return all(seat.is_plain and seat.num_logprobs is None for seat in self.seats)

    def seat(self, row: int) -> Seat:
        return self.seats[self.request[row]]

    def index(self, numbers: Sequence[Any]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self._device)

    def positions(self) -> list[int] | Tensor:
        """Of every row."""
        if isinstance(self._positions, Tensor):
            request_R, offset_R = guess_rows.places(self._drafts.counts, self._behind, self._device)
            return self._positions.index_select(0, request_R) + offset_R
        return [self._positions[b] + j for b, j in zip(self.request, self.offset, strict=True)]

    def early(self, rows: Sequence[int]) -> list[int]:
        """Those of `rows` that may lie before min_tokens: all, where the host does not know the positions."""
        if isinstance(self._positions, Tensor):
            return list(rows)
        first = self._positions
        return [row for row in rows if first[self.request[row]] + self.offset[row] < self.seat(row).free_from]

    def earlier_drafts(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The drafts before each of `rows`, as pairs: its number in `rows`, the token."""
        firsts = [(n, self.start[b] - b, self.offset[row]) for n, row in enumerate(rows) for b in [self.request[row]]]
        pairs = [(n, first + j) for n, first, offset in firsts for j in range(offset)]
        return self.index([n for n, _ in pairs]), self._drafts.token_ids[self.index([draft for _, draft in pairs])]

    def walk(self, token_R: Tensor, ok_R: Tensor) -> Tensor:
        """`Sampled.outcome`: each request's tokens up to and including the first that is not its draft are meant."""
        counts, draft_N = self._drafts.counts, self._drafts.token_ids
        longest = max(counts)
        if min(counts) == longest:
            shape = len(counts), longest + 1
            return ops.count_right(token_R.view(shape), ok_R.view(shape), draft_N.view(shape[0], longest))
        row_BJ, draft_BK, is_draft_BK, place_J = guess_rows.chains(counts, self._device)
        token_BJ = token_R[row_BJ]
        is_right_BK = (token_BJ[:, :longest] == draft_N[draft_BK]) & is_draft_BK
        num_B1 = is_right_BK.long().cumprod(1).sum(1, keepdim=True) + 1
        ok_B1 = (ok_R[row_BJ] | (place_J >= num_B1)).all(1, keepdim=True)
        return torch.cat([num_B1, ok_B1.long(), token_BJ], 1)


class Sampler:
    """Draws the tokens of a step; parameters and token counts live in tables with one row per seat."""

    def __init__(
        self, num_seats: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of the logits, float32 or float64."""
        self._vocab_size = vocab_size
        self._device = device
        self._params = SeatParams(num_seats, vocab_size, device, dtype)
        self._no_drafts = torch.zeros(0, dtype=torch.int64, device=device)
        self._pretended: tuple[float, ...] = ()

    def seat(self, seating: Seating) -> None:
        """Take over a request's parameters and count its tokens afresh. Replaces whoever sat there."""
        self._params.seat(seating)

    def pretend(self, acceptance: Sequence[float]) -> None:
        """From now on a draft at each place is taken for the drawn token, or refused, with these probabilities; the
        last one holds for all places behind it. Only for measuring: the tokens are no longer the model's."""
        self._pretended = tuple(acceptance)

    def sample(
        self,
        logits_RV: Tensor,
        seats: Sequence[int],
        positions: Sequence[int] | Tensor,
        drafts: Drafts | None = None,
        behind: int = 0,
    ) -> Sampled:
        """One step. The logits are not written to.

        Name        Shape    Dtype       Meaning
        logits      [R, V]   any float   R = sum(1 + drafts of b); rows of a request are consecutive
        seats       [B]      ints        one per request
        positions   [B]      ints        number, in its sequence, of the first token to draw
                                         (`row.start + row.num_tokens - row.num_drafts`); a list or an int64 tensor
        drafts      -        -           None: no request has any
        behind      -        -           to add to all positions
        """
        drafts = drafts or Drafts((0,) * len(seats), self._no_drafts)
        rows = _Rows([self._params[seat] for seat in seats], positions, drafts, behind)
        assert logits_RV.shape == (len(rows), self._vocab_size), (
            f"sampling: logits {tuple(logits_RV.shape)} for {len(rows)} rows, vocabulary {self._vocab_size}"
        )
        if not rows.are_plain:
            logits_RV = self._widen(logits_RV)
        token_R, ok_R = self._draw_checked(logits_RV, seats, rows)
        if self._pretended and len(drafts.token_ids):
            self._make_up(token_R, seats, rows, drafts)
        outcome_BX = rows.walk(token_R, ok_R)
        counted = [b for b, seat in enumerate(rows.seats) if seat.count_row is not None]
        if counted:
            row_N = rows.index([rows.seats[b].count_row for b in counted])
            index_N = rows.index(counted)
            self._params.counts.add(row_N, outcome_BX[index_N, 2:], outcome_BX[index_N, 0])
        return Sampled(outcome_BX, *self._look_up(logits_RV, token_R, rows))

    def draft(
        self, logits_BV: Tensor, seats: Sequence[int], positions: Sequence[int] | Tensor, behind: int = 0
    ) -> Tensor:
        """The tokens [B] int64 that `sample` would give for these logits, without taking them for the truth.

        Parameters, seed and noise are those that the token of this position will be drawn with, so that a draft is
        right as often as two distributions that are close give the same token for the same noise. Penalties do not see
        the drafts before it. Logits that are not finite give some token.
        """
        drafts = Drafts((0,) * len(seats), self._no_drafts)
        rows = _Rows([self._params[seat] for seat in seats], positions, drafts, behind)
        return self._draw_checked(logits_BV if rows.are_plain else self._widen(logits_BV), seats, rows)[0]

    def prompt_logprobs(self, logits_NV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """What the model thought of N known tokens: `logits_NV[i]` are those that predict `token_ids[i]`.

        Raises NonFiniteLogitsError.
        """
        assert len(logits_NV) == len(token_ids), f"sampling: {len(logits_NV)} rows for {len(token_ids)} tokens"
        if not bool(ops.is_finite(logits_NV).all()):
            raise NonFiniteLogitsError
        num_top = min(num_top, self._vocab_size)
        token_N = self._tensor(token_ids)
        piece = max(1, _PIECE // self._vocab_size)
        found = []
        for first in range(0, len(token_ids), piece):
            tokens = token_N[first : first + piece]
            columns = (tokens, *ops.token_logprobs(logits_NV[first : first + piece], tokens, num_top))
            found += _as_logprobs([values.tolist() for values in columns], range(len(tokens)), num_top)
        return found

    def _make_up(self, token_R: Tensor, seats: Sequence[int], rows: _Rows, drafts: Drafts) -> None:
        """The drafts in place of the drawn tokens that count as accepted, and others in place of the rest."""
        params = self._params.rows([seats[request] for request in rows.request], rows.positions())
        row_N, share_N = guess_rows.checked(drafts.counts, self._pretended, self._device)
        position_R = params.position
        ops.pretend(
            token_R, row_N, drafts.token_ids, share_N, params.key + PRETENDED_STREAM, position_R, self._vocab_size
        )

    def _draw_checked(self, logits_RV: Tensor, seats: Sequence[int], rows: _Rows) -> tuple[Tensor, Tensor]:
        """The token of every row, and whether the row is finite."""
        if all(seat.is_plain for seat in rows.seats):
            return ops.greedy_checked(logits_RV)
        params = self._params.rows([seats[request] for request in rows.request], rows.positions())
        token_R = self._choose(self._adjust(logits_RV, rows, params), rows, params)
        return token_R, ops.is_finite(logits_RV)

    def _adjust(self, logits_RV: Tensor, rows: _Rows, params: RowParams) -> Tensor:
        """Penalties, bias and bans: the logits that the tokens are drawn from."""
        penalized = rows.pick(lambda seat: seat.count_row is not None)
        biased = rows.pick(lambda seat: seat.bias)
        banned = rows.early(rows.pick(lambda seat: seat.banned is not None))
        if not (penalized or biased or banned):
            return logits_RV
        target_RV = logits_RV.clone()
        if penalized:
            self._penalize(target_RV, penalized, rows, params)
        if biased:
            pairs = [seat.bias for seat in map(rows.seat, biased) if seat.bias]
            row_N = rows.index([row for row, (ids, _) in zip(biased, pairs, strict=True) for _ in range(len(ids))])
            ids_N, add_N = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
            target_RV.index_put_((row_N, ids_N), add_N, accumulate=True)
        if banned:
            lists = [seat.banned for seat in map(rows.seat, banned) if seat.banned is not None]
            row_N = rows.index([row for row, ids in zip(banned, lists, strict=True) for _ in range(len(ids))])
            ids_N = torch.cat(lists)
            is_early_R = params.position < params.free_from
            # Finite, so that a row in which every token is banned still gives one.
            lowest = torch.finfo(target_RV.dtype).min
            target_RV[row_N, ids_N] = target_RV[row_N, ids_N].masked_fill(is_early_R[row_N], lowest)
        return target_RV

    def _penalize(self, target_RV: Tensor, penalized: list[int], rows: _Rows, params: RowParams) -> None:
        row_P = rows.index(penalized)
        output_PV, prompt_PV = self._params.counts.of(rows.index([rows.seat(row).count_row for row in penalized]))
        one = torch.ones((), dtype=output_PV.dtype, device=self._device)
        output_PV.index_put_(rows.earlier_drafts(penalized), one, accumulate=True)
        columns = (params.repetition, params.frequency, params.presence)
        penalties = (column[row_P].to(target_RV.dtype) for column in columns)
        target_RV[row_P] = ops.penalize(target_RV[row_P], output_PV, prompt_PV, *penalties)

    def _choose(self, target_RV: Tensor, rows: _Rows, params: RowParams) -> Tensor:
        drawn = rows.pick(lambda seat: not seat.greedy)
        if not drawn:
            return ops.greedy(target_RV)
        if len(drawn) == len(rows):
            return _draw(target_RV, [rows.seat(row) for row in drawn], params)
        drawn_D = rows.index(drawn)
        greedy_G = rows.index(rows.pick(lambda seat: seat.greedy))
        token_R = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        token_R[greedy_G] = ops.greedy(target_RV[greedy_G])
        token_R[drawn_D] = _draw(target_RV[drawn_D], [rows.seat(row) for row in drawn], params.pick(drawn_D))
        return token_R

    def _look_up(
        self, logits_RV: Tensor, token_R: Tensor, rows: _Rows
    ) -> tuple[dict[int, tuple[int, int]], tuple[Tensor, ...]]:
        """The logprobs of the tokens of the requests that want them: `Sampled`'s last two fields."""
        wanted = rows.pick(lambda seat: seat.num_logprobs is not None)
        if not wanted:
            return {}, ()
        row_N = rows.index(wanted)
        most = max(rows.seat(row).num_logprobs or 0 for row in wanted)
        columns = ops.token_logprobs(logits_RV[row_N], token_R[row_N], most)
        firsts = [(n, row) for n, row in enumerate(wanted) if rows.offset[row] == 0]
        where = {rows.request[row]: (n, rows.seat(row).num_logprobs or 0) for n, row in firsts}
        return where, (token_R[row_N], *columns)

    def _widen(self, logits_RV: Tensor) -> Tensor:
        """float32 at least: what penalties, temperatures and logprobs are computed in."""
        return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))

    def _tensor(self, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return send(torch.tensor(numbers, dtype=dtype), self._device)


def _draw(target_DV: Tensor, seats: Sequence[Seat], params: RowParams) -> Tensor:
    """From the temperature on. `seats` and `params` are those of the rows."""
    return ops.sample(
        target_DV,
        params.temperature.to(target_DV.dtype),
        params.top_k,
        params.top_p,
        params.min_p,
        params.key,
        params.position,
        [seat.cut_width for seat in seats],
        any(seat.top_p for seat in seats),
        any(seat.min_p for seat in seats),
    )


def _as_logprobs(columns: Sequence[list[Any]], rows: range, num_top: int) -> list[TokenLogprobs]:
    """`columns`: token [N], logprob [N], rank [N], top ids [N, K], top logprobs [N, K], on the host."""
    token, logprob, rank, top_ids, top_logprobs = columns
    return [
        TokenLogprobs(token[row], logprob[row], rank[row], top_ids[row][:num_top], top_logprobs[row][:num_top])
        for row in rows
    ]
