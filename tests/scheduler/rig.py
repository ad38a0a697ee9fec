"""The real scheduler and cache manager around the fake runner, with the answers collected and the ledger balanced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import IndexFactory, NoPrefixIndex, PrefixIndex, SnapshotPolicy, every_boundary
from deltaserve.core.plan import Plan, Result
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.scheduler.scheduler import Scheduler
from deltaserve.scheduler.sequence import Sequence as Running
from deltaserve.scheduler.speculation import Speculation
from tests.scheduler.fake import Answer, FakeRunner, RightDrafts, oracle

EOS = (49,)


def prefix_index(policy: SnapshotPolicy = every_boundary) -> IndexFactory:
    return partial(PrefixIndex, salt=b"sixteen bytes ..", policy=policy)


class Rig:
    """Small by default; every test says what it needs otherwise."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_slots: int = 16,
        block_size: int = 8,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 100000,
        max_drafts: int = 0,
        index: IndexFactory = NoPrefixIndex,
        right_drafts: RightDrafts = lambda k: k,
        num_drafts_for: Callable[[Running], int] | None = None,
        overlap: bool = False,
        speculation: Speculation | None = None,
        apart: int = 0,
    ) -> None:
        self.runner = FakeRunner(block_size, right_drafts)
        self.cache = CacheManager(
            num_blocks,
            num_slots,
            1 + max_drafts,
            index,
            self.runner.free_block,
            self.runner.free_slot,
            block_size=block_size,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            EOS,
            num_drafts_for=num_drafts_for if num_drafts_for is not None else lambda sequence: max_drafts,
            speculation=speculation,
            apart=apart,
        )
        self.apart, self.stood_still = apart, set[int]()
        """Requests, by order of arrival, that had their turn to come after the last plan."""
        self.seconds: float | None = None
        """That each step is said to have taken."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_len = min(max_model_len, num_blocks * block_size)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.cached: dict[str, int] = {}
        self.aborted_in_flight: set[int] = set()
        self.plans: list[Plan] = []
        self.overlap = overlap
        self.in_flight: Plan | None = None
        self.num_ahead = 0
        self._num_ids = 0

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, **kwargs: object) -> str:
        """Queue a request, `kwargs` are its sampling parameters; end-of-text is ignored unless they say otherwise."""
        name = f"r{self._num_ids}"
        self._num_ids += 1
        params = params or SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **kwargs})  # type: ignore[arg-type]
        request = Request(request_id=name, prompt_token_ids=list(prompt), params=params, arrival=0.0)
        self.scheduler.add(request)
        self.requests[name], self.answers[name] = request, Answer()
        return name

    def abort(self, name: str, reason: str = "abort") -> bool:
        running = self.sequence(name)
        if running is not None and running.lease is not None:
            self.aborted_in_flight.add(running.seat)
        return self.scheduler.abort(name, reason)

    def preempt(self, name: str) -> bool:
        running = self.sequence(name)
        if running is not None and running.lease is not None:
            self.aborted_in_flight.add(running.seat)
        return self.scheduler.preempt(name)

    def sequence(self, name: str) -> Running | None:
        return self.scheduler._lines.get(name)

    @property
    def running(self) -> list[str]:
        return [s.request_id for s in self.scheduler._lines.running]

    @property
    def waiting(self) -> list[str]:
        return [s.request_id for s in self.scheduler._lines.waiting]

    # ---- a step, in its three parts --------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        self.aborted_in_flight.clear()
        ahead, preemptions = bool(self.scheduler._in_flight), self.scheduler._counters.preemptions
        plan = self.scheduler.plan()
        assert plan is not None or ahead or not self.scheduler.has_work
        if plan is not None:
            self.num_ahead += ahead
            self.check_entries(plan)
            if ahead:
                assert self.scheduler._counters.preemptions == preemptions, "a plan made ahead sends somebody back"
            self.check_plan(plan)
            self.plans.append(plan)
        return plan

    def launch(self, plan: Plan, order: Sequence[int] | None = None) -> None:
        self.runner.launch(plan, set(self.aborted_in_flight), order)

    def compute(self, plan: Plan, order: Sequence[int] | None = None) -> Result:
        self.launch(plan, order)
        return self.runner.wait(plan.step)

    def commit(self, plan: Plan, result: Result) -> list[Output]:
        outputs = self.scheduler.commit(plan, result, self.seconds)
        for output in outputs:
            self.take(output)
        self.scheduler.check()
        return outputs

    def step(self) -> list[Output]:
        """As the engine does it: where steps overlap, the next one is launched before this one's outcome is known."""
        plan = self.in_flight or self.begin()
        if plan is None:
            return []
        self.in_flight = self.begin() if self.overlap else None
        return self.commit(plan, self.runner.wait(plan.step))

    def begin(self) -> Plan | None:
        plan = self.plan()
        if plan is not None:
            self.launch(plan)
        return plan

    def finish(self, max_steps: int = 10000) -> None:
        """Run until all is done; compare every answer with the oracle; nothing is left in use."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"still at work after {max_steps} steps"
        for name, answer in self.answers.items():
            if answer.finish_reason is not None:
                self.compare(name)
        usage = self.cache.usage()
        assert (usage.blocks_used, usage.slots_used) == (0, 0), "something is left in use"

    def compare(self, name: str) -> None:
        assert self.answers[name] == oracle(self.requests[name], EOS, self.max_len), name

    # ---- what must always hold -------------------------------------------------------------------------------------

    def check_plan(self, plan: Plan) -> None:
        assert sum(row.num_tokens for row in plan.rows) <= self.max_num_batched_tokens, "the step is too long"
        moving = {row.seat for row in plan.rows}
        lines = self.scheduler._lines
        oldest = next((s for s in lines.running if not s.is_ending or s.seat in moving), None)
        assert oldest is not None, "a step of nobody"
        still = {s.order for s in [oldest, *lines.extending] if s.seat not in moving}
        assert self.apart or not still, "the oldest or a request that extends has no token in this step"
        assert not still & self.stood_still, "nor had it in the one before"
        assert not self.apart or plan.num_decode in (0, len(plan.rows)), "a mixed step"
        self.stood_still = still
        cached_blocks, cached_slots = self.cache._index.check()
        for row in plan.rows:
            assert not set(row.write_slots) & set(cached_slots), "a published state is written"
            blocks = next(s.lease.blocks for s in lines.running if s.seat == row.seat and s.lease is not None)
            assert not set(blocks[row.start // self.cache.block_size :]) & set(cached_blocks), "a published block is"

    def check_entries(self, plan: Plan) -> None:
        """Behind drafts the layer that made them has an entry for whichever token turns out to be the last."""
        if not self.plans or not self.plans[-1].drafts:
            return
        blocks = {s.seat: len(s.lease.blocks) for s in self.scheduler._lines.running if s.lease is not None}
        for row in plan.rows:
            room = (blocks[row.seat] - len(row.new_blocks)) * self.cache.block_size
            assert not row.later_slots or row.start + len(row.later_slots) < room, "an entry has no room"

    def take(self, output: Output) -> None:
        """Add one output to its answer."""
        name, answer = output.request_id, self.answers[output.request_id]
        params = self.requests[name].params
        assert answer.finish_reason is None, "an output behind the last one"
        if name not in self.cached:
            self.cached[name] = output.num_cached_tokens
            assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
            answer.prompt_logprobs = output.prompt_logprobs
        else:
            assert (output.num_cached_tokens, output.prompt_logprobs) == (0, None), "told twice"
        answer.token_ids += output.token_ids
        assert (output.logprobs is None) == (params.logprobs is None or params.max_tokens == 0)
        answer.logprobs += output.logprobs or []
        answer.finish_reason, answer.stop_token_id = output.finish_reason, output.stop_token_id
