"""Runs one plan on one device: inputs, model, sampler, result. Knows how, and never who or when."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from deltaserve.core.plan import Pending, Plan, Result, RowResult
from deltaserve.core.request import TokenLogprobs
from deltaserve.runner.draft import Guesser, LookAhead, guesses_of
from deltaserve.runner.inputs import Batch, Inputs, Seats
from deltaserve.runner.memory import MemoryPlan, Pools
from deltaserve.runner.model import Model
from deltaserve.runner.sampling import NonFiniteLogitsError, Sampler

LOGITS_BYTES = 64 << 20
"""Logits of known prompt tokens are computed in slices of about this size."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is over before anybody asks for its outcome."""

    outcome: Result

    def result(self) -> Result:
        return self.outcome


class Runner:
    """Owns the pools and the seats' tables of one device."""

    def __init__(self, model: Model, vocab_size: int, plan: MemoryPlan, pools: Pools, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        device = torch.device(plan.device)
        logits_dtype = torch.promote_types(dtype, torch.float32)
        self.model, self.pools = model, pools
        self.seats = Seats(plan.max_num_seqs, plan.max_model_len)
        self.inputs = Inputs(self.seats, pools, device)
        self.sampler = Sampler(plan.max_num_seqs, vocab_size, device, logits_dtype)
        self.guesser: Guesser | None = None if model.mtp is None else LookAhead(model, self.seats, self.sampler, pools)
        self.slice_len = max(1, LOGITS_BYTES // (vocab_size * logits_dtype.itemsize))

    def launch(self, plan: Plan) -> Pending:
        """Begin a step. Steps are computed in the order of their launch; the next may be launched before this one's
        outcome is known."""
        return Computed(self.step(plan))

    @torch.inference_mode()
    def step(self, plan: Plan) -> Result:
        """Compute every row of the plan. A request whose logits are not finite gets an error; its mates do not."""
        for seating in plan.seatings:
            self.seats.seat(seating)
            self.sampler.seat(seating)
        batch = self.inputs.build(plan)
        hidden_TD = self.model(batch.token_ids, batch.context)
        rows = [RowResult()] * len(plan.rows)
        known = batch.ends.copy()
        for row, result in zip(batch.sampling.tolist(), self._sample(batch, hidden_TD), strict=True):
            rows[row] = result
            known[row] += len(result.token_ids) - 1 - batch.num_guesses[row] if result.token_ids else 0
        if self.guesser is not None:
            self.guesser.propose(plan, batch, hidden_TD, known)
        for row, num_top in batch.scored:
            rows[row] = self._score(rows[row], batch, row, num_top, hidden_TD)
        return Result(step=plan.step, rows=rows)

    def _sample(self, batch: Batch, hidden_TD: Tensor) -> list[RowResult]:
        """The next token of each sampling row; the seats' tables learn it too."""
        if not len(batch.sampling):
            return []
        seats, guesses = batch.seats[batch.sampling].tolist(), batch.num_guesses[batch.sampling].tolist()
        firsts = (batch.ends - batch.num_guesses)[batch.sampling].tolist()
        # When every token samples (plain decode), there is nothing to pick.
        last_ND = hidden_TD if len(batch.last) == len(hidden_TD) else hidden_TD[batch.last]
        guessed = guesses_of(self.seats, seats, firsts, guesses, hidden_TD.device)
        results = self.sampler.sample(self.model.logits(last_ND), seats, firsts, guessed).results()
        for seat, first, result in zip(seats, firsts, results, strict=True):
            self.seats.token_ids[seat, first : first + len(result.token_ids)] = result.token_ids
        return results

    def _score(self, result: RowResult, batch: Batch, row: int, num_top: int, hidden_TD: Tensor) -> RowResult:
        """Add what the model thought of the prompt's tokens behind those of the row, as far as there are any."""
        seat, start = batch.seats[row], int(batch.starts[row])
        first = int(batch.row_starts[row])
        targets = self.seats.token_ids[seat, start + 1 : min(batch.ends[row] + 1, self.seats.num_prompt[seat])].tolist()
        scores: list[TokenLogprobs] = []
        try:
            for begin in range(0, len(targets), self.slice_len):
                part = targets[begin : begin + self.slice_len]
                logits_NV = self.model.logits(hidden_TD[first + begin : first + begin + len(part)])
                scores += self.sampler.prompt_logprobs(logits_NV, part, num_top)
        except NonFiniteLogitsError as error:
            return RowResult(error=str(error))
        return msgspec.structs.replace(result, prompt_logprobs=scores)
