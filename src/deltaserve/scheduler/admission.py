"""Who of those who wait is seated: as many as the step has tokens for and the cache has memory for, in their order.

Knows lines and memory; no result and no draft.
"""

from __future__ import annotations

from deltaserve.cache.lease import Lease
from deltaserve.cache.manager import CacheManager
from deltaserve.scheduler import policy
from deltaserve.scheduler.counters import Counters
from deltaserve.scheduler.lines import Lines
from deltaserve.scheduler.sequence import Sequence


class Admission:
    """From the waiting line to the running one."""

    def __init__(self, cache: CacheManager, lines: Lines, counters: Counters) -> None:
        self._cache, self._lines, self._counters = cache, lines, counters

    def admit(self, budget: int, most: int | None = None) -> list[Sequence]:
        """Seat those waiting requests that this step has tokens and the cache has room for. `most`: prompts of it."""
        candidates = self._without_followers(self._lines.candidates) if budget > 0 else []
        if not candidates:
            return []
        prompts = sorted([*self._lines.prefilling, *candidates], key=lambda s: s.order)[:most]
        shares = policy.share_prompts(budget, [s.num_to_prefill for s in prompts])
        owed = sum(self.blocks_owed(s) for s in self._lines.running)
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
            owed += self.blocks_owed(sequence)
        return seated

    def blocks_owed(self, sequence: Sequence) -> int:
        """Blocks that a running request needs for the tokens it has and those of its next two steps, and one more to
        grow into."""
        assert sequence.lease is not None, "a waiting request is owed blocks"
        longest = sequence.num_expected + 2 * (self._cache.max_keep - 1)
        return self._cache.num_missing(sequence.lease, longest) + 1

    def _without_followers(self, candidates: list[Sequence]) -> list[Sequence]:
        """Those who need not wait for another: a prompt that is being computed is computed once for all who share it.

        A leader moves in every step of prompts, so nobody waits for long; if its state cannot be kept, they compute for
        themselves.
        """
        if not self._cache.keeps:
            return candidates
        leaders, free = [s for s in self._lines.running if s.is_unpublished and not s.needs_whole_prompt], []
        for sequence in candidates:
            if not any(sequence.follows(leader, self._cache.block_size) for leader in leaders):
                free.append(sequence)
                leaders.append(sequence)
        return free

    def _count_hit(self, sequence: Sequence, lease: Lease) -> None:
        """What a first admission got from the index, and what it did not."""
        size = self._cache.block_size
        wanted = (len(sequence.token_ids) - 1) // size * size if self._cache.keeps else 0
        lost = {"logprobs": wanted}
        if not sequence.needs_whole_prompt:
            stored = max(lease.num_matched, lease.num_done)
            lost = {"not stored": wanted - stored, "no state": stored - lease.num_done}
        self._counters.hit(wanted, lease.num_done, lost)
