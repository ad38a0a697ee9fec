"""Who holds which id: the KV blocks and state slots of every running request, in four verbs.

    admit(token_ids) -> Lease | None            a place in memory, on the longest prefix that can be resumed
    place(lease, n, keep) -> Placement | None   room for the next n tokens
    commit(lease, kept, token_ids)              the first tokens of what was placed became the truth
    release(lease)                              everything back; the only way out

Pure bookkeeping: knows no tensor, no queue and no policy of who comes first. A recurrent state is read from one slot
and written to others, so nothing here ever copies or clears memory: a commit, a roll-back, a resume, a fork and a
snapshot all change integers.

A lease owns `max_keep` slots, as many as the tokens at a step's end that might become its last one. The state it stands
on (`Lease.read`) is one of those, or none (the zero state), or a slot of the prefix index that its next step reads.

Steps that overlap. A row may be placed behind one in flight; where the end of that is open, it starts later than it is
placed by as many tokens as that turns out to keep beyond those that are certain. Steps are computed in the order of
their plans, so an id that is released is handed out at once: whatever a row in flight still writes there is written
before its next owner's first step. What is published must not change any more, so a row behind another never writes
where a state lies that the commit in between may publish. `docs/cache.md` goes through the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from deltaserve.cache.lease import Flight, Lease, Placement
from deltaserve.cache.pool import IdPool
from deltaserve.cache.prefix import Chain, IndexFactory, NoPrefixIndex
from deltaserve.core.plan import NO_SLOT
from deltaserve.core.stats import CacheUsage

BLOCK_SIZE = 64
"""Tokens in one KV block, as the ops lay it out."""


class CacheManager:
    """Two pools, an index over what they hold, and the leases of those who run."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        max_keep: int = 1,
        index: IndexFactory = NoPrefixIndex,
        on_free_block: Callable[[int], None] | None = None,
        on_free_slot: Callable[[int], None] | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """
        num_blocks, num_slots: ids of each kind.
        max_keep: slots a lease owns; the most a `place` may ask to keep.
        index: makes the prefix index, from the two pools and the block size.
        on_free_block, on_free_slot: called with an id that nobody holds any more.

        Raises ValueError when not even one request fits.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1: give the cache more memory")
        if max_keep < 1:
            raise ValueError(f"max_keep is {max_keep}; it must be at least 1")
        if num_slots < max_keep:
            raise ValueError(f"num_slots is {num_slots}; one request needs {max_keep}: give the cache more memory")
        self.block_size, self.max_keep = block_size, max_keep
        self._blocks, self._slots = IdPool(num_blocks, on_free_block), IdPool(num_slots, on_free_slot)
        self._index = index(self._blocks, self._slots, block_size)
        self._num_kept = self._num_dropped = 0

    # ---- the four verbs --------------------------------------------------------------------------------------------

    def admit(
        self, token_ids: Sequence[int], *, reuse: bool = True, salt: bytes = b"", spare_blocks: int = 0
    ) -> Lease | None:
        """A lease on the longest prefix that can be resumed; None: no room now, and nothing has changed.

        There is room when a request's own slots can be had, and blocks for all its tokens with `spare_blocks` left
        over. Blocks are only looked at here: `place` takes them. At least one token is left to compute.

        reuse: False computes every token.
        salt: requests share prefixes only with those of the same salt.
        """
        assert token_ids, "a request without tokens"
        if self._slots.num_available < self.max_keep:
            return None
        chain = self._index.match(token_ids, salt) if reuse else Chain(salt)
        blocks = chain.blocks
        cached = len(blocks) * self.block_size
        lease = Lease(chain, blocks, [], chain.slot, cached, cached, len(token_ids), chain.slot)
        lease.num_matched = chain.num_matched * self.block_size
        for block in blocks:
            self._blocks.share(block)
        if lease.shared != NO_SLOT:
            self._slots.share(lease.shared)
        if self._blocks.num_available >= self.num_missing(lease, len(token_ids)) + spare_blocks:
            lease.own = self._take_slots(self.max_keep) or self._take_over(lease)
            return lease
        self.release(lease)
        return None

    def place(self, lease: Lease, n: int, keep: int, ahead: int = 0) -> Placement | None:
        """Room for the next `n` tokens, of which one of the last `keep` becomes the last true one.

        ahead: room for so many more behind them is wished for; all of it is given, or none.

        None: no room now, and nothing has changed. Every placement is followed by one `commit`, in the order of the
        placements, or by `release`. Behind a row in flight whose end is open, one more row may be placed.
        """
        assert 1 <= keep <= min(n, self.max_keep), f"keeps {keep} of {n} tokens and may keep {self.max_keep}"
        assert lease.own, "a released lease is placed"
        num_open = lease.most_planned - lease.num_planned
        assert num_open == len(lease.later), "a row is placed behind one whose start is open"
        assert keep == n or not num_open, f"a row of {n} tokens that keeps {keep} starts at an open end"
        end = lease.most_planned + n
        new = self._take_blocks(self.num_missing(lease, end + ahead))
        if new is None and ahead:
            new, ahead = self._take_blocks(self.num_missing(lease, end)), 0
        if new is None:
            return None
        lease.blocks += new
        if lease.flights:
            self._leave_states(lease)
        flight, read_slot, later_slots = Flight(n, n - keep), lease.read, lease.later
        write_slots = [NO_SLOT] * (n - keep) + lease.own[:keep]
        for boundary in self._boundaries_inside(lease, end) if flight.first_kept else ():
            inside = boundary - lease.num_planned - 1
            if 0 <= inside < flight.first_kept and self._index.wants_state(lease.chain, boundary, lease.known):
                spare = self._take_slots(1)
                if spare is None:
                    self._num_dropped += 1
                    continue
                flight.spares.append((spare[0], boundary))
                write_slots[inside] = spare[0]
        lease.flights.append(flight)
        lease.num_planned += flight.num_certain
        lease.read, *later = lease.own[:keep]
        lease.later = tuple(later)
        return Placement(tuple(new), read_slot, later_slots, tuple(write_slots), ahead)

    def commit(self, lease: Lease, kept: int, token_ids: Sequence[int]) -> None:
        """The first `kept` tokens of the oldest row in flight became the truth. `token_ids`: the sequence, at least so
        far."""
        assert lease.flights, "a commit without a row in flight"
        flight = lease.flights[0]
        assert flight.num_certain <= kept <= flight.num_tokens, (
            f"keeps {kept} tokens of a row that may keep {flight.num_certain} to {flight.num_tokens}"
        )
        start, lease.num_done = lease.num_done, lease.num_done + kept
        assert len(token_ids) >= lease.num_done, f"{len(token_ids)} tokens are told, {lease.num_done} are in the cache"
        lease.flights.popleft()
        self._drop_shared(lease)
        self._index.publish(lease.chain, token_ids, lease.blocks, lease.num_done)
        self._give_spares(lease, flight)
        lease.num_planned += kept - flight.num_certain
        if lease.flights:
            return  # the row behind has written where this one's last state was
        lease.read, lease.later = lease.own[kept - flight.num_certain], ()
        boundary = lease.num_done // self.block_size * self.block_size
        inside = boundary - 1 - start - flight.first_kept
        if inside >= 0 and self._index.wants_state(lease.chain, boundary, lease.known):
            self._give_own(lease, inside, boundary)

    def release(self, lease: Lease, *, withdraw: bool = False) -> None:
        """Everything back, at any moment; once more does nothing.

        withdraw: what this lease published, and what continues it, is not to be trusted and leaves the index.
        """
        if withdraw:
            self._index.withdraw(lease.chain)
        self._drop_shared(lease)
        for flight in lease.flights:
            self._drop_spares(flight)
        for block in lease.blocks:
            self._blocks.drop(block)
        for slot in lease.own:
            self._slots.drop(slot)
        lease.blocks, lease.own, lease.read, lease.later = [], [], NO_SLOT, ()
        lease.flights.clear()

    # ---- what others may ask ---------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether a prefix computed once can be resumed by another request."""
        return self._index.keeps

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits when nothing else runs."""
        return self._blocks.size * self.block_size

    def has_blocks(self, num_blocks: int) -> bool:
        """Whether so many can be had."""
        return num_blocks <= self._blocks.num_available

    def num_missing(self, lease: Lease, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` needs beyond those the lease has."""
        return max(-(-num_tokens // self.block_size) - len(lease.blocks), 0)

    def usage(self) -> CacheUsage:
        return CacheUsage(
            blocks_used=self._blocks.num_used,
            blocks_cached=self._blocks.num_idle,
            blocks_total=self._blocks.size,
            slots_used=self._slots.num_used,
            slots_cached=self._slots.num_idle,
            slots_total=self._slots.size,
            snapshots_kept=self._num_kept,
            snapshots_evicted=self._num_kept - self._index.num_states,
            snapshots_dropped=self._num_dropped,
        )

    def check(self, leases: Iterable[Lease]) -> None:
        """Balance the ledger: every id has exactly the owners that `leases` and the index explain.

        Raises AssertionError.
        """
        blocks: list[int] = []
        slots: list[int] = []
        written: list[int] = []
        for lease in leases:
            assert len(lease.own) == self.max_keep, f"a lease owns {len(lease.own)} slots instead of {self.max_keep}"
            assert lease.read in (NO_SLOT, lease.shared, *lease.own), f"a lease reads slot {lease.read}, not its own"
            no_token = lease.num_planned == 0
            assert (lease.read == NO_SLOT) == no_token, "a lease has a state without tokens, or none with"
            placed = sum(flight.num_certain for flight in lease.flights)
            assert lease.num_planned == lease.num_done + placed, "a lease has miscounted the rows in flight"
            num_open = lease.flights[-1].num_open if lease.flights else 0
            assert lease.later == tuple(lease.own[1 : 1 + num_open]), "a lease has lost states that may be the truth"
            assert len(lease.chain.entries) * self.block_size <= lease.num_done, (
                "what rows in flight write is published"
            )
            blocks += lease.blocks
            written += [*lease.own, *(slot for flight in lease.flights for slot, _ in flight.spares)]
            slots += [lease.shared] if lease.shared != NO_SLOT else []
        slots += written
        cached_blocks, cached_slots = self._index.check()
        assert len(set(written)) == len(written), "two leases write one slot"
        assert not set(written) & set(cached_slots), "a lease writes a slot of the index"
        self._blocks.check("block", blocks, cached_blocks)
        self._slots.check("slot", slots, cached_slots)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _boundaries_inside(self, lease: Lease, end: int) -> set[int]:
        """Block boundaries of a row that ends at `end` at which a state is worth a slot of its own.

        The last one, unless `commit` can offer it from the lease's own. Where a prompt ends on a boundary it is the one
        before: whoever sends the same prompt again resumes there, as one token must be left to compute. And the one
        where the hit of this very lease was lost because no state was kept: the next one to come finds it.
        """
        boundary = end // self.block_size * self.block_size
        last = boundary - self.block_size if boundary == end == lease.known else boundary
        return {last, min(lease.num_matched, last)}

    def _take_over(self, lease: Lease) -> list[int]:
        """The lease's own slots, where its hit keeps one too many from being free: the snapshot becomes one of them.

        Without this a request could wait for ever for what it holds itself. That its slots were at hand before the hit
        was shared means that nobody else reads the snapshot.
        """
        slot, lease.shared = lease.shared, NO_SLOT
        others = self._take_slots(self.max_keep - 1)
        assert slot != NO_SLOT, "slots that were at hand are gone"
        assert others is not None, "slots that were at hand are gone"
        assert self._slots.refs[slot] == 2, "a snapshot that others read is taken over"
        self._index.surrender(lease.chain)
        return [slot, *others]

    def _leave_states(self, lease: Lease) -> None:
        """Before a row is placed behind the ones in flight: where the last of these may end on a boundary at which a
        state is wanted, or cross it, its slot is kept for the index, and the row that comes writes a fresh one. Without
        a fresh one it is written in place, and the state is not kept."""
        for i, boundary in enumerate(range(lease.num_planned, lease.most_planned + 1)):
            if boundary % self.block_size or not self._index.wants_state(lease.chain, boundary, lease.known):
                continue
            fresh = self._take_slots(1)
            if fresh is None:
                self._num_dropped += 1
                continue
            lease.flights[-1].spares.append((lease.own[i], boundary))
            lease.own[i] = fresh[0]

    def _give_own(self, lease: Lease, i: int, boundary: int) -> None:
        """Hand own[i] to the index and take a fresh slot in its place. No bytes move."""
        assert not lease.flights, "a state is published that a row in flight writes"
        fresh = self._take_slots(1)
        if fresh is None:
            self._num_dropped += 1
            return
        slot = lease.own[i]
        if not self._keep(lease, boundary, slot):
            self._slots.drop(fresh[0])
            return
        lease.own[i] = fresh[0]
        if lease.read == slot:
            lease.shared = slot
        else:
            self._slots.drop(slot)

    def _keep(self, lease: Lease, boundary: int, slot: int) -> bool:
        """Offer the state after `boundary` tokens to the index. Inside an answer it takes the place of the one before,
        and counts as the same."""
        kept = self._index.snapshot(lease.chain, boundary, slot)
        self._num_kept += kept and not self._index.supersede(lease.chain, boundary, lease.known)
        return kept

    def _give_spares(self, lease: Lease, flight: Flight) -> None:
        """Those at boundaries that the row has reached; of others the index has no block."""
        for slot, boundary in flight.spares:
            assert slot not in lease.own, "a state is published that a row in flight writes"
            self._keep(lease, boundary, slot)
        self._drop_spares(flight)

    def _drop_spares(self, flight: Flight) -> None:
        for slot, _ in flight.spares:
            self._slots.drop(slot)
        flight.spares = []

    def _drop_shared(self, lease: Lease) -> None:
        if lease.shared != NO_SLOT:
            self._slots.drop(lease.shared)
            lease.shared = NO_SLOT

    def _take_blocks(self, n: int) -> list[int] | None:
        if n > self._blocks.num_available:
            return None
        while self._blocks.num_free < n:
            self._index.evict_block()
        return self._blocks.take(n)

    def _take_slots(self, n: int) -> list[int] | None:
        if n > self._slots.num_available:
            return None
        while self._slots.num_free < n:
            self._index.evict_slot()
        return self._slots.take(n)
