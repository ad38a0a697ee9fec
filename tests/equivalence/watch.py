"""An engine under watch: memory that nobody owns is poison, and no step may change what its rows do not write."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import IndexFactory, PrefixIndex
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan, Result
from deltaserve.engine.engine import Engine
from deltaserve.engine.workers import Workers
from deltaserve.models.qwen3_next import Qwen3Next
from deltaserve.ops.layout import BLOCK
from deltaserve.runner.memory import Pools
from tests.driver import Driver, Row


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
        before = [bits(pool).clone() for pool in (*pools.kv, *pools.per_slot)]
        result = super().step(plan)
        slots, places, ahead = self._written(plan)
        after = [bits(pool) for pool in (*pools.kv, *pools.per_slot)]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number < len(pools.kv):
                changed_NB = (old != new).flatten(3).any(-1).any(0)
                is_mtp = len(pools.hidden) > 0 and number == len(pools.kv) - 1
                legal = ahead if is_mtp else places
                stray = {(int(block), int(offset)) for block, offset in changed_NB.nonzero()} - legal
                assert not stray, f"{plan}: keys or values of (block, offset) {stray} changed"
            else:
                changed_S = (old != new).flatten(1).any(-1)
                strange = set(changed_S.nonzero().flatten().tolist()) - slots
                assert not strange, f"{plan}: slots {strange} changed"
        self.num_mixed += 0 < plan.num_decode < len(plan.rows)
        self.num_chunks += sum(not row.samples for row in plan.rows)
        return result

    def _written(self, plan: Plan) -> tuple[set[int], set[tuple[int, int]], set[tuple[int, int]]]:
        """Slots; (block, offset) of keys and values; and those of the MTP layer, whose entries run ahead."""
        for seating in plan.seatings:
            self.tables[seating.seat] = list(seating.blocks)
        slots: set[int] = set()
        places: set[tuple[int, int]] = set()
        ahead: set[tuple[int, int]] = set()
        for row in plan.rows:
            self.tables[row.seat] += row.new_blocks
            slots.update(slot for slot in row.write_slots if slot >= 0)
            table = self.tables[row.seat]
            end = row.start + row.num_tokens
            places.update((table[t // BLOCK], t % BLOCK) for t in range(row.start, end))
            last = min(end + max(row.num_propose, 1), len(table) * BLOCK)
            ahead.update((table[t // BLOCK], t % BLOCK) for t in range(max(row.start, 1), last))
        return slots, places, ahead


class Watched:
    """An engine whose free memory is `poison`, from the start and whenever an id is freed."""

    def __init__(self, config: EngineConfig, poison: float) -> None:
        self.poison = poison
        self.caches: list[CacheManager] = []
        self.engine = Engine(config, make_cache=self._make_cache, fill=poison)
        assert self.engine.workers.runner is not None
        self.pools = self.engine.workers.runner.pools
        self.workers = WatchedWorkers(self.engine.workers, self.pools)
        self.engine.workers = self.workers

    def assert_nothing_left(self) -> None:
        """No request holds an id, and all memory but what the prefix index keeps is poison again."""
        self.engine.check()
        usage = self.engine.stats().cache
        assert (usage.blocks_used, usage.slots_used) == (0, 0)
        [cache] = self.caches
        blocks, slots = ([i for i, refs in enumerate(pool.refs) if not refs] for pool in (cache._blocks, cache._slots))
        left = [pool[:, blocks] for pool in self.pools.kv]
        left += [pool[slots] for pool in self.pools.per_slot]
        for pool in left:
            assert torch.equal(bits(pool), bits(torch.full_like(pool, self.poison))), "memory was changed after its end"

    def assert_kept_is_right(self, tolerance: float, at_most: int) -> int:
        """Computes the prefixes of the index anew and compares keys, values and states. Returns how many states."""
        [cache] = self.caches
        assert self.engine.workers.runner is not None
        index, model = cache._index, self.engine.workers.runner.model
        assert isinstance(index, PrefixIndex)
        assert isinstance(model, Qwen3Next)
        states = list(index._states.values())[:at_most]
        for entry in states:
            chain = [entry]
            while chain[0].parent is not None:
                chain.insert(0, chain[0].parent)
            row = Row([token for link in chain for token in array("q", link.tokens)])
            driver = Driver(
                model,
                num_blocks=len(chain),
                num_slots=2,
                state_dtype=self.pools.state[0].dtype if self.pools.state else None,
            )
            driver.prefill(row)
            for kept, right in zip(self.pools.kv, driver.kv, strict=False):
                blocks = [link.block for link in chain]
                torch.testing.assert_close(kept[:, blocks], right[:, row.blocks], rtol=0, atol=tolerance)
            for kept, right in zip((*self.pools.conv, *self.pools.state), (*driver.conv, *driver.state), strict=True):
                torch.testing.assert_close(kept[entry.slot], right[row.slot], rtol=0, atol=tolerance)
        return len(states)

    def _make_cache(self, num_blocks: int, num_slots: int, max_keep: int, index: IndexFactory) -> CacheManager:
        cache = CacheManager(
            num_blocks, num_slots, max_keep, index, on_free_block=self._free_block, on_free_slot=self._free_slot
        )
        self.caches.append(cache)
        return cache

    def _free_block(self, block: int) -> None:
        self.pools.fill_block(block, self.poison)

    def _free_slot(self, slot: int) -> None:
        self.pools.fill_slot(slot, self.poison)
