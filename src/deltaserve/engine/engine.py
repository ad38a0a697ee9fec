"""The loop: plan, launch, commit. Knows no text, no protocol and no tensor; one thread calls it.

Where steps overlap, the next step is planned and launched before the outcome of the one in flight is awaited, so that
the device goes on while the host takes the books forward. What a plan needs to know of that outcome the scheduler says.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import IndexFactory, NoPrefixIndex, PrefixIndex
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats
from deltaserve.engine.tokenizer import GenerationDefaults
from deltaserve.engine.validation import validate
from deltaserve.engine.workers import Workers
from deltaserve.model_config import ModelConfig
from deltaserve.runner.blueprint import Blueprint
from deltaserve.scheduler.costs import GPU_COST, StepCost
from deltaserve.scheduler.scheduler import Scheduler
from deltaserve.scheduler.speculation import Speculation

logger = logging.getLogger(__name__)

CHECK_SHARE = 0.01
"""Of the time, at most, for balancing the books."""


class EngineDeadError(RuntimeError):
    """A step failed, or the books do not balance: nothing that the engine holds can be trusted any more.

    Every later call says so again. Whoever catches it owes all open requests an error; there is no going on.
    """


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight."""

    plan: Plan
    pending: Pending
    begin: float
    """When it was about to be planned."""


class Engine:
    """Requests in, outputs out, one `step` at a time. Loading happens in the constructor.

    Raises ValueError (from the constructor) for a config, a checkpoint or a machine that does not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        make_cache: Callable[..., CacheManager] = CacheManager,
        fill: float | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`make_cache` and `fill` (of the pools, at the start) are for tests that watch unowned memory. `speculation`
        chooses in place of one that follows the costs."""
        blueprint = Blueprint.draw(config)
        for line in blueprint.lines():
            logger.info(line)
        self.workers = Workers(config, blueprint, fill)
        blueprint = self.workers.blueprint
        memory = blueprint.memory
        if memory.reserve:
            for line in memory.lines():
                logger.info(line)
        if not logger.isEnabledFor(logging.INFO):  # the plan above told what was reduced; unread, it needs saying
            for note in memory.notes:
                logger.warning(note)
        self.config, self.blueprint = config, blueprint
        self.model_config: ModelConfig = blueprint.model
        self.max_model_len = memory.max_model_len
        self.tokenizer_path: Path = blueprint.path
        self.generation_defaults = GenerationDefaults.load(blueprint.path)
        # The salt is this engine's own and secret: nobody can craft a prompt that shares another's memory.
        index: IndexFactory = (
            partial(PrefixIndex, salt=secrets.token_bytes(32)) if config.prefix_cache == "on" else NoPrefixIndex
        )
        cost = StepCost() if blueprint.device.type == "cpu" else GPU_COST
        self.scheduler = Scheduler(
            make_cache(*memory.pool_sizes, memory.max_keep, index),
            max_num_seqs=memory.max_num_seqs,
            max_num_batched_tokens=blueprint.max_num_batched_tokens,
            max_model_len=memory.max_model_len,
            eos_token_ids=sorted({*blueprint.model.eos_token_ids, *self.generation_defaults.eos_token_ids}),
            seed=config.seed,
            speculation=speculation or Speculation(blueprint.num_guesses, cost),
            apart=self.workers.most_prompts,
        )
        self._in_flight: Step | None = None
        self._last_end = 0.0
        """When the outcome of the last step was there."""
        self._unusable: Exception | None = None
        self._is_settled = True
        self._next_check = 0.0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that cannot be computed; nothing has changed then."""
        self._must_be_usable()
        token_ids = validate(request, self.model_config.vocab_size, self.max_model_len)
        self.scheduler.add(request, token_ids)

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request at any moment; no output follows. False when there is no such request (any more)."""
        self._is_settled = False
        return self.scheduler.abort(request_id, reason)

    def waits(self, request_id: str) -> bool:
        """Whether a request holds nothing yet, or nothing any more after a preemption."""
        return self.scheduler.waits(request_id)

    def has_work(self) -> bool:
        """Whether there is something to step for. An engine that falls idle balances its books here, not before its
        last outputs are handed out, and not every time where that takes long. Raises EngineDeadError where they do not
        balance."""
        if self.scheduler.has_work:
            return True
        self._settle()
        return False

    def step(self) -> list[Output]:
        """End one step and return what it gave; where steps overlap the next one is in flight then, if there can be
        one. Raises EngineDeadError; see there."""
        self._must_be_usable()
        try:
            step = self._in_flight or self._launch()
            if step is None:
                return []
            self._is_settled = False
            self._in_flight = self._launch() if self._overlaps(step.pending) else None
            result = step.pending.result()
            begin, self._last_end = max(step.begin, self._last_end), time.perf_counter()
            outputs = self.scheduler.commit(step.plan, result, self._last_end - begin)
        except BaseException as error:
            # Ctrl-C in the middle of a step leaves the books as open as a failure does.
            self._die(error)
            raise
        return outputs

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def check(self) -> None:
        """Balances the books of ids and requests. Raises AssertionError saying what does not add up."""
        self.scheduler.check()

    def close(self) -> None:
        """Let go of all memory. Harmless when repeated; a closed engine takes no request and no step. Raises
        EngineDeadError, when all is let go, where the books do not balance."""
        self._next_check = 0.0
        try:
            self._settle()
        finally:
            self._unusable = RuntimeError("the engine is closed")
            self._in_flight = None
            self.workers.close()

    def _launch(self) -> Step | None:
        """The next step, begun; None: there is nothing to do, or nothing before the step in flight has ended."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        return None if plan is None else Step(plan, self.workers.launch(plan), begin)

    def _overlaps(self, pending: Pending) -> bool:
        """Whether the next step is launched before this one's outcome is taken. An outcome that is there already, as
        on a CPU, would only wait for the step behind it."""
        wanted = self.config.overlap
        return wanted == "on" or (wanted == "auto" and not pending.is_over)

    def _settle(self) -> None:
        """Balances the books of an idle engine, unless that would take more than `CHECK_SHARE` of its time: a request
        that comes meanwhile waits for it, and books of many kept prefixes are long. A request that is there already
        does not wait for it."""
        begin = time.perf_counter()
        if self._is_settled or self.scheduler.has_work or self._unusable is not None or begin < self._next_check:
            return
        try:
            self.scheduler.check()
        except AssertionError as error:
            self._die(error)
        self._is_settled = True
        end = time.perf_counter()
        self._next_check = end + (end - begin) / CHECK_SHARE

    def _die(self, error: BaseException) -> None:
        """Remembers why; raises it as EngineDeadError unless it only interrupts."""
        self._unusable = EngineDeadError(f"the engine has died: {type(error).__name__}: {error}")
        if isinstance(error, Exception):
            raise self._unusable from error

    def _must_be_usable(self) -> None:
        if self._unusable is not None:
            raise self._unusable
