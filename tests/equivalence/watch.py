"""An engine under watch: memory that nobody owns is poison, and no step may change what its rows do not write.

Steps may overlap. What is published must hold what was computed for it and never change: neither by a step planned
later nor by one that was in flight when it was published.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import IndexFactory, PrefixIndex
from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan, Result
from deltaserve.engine.engine import Engine
from deltaserve.engine.workers import Workers
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.runner.draft import FIRST_ENTRY
from deltaserve.runner.memory import Pools
from deltaserve.scheduler.speculation import Speculation
from tests.equivalence.truth import TIE

NAN = float("nan")


def bits(pool: Tensor) -> Tensor:
    """The same memory as integers: NaN equals NaN."""
    return pool.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()])


@dataclass(frozen=True)
class Watching:
    """A step in flight."""

    workers: WatchedWorkers
    inner: Pending

    @property
    def is_over(self) -> bool:
        return self.inner.is_over

    def result(self) -> Result:
        self.workers.num_in_flight -= 1
        return self.inner.result()


class WatchedWorkers(Workers):
    """Compares the pools before and after each plan, byte for byte. Counts blocks itself, from the plans alone."""

    def __init__(self, inner: Workers, pools: Pools, cache: CacheManager) -> None:
        self.blueprint, self.runner = inner.blueprint, inner.runner
        self._threads_before = inner._threads_before
        self.pools, self.cache = pools, cache
        self.tables: dict[int, list[int]] = {}
        self.num_mixed = self.num_chunks = self.num_ahead = self.num_in_flight = 0
        self.num_open = self.num_later = 0
        """Rows whose start was open when they were planned, and those that started later."""
        self.state_after: dict[int, tuple[int, int]] = {}
        """Slot -> the step that wrote it last, and how many tokens its state is after."""

    def launch(self, plan: Plan) -> Pending:
        pools = self.pools
        before = [bits(pool).clone() for pool in (*pools.kv, *pools.per_slot)]
        starts = self._starts(plan)
        pending = super().launch(plan)
        slots, places, ahead = self._written(plan, starts)
        cached_blocks, cached_slots = self.cache._index.check()
        assert not slots & set(cached_slots), f"{plan}: writes published states"
        assert not {block for block, _ in places | ahead} & set(cached_blocks), f"{plan}: writes published blocks"
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
        self.num_ahead += self.num_in_flight > 0
        self.num_in_flight += 1
        return Watching(self, pending)

    def _starts(self, plan: Plan) -> list[int]:
        """Where each row really starts. What was launched before is computed: this is a CPU."""
        assert self.runner is not None
        inputs = self.runner.inputs
        gained = inputs.gained if inputs.runs_ahead else self.runner.seats.gained
        for row in plan.rows:
            self.num_open += bool(row.later_slots)
            self.num_later += bool(row.later_slots) and int(gained[row.seat]) > 0
        return [row.start + min(int(gained[row.seat]), len(row.later_slots)) for row in plan.rows]

    def _written(self, plan: Plan, starts: list[int]) -> tuple[set[int], set[tuple[int, int]], set[tuple[int, int]]]:
        """Slots; (block, offset) of keys and values; and those of the MTP layer, whose entries run ahead."""
        for seating in plan.seatings:
            self.tables[seating.seat] = list(seating.blocks)
        slots: set[int] = set()
        places: set[tuple[int, int]] = set()
        ahead: set[tuple[int, int]] = set()
        for row, start in zip(plan.rows, starts, strict=True):
            self.tables[row.seat] += row.new_blocks
            states = {slot: start + t + 1 for t, slot in enumerate(row.write_slots) if slot >= 0}
            self.state_after |= {slot: (plan.step, length) for slot, length in states.items()}
            slots.update(states)
            table = self.tables[row.seat]
            end = start + row.num_tokens
            places.update((table[t // BLOCK], t % BLOCK) for t in range(start, end))
            most = max(r.num_propose for r in plan.rows)  # in the row's own blocks, which nobody else reads there
            last = min(end + max(most, 1), len(table) * BLOCK)
            ahead.update((table[t // BLOCK], t % BLOCK) for t in range(max(start, 1), last))
        return slots, places, ahead


class Watched:
    """An engine whose free memory is `poison`, from the start and whenever an id is freed."""

    def __init__(self, config: EngineConfig, poison: float, speculation: Speculation | None = None) -> None:
        self.poison = poison
        self.caches: list[CacheManager] = []
        self.engine = Engine(config, make_cache=self._make_cache, fill=poison, speculation=speculation)
        assert self.engine.workers.runner is not None
        self.pools = self.engine.workers.runner.pools
        [cache] = self.caches
        self.workers = WatchedWorkers(self.engine.workers, self.pools, cache)
        self.engine.workers = self.workers
        self.published: dict[int, tuple[bytes, int, list[Tensor]]] = {}
        """Slot -> key of its prefix, the step that wrote it, and what it held when it was first seen in the index."""

    def look(self) -> None:
        """After each step: what the index keeps was computed for it, and has not changed since."""
        [cache] = self.caches
        self.engine.check()
        index = cache._index
        if not isinstance(index, PrefixIndex):
            return
        published = {}
        for entry in index.states:
            key, depth = entry.key, entry.depth
            step, length = self.workers.state_after[entry.slot]
            assert length == depth * BLOCK, f"slot {entry.slot} is published after {depth * BLOCK} tokens, not {length}"
            now = [bits(pool[entry.slot]) for pool in self.pools.per_slot]
            before = self.published.get(entry.slot)
            if before is None or before[:2] != (key, step):
                before = (key, step, [part.clone() for part in now])
            assert all(torch.equal(a, b) for a, b in zip(now, before[2], strict=True)), "a published state has changed"
            published[entry.slot] = before
        self.published = published

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
        """Computes the prefixes of the index anew, in one step each, and compares keys, values and states, those of the
        MTP layer too where its entries are said to be whole. Returns how many states. In float32, not those of prefixes
        in which a token's choice of experts hangs on rounding."""
        [cache] = self.caches
        index = cache._index
        assert isinstance(index, PrefixIndex)
        compared = 0
        for entry in list(index.states)[:at_most]:
            chain = [entry]
            while chain[0].parent is not None:
                chain.insert(0, chain[0].parent)
            right, gap = self._compute([token for link in chain for token in array("q", link.tokens)])
            if gap < TIE and self.engine.blueprint.dtype == torch.float32:
                continue
            compared += 1
            blocks = [link.block for link in chain]
            for number, (pool, right_kv) in enumerate(zip(self.pools.kv, right.kv, strict=True)):
                is_mtp = bool(self.pools.hidden) and number == len(right.kv) - 1
                there = [place for place, block in enumerate(blocks) if not is_mtp or self.has_entries(block)]
                kept, right_kept = pool[:, [blocks[place] for place in there]], right_kv[:, there].clone()
                if is_mtp and 0 in there:
                    kept[:, 0, :FIRST_ENTRY], right_kept[:, 0, :FIRST_ENTRY] = 0, 0
                kept_T, right_T = kept.flatten(1, 2), right_kept.flatten(1, 2)
                torch.testing.assert_close(kept_T, right_T, rtol=0, atol=tolerance)
            for pool, right_state in zip(self.pools.per_slot, right.per_slot, strict=True):
                torch.testing.assert_close(pool[entry.slot], right_state[0], rtol=0, atol=tolerance)
        return compared

    def has_entries(self, block: int) -> bool:
        """Whether the runner says that the MTP layer's keys and values of a block are all there."""
        runner = self.engine.workers.runner
        assert runner is not None
        assert runner.look_ahead is not None
        return runner.look_ahead.is_whole(block)

    def _compute(self, tokens: list[int]) -> tuple[Pools, float]:
        """One sequence alone, in blocks 0, 1, ... and slot 0; and the least gap between the scores of the last expert
        that a token took and of the first that it did not."""
        assert self.engine.workers.runner is not None
        model, length = self.engine.workers.runner.model, len(tokens)
        blocks, device = list(range(-(-length // BLOCK))), self.engine.blueprint.device
        token_ids = torch.tensor(tokens, device=device)
        kv = [pool.new_full((2, len(blocks), *pool.shape[2:]), NAN) for pool in self.pools.kv]
        conv, state, hidden = (
            tuple(pool.new_full((2, *pool.shape[1:]), NAN) for pool in kind)
            for kind in (self.pools.conv, self.pools.state, self.pools.hidden)
        )
        gaps, top_k = [math.inf], self.engine.model_config.top_k

        def look(_module: object, _inputs: object, scores_TF: torch.Tensor) -> None:
            best = scores_TF[:, :-1].topk(top_k + 1).values if scores_TF.shape[1] > top_k + 1 else None
            gaps.append(math.inf if best is None else float((best[:, -2] - best[:, -1]).min()))

        routers = [module for name, module in model.named_modules() if name.endswith(".router")]  # type: ignore[attr-defined]
        hooks = [router.register_forward_hook(look) for router in routers]
        with torch.inference_mode():
            layout = Layout.from_rows([length], write_slots=[[-1] * (length - 1) + [0]], blocks=[blocks], device=device)
            hidden_TD = model(token_ids, ForwardContext(layout=layout, kv=kv, conv=conv, state=state))
            for pool in hidden:
                pool[0] = hidden_TD[-1]
            if hidden and length > FIRST_ENTRY:
                layout = Layout.from_rows([length - FIRST_ENTRY], starts=[FIRST_ENTRY], blocks=[blocks], device=device)
                layout = replace(layout, first_key=torch.tensor([FIRST_ENTRY], dtype=torch.int32, device=device))
                context = ForwardContext(layout=layout, kv=kv, conv=conv, state=state)
                model.look_ahead(token_ids[FIRST_ENTRY:], hidden_TD[:-FIRST_ENTRY], context)
        for hook in hooks:
            hook.remove()
        return Pools(tuple(kv), conv, state, hidden), min(gaps)

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
