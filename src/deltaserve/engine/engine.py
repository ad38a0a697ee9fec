"""The loop: plan, compute, commit. Knows no text, no protocol and no tensor; one thread calls it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from deltaserve.cache.manager import CacheManager
from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request
from deltaserve.core.stats import Stats
from deltaserve.engine.tokenizer import GenerationDefaults
from deltaserve.engine.validation import validate
from deltaserve.engine.workers import Workers
from deltaserve.model_config import ModelConfig
from deltaserve.runner.blueprint import Blueprint
from deltaserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """A step failed, or its books do not balance: nothing that the engine holds can be trusted any more.

    `outputs` ends every open request with an error; whoever catches this delivers them and lets the process go.
    """

    def __init__(self, reason: str, outputs: list[Output]) -> None:
        super().__init__(reason)
        self.outputs = outputs


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
    ) -> None:
        """`make_cache` and `fill` (of the pools, at the start) are for tests that watch unowned memory."""
        blueprint = Blueprint.draw(config)
        for line in blueprint.lines():
            logger.info(line)
        memory = blueprint.memory
        self.config, self.blueprint = config, blueprint
        self.model_config: ModelConfig = blueprint.model
        self.max_model_len = memory.max_model_len
        self.tokenizer_path: Path = blueprint.path
        self.generation_defaults = GenerationDefaults.load(blueprint.path)
        self.workers = Workers(config, blueprint, fill)
        self.scheduler = Scheduler(
            make_cache(*memory.pool_sizes, memory.max_keep),
            max_num_seqs=memory.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=memory.max_model_len,
            eos_token_ids=sorted({*blueprint.model.eos_token_ids, *self.generation_defaults.eos_token_ids}),
        )
        self._seeds = random.Random(config.seed)
        self._open: dict[str, None] = {}
        self._unusable: str | None = None

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that cannot be computed; nothing has changed then."""
        self._must_be_usable()
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} is already in use; choose another")
        validate(request, self.model_config.vocab_size, self.max_model_len)
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=self._seeds.getrandbits(63))
            request = msgspec.structs.replace(request, params=params)
        self.scheduler.add(request)
        self._open[request.request_id] = None

    def abort(self, request_id: str, reason: str) -> bool:
        """End a request at any moment; no output follows. False when there is no such request (any more)."""
        self._open.pop(request_id, None)
        found = self.scheduler.abort(request_id, reason)
        if not self.scheduler.has_work:
            self.scheduler.check()
        return found

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Compute one step and return what it gave. Raises EngineDeadError; see there."""
        self._must_be_usable()
        try:
            plan = self.scheduler.plan()
            outputs = self.scheduler.commit(plan, self.workers.step(plan)) if plan is not None else []
            if not self.scheduler.has_work:
                self.scheduler.check()
        except Exception as error:
            raise self._die(error) from error
        except BaseException as interruption:
            # A step cut short by Ctrl-C leaves the books as open as one that failed.
            self._die(interruption)
            raise
        for output in outputs:
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)
        return outputs

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def check(self) -> None:
        """Balances the books of ids and requests. Raises AssertionError saying what does not add up."""
        self.scheduler.check()

    def close(self) -> None:
        """Let go of all memory. Harmless when repeated; a closed engine refuses everything else."""
        if self._unusable != "the engine is closed":
            self._unusable = "the engine is closed"
            self._open.clear()
            self.workers.close()

    def _must_be_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(self._unusable)

    def _die(self, error: BaseException) -> EngineDeadError:
        self._unusable = f"the engine has died: {type(error).__name__}: {error}"
        outputs = [Output(request_id=name, finish_reason="error", error=self._unusable) for name in self._open]
        self._open.clear()
        return EngineDeadError(self._unusable, outputs)
