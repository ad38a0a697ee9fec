"""A model, a runner and a drafter in plain Python, driven by plans alone, and the oracle they are compared with.

The state after a token is a hash chain over all tokens so far, the KV of a token is its id, the next token is a
function of the state. Whatever a wrong plan does to memory therefore shows in the tokens; most of it shows earlier, as
memory is checked before it is read, freed ids are poisoned, and rows of one step are kept apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from deltaserve.core.plan import NO_SLOT, Plan, Result, Row, RowResult, Seating
from deltaserve.core.request import FinishReason, Request, SamplingParams, TokenLogprobs

VOCAB = 50
ZERO = 0
POISON = -1

RightDrafts = Callable[[int], int]
"""How many of k drafts, from the first on, are right."""


def advance(state: int, token: int) -> int:
    return (state * 6364136223846793005 + (token + 1) * 1442695040888963407) & ((1 << 64) - 1)


def next_token(state: int) -> int:
    return (state >> 24) % VOCAB


def score(token: int, state: int) -> TokenLogprobs:
    """Of `token`, which follows the tokens behind `state`."""
    return TokenLogprobs(token_id=token, logprob=-(state % 997) / 100, rank=1, top_ids=[token], top_logprobs=[0.0])


@dataclass
class Answer:
    """All that one request gives."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def oracle(request: Request, eos: Sequence[int], max_len: int) -> Answer:
    """The whole answer, token by token, without cache, chunks, drafts or batch."""
    params, tokens, states = request.params, list(request.prompt_token_ids), [ZERO]
    for token in tokens:
        states.append(advance(states[-1], token))
    answer = Answer()
    if params.prompt_logprobs is not None:
        scores = [score(token, state) for token, state in zip(tokens[1:], states[1:], strict=False)]
        answer.prompt_logprobs = [None, *scores]
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    limit = max_len - len(tokens) if params.max_tokens is None else min(params.max_tokens, max_len - len(tokens))
    while answer.finish_reason is None:
        if len(answer.token_ids) >= limit:
            answer.finish_reason = "length"
            break
        token = next_token(states[-1])
        if params.logprobs is not None:
            answer.logprobs.append(score(token, states[-1]))
        answer.token_ids.append(token)
        states.append(advance(states[-1], token))
        if token in stops and len(answer.token_ids) > params.min_tokens:
            answer.finish_reason, answer.stop_token_id = "stop", token
    return answer


@dataclass
class Seat:
    """A row of the runner's tables."""

    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    blocks: list[int]
    states: list[int]
    """What the state must be after each number of tokens."""

    @classmethod
    def of(cls, seating: Seating) -> Seat:
        return cls(list(seating.known), seating.num_prompt, seating.params, list(seating.blocks), [ZERO])

    def state(self, num_tokens: int) -> int:
        while len(self.states) <= num_tokens:
            self.states.append(advance(self.states[-1], self.token_ids[len(self.states) - 1]))
        return self.states[num_tokens]


class FakeRunner:
    """Obeys plans, as a device does: what is launched is queued, and computed when somebody asks for an outcome.

    What happens to memory when an id is freed is queued among the steps, so that a step launched before does not see it
    and one launched after does. `stale` names the seats of the last step whose memory was freed under their rows.
    """

    def __init__(self, block_size: int, right_drafts: RightDrafts = lambda k: k) -> None:
        self.block_size, self.right_drafts = block_size, right_drafts
        self.queue: deque[Callable[[], None]] = deque()
        self.outcomes: dict[int, Result] = {}
        self.kv: dict[int, list[int]] = {}
        self.states: dict[int, int] = {}
        self.seats: dict[int, Seat] = {}
        self.stale: set[int] = set()
        self.gained: dict[int, int] = {}
        """By seat: tokens of its last row beyond the first."""
        self.failing: set[int] = set()
        """Seats whose logits are not finite in the next step."""

    def free_block(self, block: int) -> None:
        self.queue.append(partial(self.kv.__setitem__, block, [POISON] * self.block_size))

    def free_slot(self, slot: int) -> None:
        self.queue.append(partial(self.states.__setitem__, slot, POISON))

    def launch(self, plan: Plan, excused: set[int], order: Sequence[int] | None = None) -> None:
        """`order`: in which the rows are computed; a step has none of its own. `excused`: seats whose memory may have
        been freed under them."""
        self.queue.append(partial(self.run, plan, excused, order))

    def run(self, plan: Plan, excused: set[int], order: Sequence[int] | None) -> None:
        self.outcomes[plan.step] = self.step(plan, order)
        assert self.stale <= excused, "a live row reads freed memory"

    def wait(self, step: int) -> Result:
        """No longer than needed: what was launched behind the step is still to come."""
        while step not in self.outcomes:
            self.queue.popleft()()
        return self.outcomes.pop(step)

    def step(self, plan: Plan, order: Sequence[int] | None = None) -> Result:
        for seating in plan.seatings:
            self.seats[seating.seat] = Seat.of(seating)
        for row in plan.rows:
            self.seats[row.seat].blocks += row.new_blocks
        plan = msgspec.structs.replace(plan, rows=[self.settled(row) for row in plan.rows])
        self.check_rows(plan)
        self.check_hazards(plan)
        self.stale = set()
        results: dict[int, RowResult] = {}
        for i in order if order is not None else range(len(plan.rows)):
            results[i] = self.compute(plan.rows[i])
        return Result(step=plan.step, rows=[results[i] for i in range(len(plan.rows))])

    def settled(self, row: Row) -> Row:
        """The row, and where it starts now that the one before is computed."""
        if not row.later_slots:
            return row
        later = self.gained[row.seat]
        slots = (row.read_slot, *row.later_slots)
        return msgspec.structs.replace(row, start=row.start + later, read_slot=slots[later], later_slots=())

    # ---- what a plan must keep -------------------------------------------------------------------------------------

    def check_rows(self, plan: Plan) -> None:
        assert len({row.seat for row in plan.rows}) == len(plan.rows), "two rows of one seat"
        for i, row in enumerate(plan.rows):
            seat = self.seats[row.seat]
            certain = row.num_tokens - row.num_drafts
            assert certain >= 1
            assert len(row.write_slots) == row.num_tokens, "not one write slot a token"
            assert (row.read_slot == NO_SLOT) == (row.start == 0), "reads no state, or one before the first token"
            assert -(-(row.start + row.num_tokens) // self.block_size) <= len(seat.blocks), "tokens without a block"
            at_end = row.start + certain == len(seat.token_ids)
            assert row.samples == (at_end and seat.params.max_tokens != 0), "samples elsewhere than at the end"
            if i < plan.num_decode:
                assert (certain, row.samples) == (1, True), "a row that only extends has one known token"
            else:
                assert row.num_drafts == 0, "a prefill row with drafts"
                assert len(seat.token_ids) > row.start
            for t, slot in enumerate(row.write_slots):
                if t >= certain - 1:
                    assert slot != NO_SLOT, "a state that may become the truth is not kept"
                elif slot != NO_SLOT:
                    assert (row.start + t + 1) % self.block_size == 0, "a state is kept off a block boundary"

    def check_hazards(self, plan: Plan) -> None:
        """No row writes what another one reads or writes."""
        writer: dict[int, int] = {}
        block_writer: dict[int, int] = {}
        for row in plan.rows:
            for slot in row.write_slots:
                if slot != NO_SLOT:
                    assert slot not in writer, f"slot {slot} is written twice"
                    writer[slot] = row.seat
            blocks = self.seats[row.seat].blocks
            for block in blocks[row.start // self.block_size : -(-(row.start + row.num_tokens) // self.block_size)]:
                assert block not in block_writer, f"block {block} is written twice"
                block_writer[block] = row.seat
        for row in plan.rows:
            assert writer.get(row.read_slot, row.seat) == row.seat, f"slot {row.read_slot} is read and written"
            for block in self.seats[row.seat].blocks[: -(-row.start // self.block_size)]:
                assert block_writer.get(block, row.seat) == row.seat, f"block {block} is read and written"

    # ---- the model -------------------------------------------------------------------------------------------------

    def compute(self, row: Row) -> RowResult:
        seat = self.seats[row.seat]
        state = ZERO if row.read_slot == NO_SLOT else self.states[row.read_slot]
        if not self.memory_holds(seat, row, state):
            self.stale.add(row.seat)
            for slot in row.write_slots:
                self.states[slot] = POISON
            self.gained[row.seat] = 0
            return RowResult(token_ids=[0] if row.samples else [])
        certain = row.num_tokens - row.num_drafts
        inputs = seat.token_ids[row.start : row.start + certain] + self.draft(seat, row)
        states = []
        for t, token in enumerate(inputs):
            position = row.start + t
            block = self.kv.setdefault(seat.blocks[position // self.block_size], [POISON] * self.block_size)
            block[position % self.block_size] = token
            state = advance(state, token)
            states.append(state)
            if row.write_slots[t] != NO_SLOT:
                self.states[row.write_slots[t]] = state
        if row.seat in self.failing:
            seat.token_ids += [0] * row.samples  # some token is drawn all the same
            self.gained[row.seat] = 0
            return RowResult(error="the logits are not finite")
        return self.result(seat, row, inputs, states)

    def result(self, seat: Seat, row: Row, inputs: list[int], states: list[int]) -> RowResult:
        certain, tokens = row.num_tokens - row.num_drafts, []
        if row.samples:
            tokens = [next_token(states[certain - 1])]
            for t in range(certain, row.num_tokens):
                if inputs[t] != tokens[-1]:
                    break
                tokens.append(next_token(states[t]))
        scores = [score(token, states[certain - 1 + i]) for i, token in enumerate(tokens)]
        prompt_scores = None
        if seat.params.prompt_logprobs is not None:
            end = min(row.start + row.num_tokens, seat.num_prompt - 1)
            prompt_scores = [score(seat.token_ids[p + 1], states[p - row.start]) for p in range(row.start, end)]
        seat.token_ids += tokens
        self.gained[row.seat] = max(len(tokens) - 1, 0)
        return RowResult(
            token_ids=tokens,
            logprobs=scores if row.samples and seat.params.logprobs is not None else None,
            prompt_logprobs=prompt_scores,
        )

    def memory_holds(self, seat: Seat, row: Row, state: int) -> bool:
        """The row's past is what it must be. False: it was freed. Raises AssertionError for anything else."""
        stale = state == POISON
        assert stale or state == seat.state(row.start), f"seat {row.seat} stands on another's state"
        for j in range(-(-row.start // self.block_size)):
            want = seat.token_ids[j * self.block_size : min(row.start, (j + 1) * self.block_size)]
            have = self.kv[seat.blocks[j]][: len(want)]
            stale = stale or POISON in have
            assert POISON in have or have == want, f"seat {row.seat} reads another's KV"
        return not stale

    def draft(self, seat: Seat, row: Row) -> list[int]:
        """`right_drafts` right ones, then a wrong one, then any."""
        drafts: list[int] = []
        state = seat.state(row.start + 1) if row.num_drafts else ZERO
        right = self.right_drafts(row.num_drafts) if row.num_drafts else 0
        for i in range(row.num_drafts):
            drafts.append(next_token(state) if i != right else (next_token(state) + 1) % VOCAB)
            state = advance(state, drafts[-1])
        return drafts
