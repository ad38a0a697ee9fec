"""The prefix index alone: what is a hit, what is not, what goes first."""

from __future__ import annotations

import random

import pytest

from deltaserve.cache.pool import IdPool
from deltaserve.cache.prefix import Chain, NoPrefixIndex, PrefixIndex
from deltaserve.core.plan import NO_SLOT

SALT = b"sixteen bytes .."
B = 4


class Store:
    """An index whose pools have no other user than the test."""

    def __init__(self, num_blocks: int = 64, num_slots: int = 16, salt: bytes = SALT) -> None:
        self.blocks, self.slots = IdPool(num_blocks), IdPool(num_slots)
        self.index = PrefixIndex(self.blocks, self.slots, B, salt=salt)

    def publish(
        self, tokens: list[int], states_at: tuple[int, ...] = (), salt: bytes = b"", keep: bool = False
    ) -> Chain:
        """Publish as a request does that has computed all `tokens` into fresh blocks; with `keep` it runs on."""
        blocks = self.blocks.take(-(-len(tokens) // B))
        assert blocks is not None
        chain = Chain(salt)
        self.index.publish(chain, tokens, blocks, len(tokens))
        for boundary in states_at:
            slots = self.slots.take(1)
            assert slots is not None
            self.index.snapshot(chain, boundary, slots[0])
            self.slots.drop(slots[0])
        for block in [] if keep else blocks:
            self.blocks.drop(block)
        return chain

    def hit(self, tokens: list[int], salt: bytes = b"") -> int:
        """Tokens that a request need not compute."""
        chain = self.index.match(tokens, salt)
        assert (chain.slot == NO_SLOT) == (not chain.entries)
        return len(chain.blocks) * B


def numbers(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def test_a_hit_needs_blocks_and_a_state_at_the_same_boundary() -> None:
    store = Store()
    store.publish(numbers(20), states_at=(8,))
    assert store.hit(numbers(21)) == 8
    assert store.hit(numbers(9)) == 8
    assert store.hit(numbers(8)) == 0, "one token must be left to compute"
    store.publish(numbers(20), states_at=(16,))
    assert store.hit(numbers(17)) == 16
    assert store.hit(numbers(16)) == 8
    store.index.check()


def test_no_state_no_hit() -> None:
    store = Store()
    store.publish(numbers(20))
    assert store.hit(numbers(20)) == 0


def test_an_empty_insert_changes_nothing() -> None:
    store = Store()
    chain = Chain()
    store.index.publish(chain, [], [], 0)
    store.index.publish(chain, numbers(3), [0], 3)
    assert not store.index.snapshot(chain, 4, 0)
    assert (store.index.entries, chain.entries) == ({}, [])
    assert store.hit(numbers(9)) == 0


def test_prefixes_branch_where_tokens_differ() -> None:
    store = Store()
    left, right = numbers(8) + [90] * 8, numbers(8) + [91] * 8
    store.publish(left, states_at=(8, 16))
    store.publish(right, states_at=(12,))
    assert store.hit([*left, 1]) == 16
    assert store.hit([*right, 1]) == 12
    assert store.hit(numbers(8) + [92] * 8) == 8
    assert store.hit([7, *numbers(15, 1)]) == 0
    assert len(store.index.entries) == 6


def test_salts_keep_apart() -> None:
    store = Store()
    store.publish(numbers(8), states_at=(8,), salt=b"alice")
    assert store.hit(numbers(9)) == 0
    assert store.hit(numbers(9), salt=b"bob") == 0
    assert store.hit(numbers(9), salt=b"alice") == 8
    key = next(iter(store.index.entries))
    assert store.hit(numbers(9, 4), salt=key) == 0, "a salt that equals a key continues its prefix"
    other = Store(salt=b"another server's")
    other.publish(numbers(8), states_at=(8,), salt=b"alice")
    assert not set(store.index.entries) & set(other.index.entries), "keys do not depend on the server's salt"
    with pytest.raises(AssertionError, match="salt of 0 bytes"):
        Store(salt=b"")


class Colliding(PrefixIndex):
    """Keys of two bits."""

    def _key(self, parent: bytes, tokens: bytes) -> bytes:
        return bytes([super()._key(parent, tokens)[0] & 3])


def test_colliding_keys_never_hit() -> None:
    """Whatever collides, a hit's blocks hold the tokens asked for."""
    rnd = random.Random(7)
    hits = 0
    for _ in range(300):
        store = Store()
        store.index = Colliding(store.blocks, store.slots, B, salt=SALT)
        content: dict[int, tuple[bytes, list[int]]] = {}
        for _ in range(6):
            tokens = [rnd.randrange(2) for _ in range(B * rnd.randrange(1, 5))]
            before = {entry.block for entry in store.index.entries.values()}
            salt = rnd.choice([b"", b"tenant"])
            chain = store.publish(tokens, states_at=tuple(range(B, len(tokens) + 1, B)), salt=salt)
            for j, entry in enumerate(chain.entries):
                if entry.block not in before:
                    content[entry.block] = salt, tokens[: (j + 1) * B]
            store.index.check()
            asked = [rnd.randrange(2) for _ in range(2 * B + 1)]
            for j, block in enumerate(store.index.match(asked, b"").blocks):
                assert content[block] == (b"", asked[: (j + 1) * B])
                hits += 1
    assert hits > 50, "the test has seen no hits"


def test_lookup_agrees_with_a_plain_search() -> None:
    """Random blocks and states: the hit is the longest prefix with both, and asking twice gives the same answer."""
    rnd = random.Random(3)
    for _ in range(200):
        store = Store(num_blocks=200, num_slots=60)
        known: set[tuple[int, ...]] = set()
        states: set[tuple[int, ...]] = set()
        for _ in range(8):
            tokens = [rnd.randrange(2) for _ in range(B * rnd.randrange(0, 6) + rnd.randrange(B))]
            boundaries = [b for b in range(B, len(tokens) + 1, B) if rnd.random() < 0.3]
            store.publish(tokens, states_at=tuple(boundaries))
            known |= {tuple(tokens[:b]) for b in range(B, len(tokens) + 1, B)}
            states |= {tuple(tokens[:b]) for b in boundaries}
        assert states <= known
        for _ in range(20):
            asked = [rnd.randrange(2) for _ in range(rnd.randrange(1, 24))]
            want = max((b for b in range(0, len(asked), B) if tuple(asked[:b]) in states), default=0)
            assert store.hit(asked) == want
            assert store.hit(asked) == want


def test_blocks_go_leaf_first_those_without_state_first_then_the_oldest() -> None:
    store = Store(num_blocks=8)
    store.publish(numbers(12), states_at=(12,))  # blocks 0 1 2
    store.publish(numbers(8, 50), states_at=(4,))  # blocks 3 4: the leaf cannot be resumed
    store.publish(numbers(4, 90), states_at=(4,))  # block 5
    assert store.blocks.num_free == 2
    store.index.evict_block()
    assert store.hit(numbers(8, 50)) == 4
    assert len(store.index.entries) == 5
    assert store.hit(numbers(13)) == 12
    store.index.evict_block()
    assert store.hit(numbers(5, 90)) == 0, "the least recently used goes"
    store.index.evict_block()
    assert store.hit(numbers(5, 50)) == 0
    store.index.evict_block()
    assert (store.hit(numbers(13)), len(store.index.entries)) == (0, 2), "the chain goes from its end"
    store.index.check()
    for _ in range(2):
        store.index.evict_block()
    assert (store.blocks.num_free, store.slots.num_free) == (8, 16)
    with pytest.raises(AssertionError, match="none that is idle"):
        store.index.evict_block()


def test_states_go_by_last_use() -> None:
    store = Store()
    store.publish(numbers(12), states_at=(4, 8, 12))
    assert store.hit(numbers(5)) == 4
    store.index.evict_slot()
    assert store.hit(numbers(12)) == 4
    assert store.hit(numbers(13)) == 12
    store.index.evict_slot()
    assert store.hit(numbers(12)) == 0
    assert store.hit(numbers(13)) == 12
    store.index.check()


def test_a_leased_leaf_does_not_shield_its_idle_parent() -> None:
    """Two requests computed one prefix: the index has the first one's block, the second one's continues it."""
    store = Store(num_blocks=4)
    store.publish(numbers(4))
    chain = store.publish(numbers(8), keep=True)
    assert chain.blocks == [0, 2]
    assert (store.blocks.num_free, store.blocks.num_idle) == (1, 1)
    store.index.evict_block()
    assert (store.blocks.num_free, store.blocks.num_idle) == (2, 0)
    assert store.index.entries == {}
    store.index.publish(chain, numbers(8), [1, 2], 8)
    assert chain.blocks == [1, 2], "a request whose chain was evicted publishes its own blocks anew"
    store.index.check()


def test_what_a_request_reads_is_not_evicted() -> None:
    store = Store()
    chain = store.publish(numbers(8), states_at=(4, 8))
    store.slots.share(chain.entries[0].slot)
    for _ in range(2):
        if store.slots.num_idle:
            store.index.evict_slot()
    assert (chain.entries[0].slot != NO_SLOT, chain.entries[1].slot) == (True, NO_SLOT)


def test_withdraw_forgets_the_chain_and_all_that_continues_it() -> None:
    store = Store()
    short = store.publish(numbers(8), states_at=(8,))
    long = store.publish(numbers(20), states_at=(12, 20), keep=True)
    store.publish(numbers(8, 60), states_at=(8,))
    store.index.withdraw(short)
    assert (store.hit(numbers(21)), store.hit(numbers(9, 60))) == (0, 8)
    store.index.publish(long, numbers(24), [*long.blocks, 40], 24)
    assert len(store.index.entries) == 2, "a withdrawn chain is not published again"
    store.index.withdraw(short)
    blocks, slots = store.index.check()
    assert (len(blocks), len(slots)) == (2, 1)


def test_the_heap_of_leaves_stays_small() -> None:
    store = Store()
    store.publish(numbers(8), states_at=(8,))
    for _ in range(1000):
        store.hit(numbers(9))
    assert len(store.index._leaves) <= 2 * len(store.index.entries) + 66
    store.index.evict_block()
    store.index.evict_block()
    assert store.blocks.num_free == 64


def test_the_null_index_keeps_nothing() -> None:
    blocks, slots = IdPool(4), IdPool(4)
    index = NoPrefixIndex(blocks, slots, B)
    chain = Chain()
    blocks.take(2)
    index.publish(chain, numbers(8), [0, 1], 8)
    assert not index.wants_state(chain, 8, 8)
    assert not index.snapshot(chain, 8, 0)
    assert index.match(numbers(9), b"").blocks == []
    assert index.check() == ([], [])
    for evict in (index.evict_block, index.evict_slot):
        with pytest.raises(AssertionError, match="keeps nothing"):
            evict()
