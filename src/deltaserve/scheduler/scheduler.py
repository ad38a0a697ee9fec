"""Who computes what, and when: continuous batching over a waiting and a running line.

    plan = scheduler.plan()                      # integers only
    outputs = scheduler.commit(plan, result)     # what the step gave, request by request

Knows tokens and ids; no tensor, no text and no clock: equal calls in equal order give equal plans. The order of arrival
decides everything. Running requests are placed oldest first; where memory runs out the youngest goes back to wait and
is computed anew later (its tokens so far become part of what it prefills), so the oldest always moves. Waiting requests
take a seat in their order, when memory for all their tokens is in sight beyond what those who run still need. A request
without a share of this step's tokens may be overtaken by a shorter one; one without memory is overtaken by nobody.

A row of a step counts only if its request still holds the lease that the row was planned with: results of a request
that was aborted or sent back to wait meanwhile are dropped, at any phase and without a flag.

Steps that overlap. `plan` refuses to run while a step is uncommitted. To lift that, a sequence must advance by its
planned tokens rather than its committed ones (drafts and the last token come from the seat already), and ids freed by a
commit, a preemption or an abort need the quarantine that `deltaserve.cache.manager` describes: that rule lives there
alone. Plans are numbered, steps in flight are kept by number, and leases tell stale rows apart for that reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deltaserve.cache.manager import CacheManager, Lease
from deltaserve.core.plan import Plan, Result, Row, RowResult
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats
from deltaserve.scheduler import policy
from deltaserve.scheduler.lines import Lines
from deltaserve.scheduler.sequence import Sequence
from deltaserve.scheduler.speculation import Speculation


@dataclass(frozen=True)
class _Planned:
    """A row in flight, with the lease it was planned with."""

    sequence: Sequence
    lease: Lease
    row: Row
    extends: bool


@dataclass
class _Counters:
    """As `Stats` names them."""

    steps: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    wanted_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    drafted_at: dict[int, int] = field(default_factory=dict)
    accepted_at: dict[int, int] = field(default_factory=dict)
    tokens_a_step: dict[int, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)
    lost_tokens: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """The two lines, the cache, and the steps in flight."""

    def __init__(
        self,
        cache: CacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        seed: int = 0,
        num_drafts_for: Callable[[Sequence], int] = policy.proposed_drafts,
        speculation: Speculation | None = None,
    ) -> None:
        """
        max_num_seqs: seats, the requests that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: the longest prompt and output together.
        eos_token_ids: end a request that does not ignore them.
        seed: draws the seeds of requests that bring none.
        num_drafts_for: drafts to verify in a sequence's next row; cut to what the cache keeps and the step holds.
        speculation: says how many drafts a step proposes; None proposes none.

        Raises ValueError when a step could not hold one token of each request.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs {max_num_seqs}: "
                "raise the first or lower the second"
            )
        self._cache, self._lines = cache, Lines(max_num_seqs)
        self._max_num_batched_tokens, self._max_model_len = max_num_batched_tokens, max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_drafts_for = num_drafts_for
        self._speculation = speculation or Speculation(0)
        self._seeds = random.Random(seed)
        self._num_added = 0
        self._in_flight: dict[int, list[_Planned]] = {}
        self._counters = _Counters()

    # ---- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError for one that could never run, or whose id is taken."""
        if request.request_id in self._lines:
            raise ValueError(f"request id {request.request_id!r} is in use; choose another")
        num_prompt = len(request.prompt_token_ids)
        needed = num_prompt + (request.params.max_tokens != 0)
        if num_prompt == 0:
            raise ValueError("the prompt has no tokens; give at least one")
        if needed > self._max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; at most {num_prompt - needed + self._max_model_len} fit "
                f"max_model_len {self._max_model_len} with one token of output: shorten it"
            )
        if needed > self._cache.max_tokens:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and the cache holds {self._cache.max_tokens}; "
                "shorten it, or give the cache more memory (cache_memory_gib, num_blocks)"
            )
        max_len = min(self._max_model_len, self._cache.max_tokens)
        seed = self._seeds.getrandbits(63)
        self._lines.join(Sequence.of(request, self._num_added, self._eos_token_ids, seed, max_len))
        self._num_added += 1

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request at any phase and free what it holds. False: there is none of that id (any more).

        No output follows, also none from a step in flight. `reason` is counted; "stop" (a stop string was found in the
        text) counts as finished, not as aborted.
        """
        sequence = self._lines.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        counter = self._counters.finished if reason == "stop" else self._counters.aborts
        counter[reason] = counter.get(reason, 0) + 1
        return True

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to wait, as `plan` does where memory runs out. False: it does not run."""
        sequence = self._lines.get(request_id)
        if sequence is None or sequence.lease is None:
            return False
        self._send_back(sequence)
        return True

    def waits(self, request_id: str) -> bool:
        """Whether a request holds nothing yet, or nothing any more."""
        sequence = self._lines.get(request_id)
        return sequence is not None and sequence.lease is None

    @property
    def has_work(self) -> bool:
        return bool(self._lines)

    # ---- the step --------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step; None when there is nothing to do. Every plan is followed by its `commit`."""
        assert not self._in_flight, f"step {next(iter(self._in_flight))} is planned and not committed"
        if not self._lines:
            return None
        extending = self._lines.extending
        drafts = self._share_drafts(extending)
        budget = self._max_num_batched_tokens - len(extending) - sum(drafts)
        seated = self._admit(budget)
        seatings = [s.seating() for s in seated]
        sizes = {s.order: 1 + k for s, k in zip(extending, drafts, strict=True)}
        num_propose = min(self._speculation.choose(max(len(extending), 1)), self._cache.max_keep - 1)
        planned = self._place(sizes | self._share_prompts(budget), num_propose)
        assert planned, "requests wait and none can move"
        assert all(s.lease is not None for s in seated), "a request is let in and sent back in one step"
        planned.sort(key=lambda p: not p.extends)  # stable: each kind stays in the order of arrival
        step = self._counters.steps
        self._counters.steps += 1
        self._in_flight[step] = planned
        return Plan(
            step=step,
            seatings=seatings,
            rows=[p.row for p in planned],
            num_decode=sum(p.extends for p in planned),
        )

    def commit(self, plan: Plan, result: Result) -> list[Output]:
        """Take a step's outcome: tokens, stop rules and memory, row by row. One output for each row that has news."""
        planned = self._in_flight.pop(plan.step, None)
        assert planned is not None, f"step {plan.step} is not in flight"
        assert result.step == plan.step, f"the result of step {result.step} is taken for that of {plan.step}"
        assert len(result.rows) == len(planned), f"{len(result.rows)} results for {len(planned)} rows"
        outputs = []
        for p, row_result in zip(planned, result.rows, strict=True):
            output = self._commit_row(p, row_result) if p.sequence.lease is p.lease else None
            if output is not None:
                outputs.append(output)
        return outputs

    # ---- what others may ask ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        counters = self._counters
        return Stats(
            running=len(self._lines.running),
            waiting=len(self._lines.waiting),
            cache=self._cache.usage(),
            steps=counters.steps,
            prefilled_tokens=counters.prefilled_tokens,
            cached_tokens=counters.cached_tokens,
            wanted_tokens=counters.wanted_tokens,
            lost_tokens=dict(counters.lost_tokens),
            generated_tokens=counters.generated_tokens,
            draft_tokens=sum(counters.drafted_at.values()),
            accepted_tokens=sum(counters.accepted_at.values()),
            drafted_at=dict(counters.drafted_at),
            accepted_at=dict(counters.accepted_at),
            tokens_a_step=dict(counters.tokens_a_step),
            preemptions=counters.preemptions,
            finished=dict(counters.finished),
            aborts=dict(counters.aborts),
        )

    def check(self) -> None:
        """Balance the ledger of lines, seats, blocks and states. Raises AssertionError."""
        self._cache.check(self._lines.check())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _share_drafts(self, extending: list[Sequence]) -> list[int]:
        wanted = []
        for sequence in extending:
            room = sequence.max_len - len(sequence.token_ids) - 1  # the token behind the drafts is output too
            wanted.append(max(min(self._num_drafts_for(sequence), self._cache.max_keep - 1, room), 0))
        prompts = [*self._lines.prefilling, *self._lines.candidates]
        prompt_tokens = sum(s.num_to_prefill for s in prompts)
        return policy.share_drafts(self._max_num_batched_tokens, len(extending), wanted, prompt_tokens)

    def _share_prompts(self, budget: int) -> dict[int, int]:
        """Chunk sizes of those who prefill, by order of arrival."""
        prompts = self._lines.prefilling
        shares = policy.share_prompts(budget, [s.num_to_prefill for s in prompts])
        return {
            s.order: policy.cut_chunk(len(s.token_ids) - s.num_to_prefill, s.num_to_prefill, n, self._cache.block_size)
            for s, n in zip(prompts, shares, strict=True)
        }

    def _admit(self, budget: int) -> list[Sequence]:
        """Seat those waiting requests that this step has tokens and the cache has room for."""
        candidates = self._without_followers(self._lines.candidates)
        if not candidates:
            return []
        prompts = sorted([*self._lines.prefilling, *candidates], key=lambda s: s.order)
        shares = policy.share_prompts(budget, [s.num_to_prefill for s in prompts])
        owed = sum(self._blocks_owed(s) for s in self._lines.running)
        seated: list[Sequence] = []
        for sequence, share in zip(prompts, shares, strict=True):
            if sequence.lease is not None or share == 0:
                continue
            reuse = not sequence.needs_whole_prompt
            lease = self._cache.admit(sequence.token_ids, reuse=reuse, salt=sequence.salt, spare_blocks=owed)
            if lease is None:
                break
            if sequence.num_cached is None:
                self._count_hit(sequence, lease)
            self._lines.sit(sequence, lease)
            seated.append(sequence)
            owed += self._blocks_owed(sequence)
        return seated

    def _without_followers(self, candidates: list[Sequence]) -> list[Sequence]:
        """Those who need not wait for another: a prompt that is being computed is computed once for all who share it.

        A leader moves in every step, so nobody waits for long; if its state cannot be kept, they compute for
        themselves.
        """
        if not self._cache.keeps:
            return candidates
        leaders, free = [s for s in self._lines.prefilling if not s.needs_whole_prompt], []
        for sequence in candidates:
            if not any(sequence.follows(leader, self._cache.block_size) for leader in leaders):
                free.append(sequence)
                leaders.append(sequence)
        return free

    def _count_hit(self, sequence: Sequence, lease: Lease) -> None:
        """What a first admission got from the index, and what it did not."""
        size, counters = self._cache.block_size, self._counters
        wanted = (len(sequence.token_ids) - 1) // size * size if self._cache.keeps else 0
        counters.wanted_tokens += wanted
        counters.cached_tokens += lease.num_done
        reasons = {"logprobs": wanted}
        if not sequence.needs_whole_prompt:
            stored = max(lease.num_matched, lease.num_done)
            reasons = {"not stored": wanted - stored, "no state": stored - lease.num_done}
        for reason, lost in reasons.items():
            if lost:
                counters.lost_tokens[reason] = counters.lost_tokens.get(reason, 0) + lost

    def _blocks_owed(self, sequence: Sequence) -> int:
        """Blocks that a running request needs for the tokens it has, and one more to grow into."""
        assert sequence.lease is not None, "a waiting request is owed blocks"
        longest = min(len(sequence.token_ids) + self._cache.max_keep - 1, sequence.max_len)
        return self._cache.num_missing(sequence.lease, longest) + 1

    def _place(self, sizes: dict[int, int], num_propose: int) -> list[_Planned]:
        """Memory for `sizes` tokens of each running request, by order of arrival; the youngest make room. Where there
        is room for `num_propose` drafts behind them, so many are proposed."""
        planned: list[_Planned] = []
        for sequence in list(self._lines.running):
            lease, num_tokens = sequence.lease, sizes.get(sequence.order, 0)
            if lease is None or num_tokens == 0:
                continue
            extends = sequence.is_extending
            num_drafts = num_tokens - 1 if extends else 0
            row = self._place_row(sequence, lease, num_tokens, num_drafts, num_propose)
            while row is None and sequence.lease is not None:
                if num_drafts:  # drafts cost no request its seat
                    num_tokens, num_drafts = 1, 0
                else:
                    self._send_back(self._lines.running[-1])
                if sequence.lease is not None:
                    row = self._place_row(sequence, lease, num_tokens, num_drafts, num_propose)
            if row is not None:
                planned.append(_Planned(sequence, lease, row, extends))
        return planned

    def _place_row(
        self, sequence: Sequence, lease: Lease, num_tokens: int, num_drafts: int, num_propose: int
    ) -> Row | None:
        end = lease.num_done + num_tokens
        samples = end - num_drafts == len(sequence.token_ids) and sequence.wants_output
        # A draft is of use if another token may follow it.
        num_propose = min(num_propose, max(sequence.max_len - end - 2, 0)) if samples else 0
        placement = self._cache.place(lease, num_tokens, keep=1 + num_drafts, ahead=num_propose)
        if placement is None:
            return None
        row = Row(
            seat=sequence.seat,
            start=lease.num_done,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            num_propose=placement.ahead,
            samples=samples,
        )
        return placement.fill(row)

    def _commit_row(self, planned: _Planned, result: RowResult) -> Output | None:
        sequence, row, counters = planned.sequence, planned.row, self._counters
        if planned.extends:
            self._count_drafts(row.num_drafts, max(len(result.token_ids) - 1, 0))
        else:
            counters.prefilled_tokens += row.num_tokens
        output, kept = sequence.take(row, result)
        sequence.num_proposed = row.num_propose
        failed = result.error is not None
        if not failed:
            self._cache.commit(planned.lease, kept, sequence.token_ids)
        if output is not None:
            counters.generated_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                counters.finished[output.finish_reason] = counters.finished.get(output.finish_reason, 0) + 1
                self._end(sequence, withdraw=failed)
        return output

    def _count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Of one row that extends. A row that failed accepts none."""
        counters = self._counters
        for counter, number in ((counters.drafted_at, num_drafts), (counters.accepted_at, num_accepted)):
            for place in range(number):
                counter[place] = counter.get(place, 0) + 1
        counters.tokens_a_step[1 + num_accepted] = counters.tokens_a_step.get(1 + num_accepted, 0) + 1
        self._speculation.observe(num_drafts, num_accepted)

    def _send_back(self, sequence: Sequence) -> None:
        self._cache.release(self._lines.stand(sequence))
        self._counters.preemptions += 1

    def _end(self, sequence: Sequence, withdraw: bool = False) -> None:
        lease = self._lines.leave(sequence)
        if lease is not None:
            self._cache.release(lease, withdraw=withdraw)
