"""Who computes what, and when: continuous batching over a waiting and a running line.

    plan = scheduler.plan()                      # integers only
    outputs = scheduler.commit(plan, result)     # what the step gave, request by request

Knows tokens and ids; no tensor, no text and no clock: equal calls in equal order give equal plans. The order of arrival
decides everything but the number of drafts, which follows from what steps are told to have taken. Running requests are
placed oldest first; where memory runs out the youngest goes back to wait and is computed anew later (its tokens so far
become part of what it prefills), so the oldest always moves. Waiting requests take a seat in their order, when memory
for all their tokens is in sight beyond what those who run still need. A request without a share of this step's tokens
may be overtaken by a shorter one; one without memory is overtaken by nobody.

A row of a step counts only if its request still holds the lease that the row was planned with: results of a request
that was aborted or sent back to wait meanwhile are dropped, at any phase and without a flag.

Steps that overlap. While one step is in flight, `plan` gives the next: rows whose last token is sampled by the step in
flight, chunks that continue, and admissions. A sequence advances by what is certain of its row in flight; where drafts
are verified there, the next row starts later by as many as are accepted, and has memory for all of them. So a row that
must be its last by length is followed by none; one that turns out to be the last has one row too many, which is dropped
as above. A plan made ahead takes nothing from anybody and leaves nobody out whom the same plan made later would hold:
where memory would have to be taken, or the longest context might not hold the row, it is not made, and the caller
commits first.

Steps of one kind. Where the device runs rows that extend and prompts faster apart than together, they take turns: a
prompt's chunk, then a token for everybody.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable
from functools import cache as once

from deltaserve.cache.lease import Lease
from deltaserve.cache.manager import CacheManager
from deltaserve.core.plan import Plan, Result, Row, RowResult
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats
from deltaserve.scheduler import policy
from deltaserve.scheduler.admission import Admission
from deltaserve.scheduler.counters import Counters
from deltaserve.scheduler.lines import Lines
from deltaserve.scheduler.planned import Planned
from deltaserve.scheduler.sequence import Sequence
from deltaserve.scheduler.speculation import Speculation


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
        apart: int = 0,
    ) -> None:
        """
        max_num_seqs: seats, the requests that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: the longest prompt and output together.
        eos_token_ids: end a request that does not ignore them.
        seed: draws the seeds of requests that bring none.
        num_drafts_for: drafts to verify in a sequence's next row; cut to what the cache keeps and the step holds.
        speculation: says how many drafts a step proposes; None proposes none.
        apart: prompts of a step at most, without rows that extend in it; 0: steps are mixed.

        Raises ValueError when a step could not hold one token of each request.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs {max_num_seqs}: "
                "raise the first or lower the second"
            )
        self._cache, self._lines = cache, Lines(max_num_seqs)
        self._longest = min(max_model_len, cache.max_tokens)
        self._max_num_batched_tokens, self._max_model_len = max_num_batched_tokens, max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_drafts_for = num_drafts_for
        self._speculation, self._apart = speculation or Speculation(0), apart
        self._prompts_next = True
        """Whose turn it is: the last step had none."""
        self._seeds = random.Random(seed)
        self._num_added = 0
        self._in_flight: dict[int, list[Planned]] = {}
        """By step, oldest first; two at most."""
        self._num_propose: int | None = None
        """The choice for the next plan, when it was asked for and that plan is not made yet."""
        self._last_propose, self._drafts_in_use = 0, False
        """By the last plan with rows that extend, or that might have had some."""
        self._last_kind: tuple[int, int, bool] | None = None
        """Of the step that was committed last: rows, drafts of each, whether drafts were in use."""
        self._counters = Counters()
        self._admission = Admission(cache, self._lines, self._counters)

    # ---- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request, token_ids: array[int] | None = None) -> None:
        """Let a request wait; `token_ids` are its prompt's, if they are packed already. Raises ValueError for one that
        could never run, or whose id is taken."""
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
        seed = self._seeds.getrandbits(63)
        self._lines.join(Sequence.of(request, self._num_added, self._eos_token_ids, seed, self._longest, token_ids))
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
        self._counters.abort(reason)
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
        """Whether requests are here, or a step is in flight."""
        return bool(self._lines) or bool(self._in_flight)

    # ---- the step --------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step; None when there is nothing to do, or nothing before the step in flight is committed. Every
        plan is followed by its `commit`, in the order of the plans."""
        assert len(self._in_flight) < 2, f"steps {list(self._in_flight)} are planned and not committed"
        if not self._lines:
            return None
        for with_extending, with_prompts in self._kinds():
            extending = self._lines.extending if with_extending else []
            if self._in_flight and self._must_wait(extending):
                return None
            wanted = self._wanted_drafts(extending)
            drafts = self._share_drafts(extending, list(wanted.values()), with_prompts)
            budget = self._max_num_batched_tokens - len(extending) - sum(drafts) if with_prompts else 0
            sizes = {s.order: 1 + k for s, k in zip(extending, drafts, strict=True)}
            if self._in_flight and not self._has_room(sizes | self._share_prompts(budget)):
                return None
            plan = self._fill(sizes, budget, wanted)
            if plan is not None:
                return plan
        assert self._in_flight, "requests wait and none can move"
        return None

    def commit(self, plan: Plan, result: Result, seconds: float | None = None) -> list[Output]:
        """Take a step's outcome: tokens, stop rules and memory, row by row. One output for each row that has news.

        seconds: what the step took, from the outcome of the one before it or from its own beginning if that is later.
        """
        assert plan.step in self._in_flight, f"step {plan.step} is not in flight"
        assert plan.step == next(iter(self._in_flight)), f"step {plan.step} is committed before those in front of it"
        planned = self._in_flight.pop(plan.step)
        assert result.step == plan.step, f"the result of step {result.step} is taken for that of {plan.step}"
        assert len(result.rows) == len(planned), f"{len(result.rows)} results for {len(planned)} rows"
        self._time(plan, seconds)
        outputs = []
        for p, row_result in zip(planned, result.rows, strict=True):
            output = self._commit_row(p, row_result) if p.is_live else None
            if output is not None:
                outputs.append(output)
        return outputs

    # ---- what others may ask ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        running, waiting = len(self._lines.running), len(self._lines.waiting)
        return self._counters.stats(running, waiting, self._cache.usage(), self._speculation.alarm)

    def check(self) -> None:
        """Balance the ledger of lines, seats, blocks and states. Raises AssertionError."""
        self._cache.check(self._lines.check())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _kinds(self) -> list[tuple[bool, bool]]:
        """(rows that extend, prompts) of the next step, and what else it may be if that comes to nothing."""
        if not (self._apart and (self._lines.prefilling or self._lines.candidates) and self._lines.extending):
            return [(True, True)]
        return [(False, True), (True, False)] if self._prompts_next else [(True, False), (False, True)]

    def _fill(self, sizes: dict[int, int], budget: int, wanted: dict[int, int]) -> Plan | None:
        """A plan of `sizes` tokens of extending rows and `budget` of prompts, newcomers' too; None without a row."""
        chooses = bool(sizes) or not self._apart  # prompts of a step of their own tell nothing of drafts, and try none
        num_propose = self._choose_drafts() if chooses else self._last_propose
        seated = self._admission.admit(budget, self._apart or None)
        sizes |= self._share_prompts(budget)
        seatings = [s.seating() for s in seated]
        planned = self._place(sizes, wanted, num_propose)
        assert all(s.lease is not None for s in seated), "a request is let in and sent back in one step"
        if not planned:
            return None
        planned.sort(key=lambda p: not p.extends)  # stable: each kind stays in the order of arrival
        step = self._counters.steps
        self._counters.steps += 1
        if chooses:
            self._num_propose, self._last_propose = None, num_propose
        self._in_flight[step] = planned
        num_decode, rows = sum(p.extends for p in planned), [p.row for p in planned]
        self._prompts_next = num_decode == len(planned)
        return Plan(step=step, seatings=seatings, rows=rows, num_decode=num_decode, drafts=self._drafts_in_use)

    def _must_wait(self, extending: list[Sequence]) -> bool:
        """Whether the next step cannot be planned before the outcome of the one in flight is known."""
        open_ends = [s.lease for s in extending if s.lease is not None and s.lease.later]
        if any(lease.most_planned >= self._longest for lease in open_ends):
            return True
        # The layer that drafts needs room for its entry of whichever token turns out to be the last, and begins anew
        # only where the host knows.
        if not self._drafts_in_use:
            return bool(open_ends) and self._choose_drafts() > 0
        return any(len(lease.blocks) * self._cache.block_size <= lease.most_planned for lease in open_ends)

    def _choose_drafts(self) -> int:
        """Drafts that the next plan proposes; asked once for each plan."""
        if self._num_propose is None:
            num_rows = max(len(self._lines.extending), 1)
            self._num_propose = min(self._speculation.choose(num_rows), self._cache.max_keep - 1)
            self._drafts_in_use = self._num_propose > 0 or self._speculation.keeps_up
        return self._num_propose

    def _has_room(self, sizes: dict[int, int]) -> bool:
        """Whether memory for the step can be had without sending anybody back, now or for want of blocks that an open
        end turns out not to need."""
        leases = [(s.lease, sizes[s.order]) for s in self._lines.running if s.order in sizes and s.lease is not None]
        least = sum(self._cache.num_missing(it, it.num_planned + n) for it, n in leases)
        most = sum(self._cache.num_missing(it, it.most_planned + n) for it, n in leases)
        owed = sum(self._admission.blocks_owed(s) for s in self._lines.running) if most > least else 0
        return self._cache.has_blocks(most + owed)

    def _wanted_drafts(self, extending: list[Sequence]) -> dict[int, int]:
        """Of each request, by order of arrival: drafts that it has and can use."""
        wanted = {}
        for sequence in extending:
            assert sequence.lease is not None, "a waiting request extends"
            room = sequence.max_len - sequence.lease.num_planned - 2  # the token behind the drafts is output too
            most = min(self._cache.max_keep - 1, room)
            wanted[sequence.order] = max(min(self._num_drafts_for(sequence), most), 0)
        return wanted

    def _share_drafts(self, extending: list[Sequence], wanted: list[int], with_prompts: bool) -> list[int]:
        """Drafts of each row: as many as its mates have, as far as the longest context goes."""
        prompts = [*self._lines.prefilling, *self._lines.candidates] if with_prompts else []
        number = policy.share_drafts(self._max_num_batched_tokens, wanted, sum(s.num_to_prefill for s in prompts))
        return [0 if s.lease is None else min(number, self._longest - s.lease.most_planned - 1) for s in extending]

    def _share_prompts(self, budget: int) -> dict[int, int]:
        """Chunk sizes of those who prefill, by order of arrival."""
        prompts = self._lines.prefilling[: self._apart or None]
        shares = policy.share_prompts(budget, [s.num_to_prefill for s in prompts])
        return {
            s.order: policy.cut_chunk(s.num_planned, s.num_to_prefill, n, self._cache.block_size)
            for s, n in zip(prompts, shares, strict=True)
        }

    def _place(self, sizes: dict[int, int], wanted: dict[int, int], num_propose: int) -> list[Planned]:
        """Memory for `sizes` tokens of each running request, by order of arrival; the youngest make room. Where there
        is room for `num_propose` drafts behind them, so many are proposed."""
        planned: list[Planned] = []
        owed = once(lambda: sum(self._admission.blocks_owed(s) for s in self._lines.running))  # seldom asked for
        for sequence in list(self._lines.running):
            lease, num_tokens = sequence.lease, sizes.get(sequence.order, 0)
            if lease is None or num_tokens == 0:
                continue
            extends = sequence.is_extending
            num_drafts = num_tokens - 1 if extends else 0
            num_certain = num_tokens - num_drafts
            num_drafts, most = self._cut_drafts(sequence, num_certain, num_drafts, num_propose, owed)
            row = self._place_row(sequence, lease, num_certain, num_drafts, most)
            while row is None and sequence.lease is not None:
                self._send_back(self._lines.running[-1])
                if sequence.lease is not None:
                    row = self._place_row(sequence, lease, num_certain, num_drafts, most)
            if row is not None:
                num_real = min(num_drafts, wanted.get(sequence.order, 0))
                sequence.num_proposed = row.num_propose
                planned.append(Planned(sequence, lease, row, extends, num_real))
        return planned

    def _cut_drafts(
        self, sequence: Sequence, num_certain: int, num_drafts: int, num_propose: int, owed: Callable[[], int]
    ) -> tuple[int, int]:
        """As many drafts to verify and to propose as there is room for, in blocks that the row needs anyhow or that
        nobody who runs will need soon: drafts cost no request its seat. All of a kind or none: rows stay alike."""
        lease = sequence.lease
        assert lease is not None, "a waiting request has drafts"
        end = lease.most_planned + num_certain
        least = self._cache.num_missing(lease, end)
        for verify, propose in ((num_drafts, num_propose), (num_drafts, 0), (0, num_propose)):
            missing = self._cache.num_missing(lease, end + verify + propose)
            if missing == least or self._cache.has_blocks(missing + owed() - self._admission.blocks_owed(sequence)):
                return verify, propose
        return 0, 0

    def _place_row(
        self, sequence: Sequence, lease: Lease, num_certain: int, num_drafts: int, num_propose: int
    ) -> Row | None:
        start, end = lease.num_planned, lease.num_planned + num_certain + num_drafts
        num_tokens = end - start
        samples = end - num_drafts >= sequence.prompt_end and sequence.wants_output
        # A draft is of use if another token may follow it.
        room = min(sequence.max_len - end - 2, self._longest - lease.most_planned - num_tokens)
        num_propose = min(num_propose, max(room, 0)) if samples else 0
        placement = self._cache.place(lease, num_tokens, keep=1 + num_drafts, ahead=num_propose)
        if placement is None:
            return None
        row = Row(
            seat=sequence.seat,
            start=start,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            num_propose=placement.ahead,
            samples=samples,
        )
        return placement.fill(row)

    def _time(self, plan: Plan, seconds: float | None) -> None:
        """Tell what drafts cost, where the step and the one before it are alike: only rows that extend, which verify as
        many drafts as they propose."""
        if self._apart and not plan.num_decode:
            return  # in between
        most = max(row.num_drafts for row in plan.rows)
        proposes = max(row.num_propose for row in plan.rows)
        is_steady = plan.num_decode == len(plan.rows) and most == proposes
        kind = (len(plan.rows), most, plan.drafts) if is_steady else None
        if kind is not None and kind == self._last_kind and seconds is not None:
            self._speculation.took(*kind, seconds)
        self._last_kind = kind

    def _commit_row(self, planned: Planned, result: RowResult) -> Output | None:
        sequence, row, counters = planned.sequence, planned.row, self._counters
        num_drafts, num_accepted = planned.num_real, min(planned.num_real, max(len(result.token_ids) - 1, 0))
        if planned.extends:
            counters.drafts(num_drafts, num_accepted)
            self._speculation.observe(num_drafts, num_accepted)
        else:
            counters.prefilled_tokens += row.num_tokens
        output, kept = sequence.take(row, result)
        if output is not None and planned.extends:
            output.num_draft_tokens = num_drafts
            output.num_accepted_tokens = min(num_accepted, len(output.token_ids))
        failed = result.error is not None
        if not failed:
            self._cache.commit(planned.lease, kept, sequence.token_ids)
        if output is not None:
            counters.generated_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                counters.finish(output.finish_reason)
                self._end(sequence, withdraw=failed)
        return output

    def _send_back(self, sequence: Sequence) -> None:
        self._cache.release(self._lines.stand(sequence))
        self._counters.preemptions += 1

    def _end(self, sequence: Sequence, withdraw: bool = False) -> None:
        lease = self._lines.leave(sequence)
        if lease is not None:
            self._cache.release(lease, withdraw=withdraw)
