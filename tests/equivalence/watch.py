"""An engine under watch: memory that nobody owns is poison, and no step may change what its rows do not write."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from deltaserve.cache.manager import CacheManager
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan, Result
from deltaserve.engine.engine import Engine
from deltaserve.engine.workers import Workers
from deltaserve.ops.layout import BLOCK
from deltaserve.runner.memory import Pools


def bits(pool: Tensor) -> Tensor:
    """The same memory as integers: NaN equals NaN."""
    return pool.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()])


class WatchedWorkers(Workers):
    """Compares the pools before and after each plan, byte for byte. Counts blocks itself, from the plans alone."""

    def __init__(self, inner: Workers, pools: Pools) -> None:
        self.runner = inner.runner
        self.pools = pools
        self.tables: dict[int, list[int]] = {}
        self.num_mixed = self.num_chunks = 0

    def step(self, plan: Plan) -> Result:
        pools = self.pools
        before = [bits(pool).clone() for pool in (*pools.kv, *pools.conv, *pools.state)]
        result = super().step(plan)
        slots, places = self._written(plan)
        after = [bits(pool) for pool in (*pools.kv, *pools.conv, *pools.state)]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number < len(pools.kv):
                changed_NB = (old != new).flatten(3).any(-1).any(0)
                stray = {(int(block), int(offset)) for block, offset in changed_NB.nonzero()} - places
                assert not stray, f"{plan}: keys or values of (block, offset) {stray} changed"
            else:
                changed_S = (old != new).flatten(1).any(-1)
                strange = set(changed_S.nonzero().flatten().tolist()) - slots
                assert not strange, f"{plan}: slots {strange} changed"
        self.num_mixed += 0 < plan.num_decode < len(plan.rows)
        self.num_chunks += sum(not row.samples for row in plan.rows)
        return result

    def _written(self, plan: Plan) -> tuple[set[int], set[tuple[int, int]]]:
        for seating in plan.seatings:
            self.tables[seating.seat] = list(seating.blocks)
        slots: set[int] = set()
        places: set[tuple[int, int]] = set()
        for row in plan.rows:
            self.tables[row.seat] += row.new_blocks
            slots.update(slot for slot in row.write_slots if slot >= 0)
            table = self.tables[row.seat]
            places.update((table[t // BLOCK], t % BLOCK) for t in range(row.start, row.start + row.num_tokens))
        return slots, places


class Watched:
    """An engine whose free memory is `poison`, from the start and whenever an id is freed."""

    def __init__(self, config: EngineConfig, poison: float) -> None:
        self.poison = poison
        make_cache = partial(CacheManager, on_free_block=self._free_block, on_free_slot=self._free_slot)
        self.engine = Engine(config, make_cache=make_cache, fill=poison)
        assert self.engine.workers.runner is not None
        self.pools = self.engine.workers.runner.pools
        self.workers = WatchedWorkers(self.engine.workers, self.pools)
        self.engine.workers = self.workers

    def assert_nothing_left(self) -> None:
        """All ids are free, so all memory is poison again."""
        self.engine.check()
        usage = self.engine.stats().cache
        assert (usage.blocks_used, usage.slots_used) == (0, 0)
        for pool in (*self.pools.kv, *self.pools.conv, *self.pools.state):
            assert torch.equal(bits(pool), bits(torch.full_like(pool, self.poison))), "memory was changed after its end"

    def _free_block(self, block: int) -> None:
        self.pools.fill_block(block, self.poison)

    def _free_slot(self, slot: int) -> None:
        self.pools.fill_slot(slot, self.poison)
