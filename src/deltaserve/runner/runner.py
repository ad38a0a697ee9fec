"""Runs plans on one device: inputs, model, sampler, result. Knows how, and never who or when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import Pending, Plan, Result, RowResult
from deltaserve.core.request import TokenLogprobs
from deltaserve.runner.draft import Guesser, LookAhead
from deltaserve.runner.draft_graphs import DraftGraphs
from deltaserve.runner.graphs import StepGraphs
from deltaserve.runner.inputs import Batch, Inputs, Numbers, Seats, tails
from deltaserve.runner.memory import MemoryPlan, Pools
from deltaserve.runner.model import Model, logits_to_draw
from deltaserve.runner.sampling import Drafts, NonFiniteLogitsError, Sampled, Sampler
from deltaserve.runner.staging import Ints, to_device

LOGITS_BYTES = 64 << 20
"""Logits of known prompt tokens are computed in slices of about this size."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is over before anybody asks for its outcome."""

    outcome: Result
    is_over: ClassVar[bool] = True

    def result(self) -> Result:
        return self.outcome


@dataclass(slots=True)
class Launched:
    """A step that the device computes while the host goes on."""

    runner: Runner
    plan: Plan
    batch: Batch
    hidden: Tensor
    """[T, D]"""
    sampled: Sampled | None
    scored: list[tuple[int, int]]
    """(row, likely tokens to tell) of rows whose prompt tokens' logprobs are asked for."""
    turns: Ints
    """Of the seats of the rows that sample: whoever sits there later is not told these tokens."""
    computed: torch.Event | None
    """The step's end on the device, where no row samples: else the tokens tell of it."""
    outcome: Result | None = None
    is_over: ClassVar[bool] = False

    def result(self) -> Result:
        return self.runner.outcome(self)


class Runner:
    """Owns the pools and the seats' tables of one device."""

    def __init__(self, model: Model, vocab_size: int, plan: MemoryPlan, pools: Pools, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        device = torch.device(plan.device)
        logits_dtype = torch.promote_types(dtype, torch.float32)
        self.model, self.pools, self.vocab_size, self.device = model, pools, vocab_size, device
        self.seats = Seats(plan.max_num_seqs, plan.max_model_len)
        self.inputs = Inputs(self.seats, pools, device, plan.max_keep - 1)
        self.sampler = Sampler(plan.max_num_seqs, vocab_size, device, logits_dtype)
        self.look_ahead = LookAhead(model, self.inputs, self.sampler, pools) if pools.hidden else None
        self.guesser: Guesser | None = self.look_ahead
        self.slice_len = max(1, LOGITS_BYTES // (vocab_size * logits_dtype.itemsize))
        self.graphs: StepGraphs | None = None
        self._in_flight: deque[Launched] = deque()

    def use_graphs(self, graphs: StepGraphs) -> None:
        """From now on: steps that fit run as graphs, and a step's tokens stay on the device for the next one."""
        self.graphs = graphs
        self.inputs.runs_ahead = True
        if self.look_ahead is not None:
            self.look_ahead.graphs = DraftGraphs(graphs, self.inputs)
            self.look_ahead.graphs.record()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """Begin a step. Steps are computed in the order of their launch; the next may be launched before this one's
        outcome is known."""
        for seating in plan.seatings:
            self.seats.seat(seating)
            self.sampler.seat(seating)
        for row in plan.rows:
            self.seats.append_blocks(row.seat, row.new_blocks)
        if self.guesser is not None:
            self.guesser.begin(plan)
        numbers = Numbers.of(plan)
        if not self._in_flight:
            numbers = numbers.settled(self.seats.gained)
        batch, hidden_TD = self._forward(numbers)
        sampled = self._sample(batch, hidden_TD)
        turns = self.seats.turn[numbers.seats[numbers.sampling]]
        computed = torch.Event(self.device) if sampled is None and self.device.type != "cpu" else None
        launched = Launched(self, plan, batch, hidden_TD, sampled, self.inputs.scored(numbers), turns, computed)
        if sampled is not None:
            sampled.start_copy()  # before drafts are drawn: the host goes on meanwhile
        if self.guesser is not None and plan.drafts:
            self.guesser.propose(plan, batch, hidden_TD, sampled)
        if computed is not None:
            computed.record()
        self._in_flight.append(launched)
        if not self.inputs.runs_ahead or launched.scored:
            return Computed(self.outcome(launched))
        return launched

    def step(self, plan: Plan) -> Result:
        """Compute every row of the plan. A request whose logits are not finite gets an error; its mates do not."""
        return self.launch(plan).result()

    def outcome(self, step: Launched) -> Result:
        """Ends the step, and those before it."""
        while step.outcome is None:
            oldest = self._in_flight.popleft()
            oldest.outcome = self._finish(oldest)
        return step.outcome

    @torch.inference_mode()
    def _finish(self, step: Launched) -> Result:
        """The outcome of the oldest step in flight, which the seats' tables and the guesser learn too."""
        if step.computed is not None:  # or chunks of one prompt would all be launched, ahead of whoever comes meanwhile
            step.computed.synchronize()
        numbers = step.batch.numbers.settled(self.seats.gained)
        rows = [RowResult()] * len(step.plan.rows)
        results = step.sampled.results() if step.sampled is not None else []
        seats, firsts = self._firsts(numbers)
        stays = self.seats.turn[seats] == step.turns
        for row, seat, first, is_seated, result in zip(
            numbers.sampling.tolist(), seats.tolist(), firsts.tolist(), stays.tolist(), results, strict=True
        ):
            rows[row] = result
            if is_seated:  # what is drawn behind the longest context is never fed
                tokens = result.token_ids[: self.seats.max_len + 1 - first]
                self.seats.token_ids[seat, first : first + len(tokens)] = tokens
                self.seats.gained[seat] = max(len(result.token_ids) - 1, 0)
        if self.guesser is not None and step.plan.drafts:
            given = np.array([len(result.token_ids) for result in results], dtype=np.int64)
            known = stays & (given > 0)
            self.guesser.learn(seats[known], given[known] - 1)
        for row, num_top in step.scored:
            rows[row] = self._score(rows[row], numbers, row, num_top, step.hidden)
        return Result(step=step.plan.step, rows=rows)

    def _forward(self, numbers: Numbers) -> tuple[Batch, Tensor]:
        found = self.graphs.run(numbers) if self.graphs is not None else None
        if found is not None:
            return found
        batch = self.inputs.build(numbers)
        hidden_TD = self.model(batch.token_ids, batch.context)
        return replace(batch, before=self.inputs.carry_hidden(batch, hidden_TD)), hidden_TD

    def _sample(self, batch: Batch, hidden_TD: Tensor) -> Sampled | None:
        """The next token of each sampling row."""
        numbers = batch.numbers
        if not len(numbers.sampling):
            return None
        seats, firsts = self._firsts(numbers)
        counts = numbers.num_guesses[numbers.sampling]
        positions: list[int] | Tensor = firsts.tolist()
        behind, length = 0, int(numbers.counts[0])
        is_alike = batch.graph_rows is not None and len(seats) == len(numbers.counts)
        if self.graphs is not None and is_alike and bool((counts == length - 1).all()):  # all of it is on the device
            columns = self.graphs.columns
            seat_N, guess_K = columns.seat[: len(seats)], batch.token_ids.view(-1, length)[:, 1:].reshape(-1)
            if batch.later is not None:
                positions, behind = columns.position[: len(batch.token_ids) : length], 1
        else:
            drafts = tails(numbers.row_starts[1:][numbers.sampling], counts)
            seat_N, draft_K = to_device(hidden_TD.device, seats, drafts)
            guess_K = batch.token_ids.index_select(0, draft_K)
            if batch.later is not None:
                row_N, first_N = to_device(hidden_TD.device, numbers.sampling, firsts)
                positions = first_N + batch.later.index_select(0, row_N)
        guesses = Drafts(tuple(counts.tolist()), guess_K) if len(guess_K) else None
        last_ND = hidden_TD if batch.last is None else hidden_TD[batch.last]
        logits_NV = logits_to_draw(self.model, last_ND)
        sampled = self.sampler.sample(logits_NV, seats.tolist(), positions, guesses, behind)
        if self.inputs.runs_ahead:
            self.inputs.remember(seat_N, sampled.outcome)
        return sampled

    @staticmethod
    def _firsts(numbers: Numbers) -> tuple[Ints, Ints]:
        """Of each sampling row: its seat, and the number of the first token that it samples."""
        return numbers.seats[numbers.sampling], (numbers.ends - numbers.num_guesses)[numbers.sampling]

    def _score(self, result: RowResult, numbers: Numbers, row: int, num_top: int, hidden_TD: Tensor) -> RowResult:
        """Add what the model thought of the prompt's tokens behind those of the row, as far as there are any."""
        seat, start = numbers.seats[row], int(numbers.starts[row])
        first, end = int(numbers.row_starts[row]), min(int(numbers.ends[row]) + 1, int(self.seats.num_prompt[seat]))
        targets = self.seats.token_ids[seat, start + 1 : end].tolist()
        scores: list[TokenLogprobs] = []
        try:
            for begin in range(0, len(targets), self.slice_len):
                part = targets[begin : begin + self.slice_len]
                logits_NV = self.model.logits(hidden_TD[first + begin : first + begin + len(part)])
                scores += self.sampler.prompt_logprobs(logits_NV, part, num_top)
        except NonFiniteLogitsError as error:
            return RowResult(error=str(error))
        return msgspec.structs.replace(result, prompt_logprobs=scores)
