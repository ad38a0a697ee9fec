"""Which prefixes can be resumed: a content hash over whole blocks, and the state slots at some of their ends.

Knows ids and token ids; no tensor, no request, no queue. `PrefixIndex` keeps prefixes, `NoPrefixIndex` keeps none; the
cache manager treats both alike. What the index promises:

- A hit is legal only where the KV blocks *and* a state at exactly that boundary exist.
- What is published never changes: a block is published when it is whole, and a published slot has no writer.
- Two prompts never share by collision: a hit is found by the token ids themselves, block by block behind the request's
  salt, and what is published has one name alone, a chained 128-bit hash under a server's salt and a request's.
- Nothing here starves a request: whatever only the index holds is evicted when a request needs it.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltaserve.cache.entry import Entry
from deltaserve.cache.pool import IdPool
from deltaserve.cache.snapshots import Snapshots
from deltaserve.core.plan import NO_SLOT

WORD = 8
"""Bytes of a token id."""

SnapshotPolicy = Callable[[int, int], bool]
"""(boundary, known): is the state after `boundary` tokens worth a slot, for a request that came with `known` tokens."""


@dataclass(slots=True)
class Chain:
    """The published part of one sequence: an entry for each whole block from its start. Only the index looks inside."""

    salt: bytes = b""
    entries: list[Entry] = field(default_factory=list)
    num_matched: int = 0
    """Blocks that were found at the match; those beyond `entries` then had no state at their end to resume from."""

    @property
    def blocks(self) -> list[int]:
        return [entry.block for entry in self.entries]

    @property
    def slot(self) -> int:
        """The state at the chain's end."""
        return self.entries[-1].slot if self.entries else NO_SLOT


class Index(Protocol):
    """What the cache manager asks of an index."""

    keeps: bool
    """Whether anything can be published here."""

    @property
    def num_states(self) -> int:
        """Snapshots held now."""

    def match(self, token_ids: Sequence[int], salt: bytes) -> Chain:
        """The longest resumable prefix that leaves a token to compute. Takes no reference to its ids."""

    def publish(self, chain: Chain, token_ids: Sequence[int], blocks: Sequence[int], num_tokens: int) -> None:
        """Make the whole blocks of the first `num_tokens` tokens known; extends `chain`. Takes no slot."""

    def wants_state(self, chain: Chain, boundary: int, known: int) -> bool:
        """Would a state after `boundary` tokens be kept, as far as can be told before it is published?"""

    def snapshot(self, chain: Chain, boundary: int, slot: int) -> bool:
        """Keep the state after `boundary` tokens. False: it is not kept and the index holds no reference to it."""

    def supersede(self, chain: Chain, boundary: int, known: int) -> bool:
        """Forget the last state before the one at `boundary`, where it lies behind the first `known` tokens and nobody
        has use for it: whoever continues an answer does so from its end."""

    def surrender(self, chain: Chain) -> None:
        """Forget the state at the chain's end, because its last reader is about to write there."""

    def withdraw(self, chain: Chain) -> None:
        """Forget the chain and all that continues it: what was computed there is not to be trusted."""

    def evict_block(self) -> None:
        """Free at least one block. At least one must be idle."""

    def evict_slot(self) -> None:
        """Free one slot. At least one must be idle."""

    def check(self) -> tuple[list[int], list[int]]:
        """The blocks and the slots held. Raises AssertionError where the index contradicts itself."""


IndexFactory = Callable[[IdPool, IdPool, int], Index]
"""(blocks, slots, block_size) -> Index."""


class NoPrefixIndex:
    """Keeps nothing: every request computes its whole prompt."""

    keeps = False
    num_states = 0

    def __init__(self, blocks: IdPool, slots: IdPool, block_size: int) -> None: ...

    def match(self, token_ids: Sequence[int], salt: bytes) -> Chain:
        return Chain(salt)

    def publish(self, chain: Chain, token_ids: Sequence[int], blocks: Sequence[int], num_tokens: int) -> None: ...

    def wants_state(self, chain: Chain, boundary: int, known: int) -> bool:
        return False

    def snapshot(self, chain: Chain, boundary: int, slot: int) -> bool:
        return False

    def supersede(self, chain: Chain, boundary: int, known: int) -> bool:
        return False

    def surrender(self, chain: Chain) -> None: ...

    def withdraw(self, chain: Chain) -> None: ...

    def evict_block(self) -> None:
        raise AssertionError("an index that keeps nothing is asked for a block")

    def evict_slot(self) -> None:
        raise AssertionError("an index that keeps nothing is asked for a slot")

    def check(self) -> tuple[list[int], list[int]]:
        return [], []


def every_boundary(boundary: int, known: int) -> bool:
    """Keep the state at every block boundary that a step ends at or crosses, and let go what is worth least."""
    return True


class PrefixIndex:
    """A forest of blocks under chained content hashes.

    Blocks go leaf first, those without a state before those that can be resumed, then the least recently used. States
    go by what they save, wherever they are (`snapshots.py`): a prefix without one stays a way to the states behind it.
    """

    keeps = True

    def __init__(
        self, blocks: IdPool, slots: IdPool, block_size: int, *, salt: bytes, policy: SnapshotPolicy = every_boundary
    ) -> None:
        """`salt`: 16 to 64 secret bytes; without them nobody can craft a prompt that collides with another's."""
        assert 16 <= len(salt) <= 64, f"a salt of {len(salt)} bytes, not 16 to 64"
        self.entries: dict[bytes, Entry] = {}
        self._first: dict[bytes, dict[bytes, Entry]] = {}
        """First blocks by the requests' salt and the tokens."""
        self._blocks, self._slots, self._block_size = blocks, slots, block_size
        self._salt, self._policy = salt, policy
        self.states = Snapshots()
        self._leaves: list[tuple[bool, int, bytes]] = []
        self._clock = 0

    @property
    def num_states(self) -> int:
        return len(self.states)

    def match(self, token_ids: Sequence[int], salt: bytes) -> Chain:
        chain, among = Chain(salt), self._first.get(salt, {})
        packed, size = array("q", token_ids).tobytes(), self._block_size * WORD
        for start in range(0, (len(token_ids) - 1) // self._block_size * size, size):
            entry = among.get(packed[start : start + size])
            if entry is None:
                break
            chain.entries.append(entry)
            among = entry.children
        chain.num_matched = len(chain.entries)
        while chain.entries and chain.slot == NO_SLOT:
            chain.entries.pop()
        for now, entry in enumerate(chain.entries, self._clock + 1):
            entry.used = now
        self._clock += len(chain.entries)
        if chain.entries:
            self._offer(chain.entries[-1])  # all others have children
            self.states.use(chain.entries[-1])
        return chain

    def publish(self, chain: Chain, token_ids: Sequence[int], blocks: Sequence[int], num_tokens: int) -> None:
        if chain.entries and not chain.entries[-1].alive:
            if any(entry.withdrawn for entry in chain.entries):
                return
            chain.entries.clear()
        for j in range(len(chain.entries), num_tokens // self._block_size):
            tokens = array("q", token_ids[j * self._block_size : (j + 1) * self._block_size]).tobytes()
            parent = chain.entries[-1] if chain.entries else None
            among = parent.children if parent is not None else self._first.setdefault(chain.salt, {})
            entry = among.get(tokens)
            if entry is None:
                key = self._key(parent.key if parent is not None else chain.salt, tokens)
                if key in self.entries:
                    return  # another prefix has this key: ours, and all behind it, stays unpublished
                entry = self.entries[key] = Entry(key, parent, chain.salt, tokens, blocks[j], j + 1)
                self._blocks.cache(entry.block)
                among[tokens] = entry
            chain.entries.append(entry)
            self._touch(entry)

    def wants_state(self, chain: Chain, boundary: int, known: int) -> bool:
        entry = self._at(chain, boundary)
        return (entry is None or entry.slot == NO_SLOT) and self._policy(boundary, known)

    def snapshot(self, chain: Chain, boundary: int, slot: int) -> bool:
        entry = self._at(chain, boundary)
        if entry is None or entry.slot != NO_SLOT:
            return False
        assert entry.alive, "a state is kept for a prefix that has left the index"
        self._slots.cache(slot)
        entry.slot = slot
        self.states.add(entry)
        self._offer(entry)
        return True

    def supersede(self, chain: Chain, boundary: int, known: int) -> bool:
        entry = self._at(chain, boundary)
        before = None if entry is None or entry.slot == NO_SLOT else self.states.before(entry)
        if before is None or before.depth * self._block_size <= known or not self._slots.is_idle(before.slot):
            return False
        self._forget_state(before)
        return True

    def surrender(self, chain: Chain) -> None:
        self._forget_state(chain.entries[-1])

    def withdraw(self, chain: Chain) -> None:
        doomed = {entry for entry in chain.entries if entry.alive}
        order = []
        for entry in self.entries.values():  # in the order of insertion: a parent comes before its children
            if entry in doomed or entry.parent in doomed:
                doomed.add(entry)
                order.append(entry)
        for entry in reversed(order):
            entry.withdrawn = True
            self._remove(entry)

    def evict_block(self) -> None:
        leased: list[Entry] = []  # leaves that requests hold too: letting one go frees nothing but bares its parent
        while (entry := self._pop_leaf()) is None or not self._blocks.is_idle(entry.block):
            if entry is not None:
                leased.append(entry)
                continue
            assert leased, "the index is asked for a block and has none that is idle"
            oldest = leased.pop(0)
            if oldest.alive:
                self._remove(oldest)
        self._remove(entry)
        for entry in leased:
            self._offer(entry)

    def evict_slot(self) -> None:
        entry = self.states.least(lambda entry: self._slots.is_idle(entry.slot))
        assert entry is not None, "the index is asked for a slot and has none that is idle"
        self._forget_state(entry)

    def check(self) -> tuple[list[int], list[int]]:
        children: dict[int, int] = {}
        for entry in self.entries.values():
            assert entry.alive, "a dead entry is still in the index"
            if entry.parent is not None:
                assert entry.parent.alive, "an entry has lost its parent"
                children[id(entry.parent)] = children.get(id(entry.parent), 0) + 1
        offered = set(self._leaves)
        for key, entry in self.entries.items():
            assert entry.key == key, "an entry stands under another key"
            assert len(entry.children) == children.get(id(entry), 0), "an entry has miscounted its children"
            assert (entry.slot != NO_SLOT) == (entry in self.states), (
                "an entry's state is not among those that are kept"
            )
            assert entry.children or self._item(entry) in offered, "a leaf cannot be evicted"
        self.states.check()
        assert len(self.states) == sum(entry.slot != NO_SLOT for entry in self.entries.values()), (
            "a state without entry"
        )
        return [entry.block for entry in self.entries.values()], [entry.slot for entry in self.states]

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _key(self, parent: bytes, tokens: bytes) -> bytes:
        return hashlib.blake2b(parent + tokens, digest_size=16, key=self._salt).digest()

    def _at(self, chain: Chain, boundary: int) -> Entry | None:
        j = boundary // self._block_size - 1
        return chain.entries[j] if j < len(chain.entries) else None

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.used = self._clock
        self._offer(entry)

    def _offer(self, entry: Entry) -> None:
        """Queue a leaf for eviction. Items that have become untrue stay in the heap until they surface."""
        if entry.children or not entry.alive:
            return
        if len(self._leaves) > 2 * len(self.entries) + 64:
            self._leaves = [self._item(e) for e in self.entries.values() if not e.children and e is not entry]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, self._item(entry))

    def _item(self, entry: Entry) -> tuple[bool, int, bytes]:
        return entry.slot != NO_SLOT, entry.used, entry.key

    def _pop_leaf(self) -> Entry | None:
        while self._leaves:
            item = heapq.heappop(self._leaves)
            entry = self.entries.get(item[2])
            if entry is not None and not entry.children and item == self._item(entry):
                return entry
        return None

    def _forget_state(self, entry: Entry) -> None:
        slot, entry.slot = entry.slot, NO_SLOT
        self.states.remove(entry)
        self._slots.uncache(slot)
        self._offer(entry)

    def _remove(self, entry: Entry) -> None:
        assert not entry.children, "an entry is removed from under its children"
        if entry.slot != NO_SLOT:
            self._forget_state(entry)
        del self.entries[entry.key]
        entry.alive = False
        self._blocks.uncache(entry.block)
        if entry.parent is not None:
            del entry.parent.children[entry.tokens]
            self._offer(entry.parent)
            return
        del self._first[entry.salt][entry.tokens]
        if not self._first[entry.salt]:
            del self._first[entry.salt]
