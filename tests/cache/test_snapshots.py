"""Which state goes first, and which one an answer keeps."""

from __future__ import annotations

import random

from deltaserve.core.plan import NO_SLOT
from tests.cache.test_overlap import manager
from tests.cache.test_prefix import B, Store, numbers


def kept(store: Store) -> set[int]:
    """Depths in tokens."""
    store.index.check()
    return {entry.depth * B for entry in store.index.states}


def test_what_saves_least_goes_first() -> None:
    store = Store()
    store.publish(numbers(40), states_at=(20, 24, 36))
    store.index.evict_slot()
    assert kept(store) == {20, 36}, "they saved 20, 4 and 12 tokens"
    store.index.evict_slot()
    assert kept(store) == {20}, "without the one at 24 that at 36 saves 16"


def test_a_state_in_between_takes_its_part() -> None:
    store = Store()
    store.publish(numbers(40), states_at=(40,))
    store.publish(numbers(40), states_at=(36,))
    store.index.evict_slot()
    assert kept(store) == {36}


def test_what_nobody_uses_falls_behind() -> None:
    """A long prefix that was used once outlives some short ones, and not all that come."""
    store = Store(num_blocks=400, num_slots=40)
    store.publish(numbers(10 * B, 1000), states_at=(10 * B,))
    outlived = 0
    while 10 * B in kept(store):
        store.publish(numbers(B, 10 * outlived), states_at=(B,))
        store.index.evict_slot()
        outlived += 1
        assert outlived < 20, "it never goes"
    assert outlived > 5


def test_use_counts_more_than_age() -> None:
    store = Store(num_slots=40)
    for number in range(2):
        store.publish(numbers(B, 10 * number), states_at=(B,))
    for number in range(2, 12):
        assert store.hit(numbers(B + 1)) == B
        store.publish(numbers(B, 10 * number), states_at=(B,))
        store.index.evict_slot()
    assert store.hit(numbers(B + 1)) == B


def test_what_is_read_is_passed_over_and_goes_later() -> None:
    store = Store()
    chain = store.publish(numbers(12), states_at=(4, 12))
    store.slots.share(chain.entries[0].slot)
    store.index.evict_slot()
    assert kept(store) == {4}
    store.slots.drop(chain.entries[0].slot)
    store.index.evict_slot()
    assert kept(store) == set()


def test_the_books_of_who_leans_on_whom() -> None:
    """Random prefixes, hits and evictions; `check` finds every mistake in the tree of states."""
    rnd = random.Random(5)
    for _ in range(60):
        store = Store(num_blocks=300, num_slots=12)
        for _ in range(30):
            tokens = [rnd.randrange(2) for _ in range(B * rnd.randrange(1, 8))]
            boundaries = [b for b in range(B, len(tokens) + 1, B) if rnd.random() < 0.4]
            rnd.shuffle(boundaries)
            while store.slots.num_free < len(boundaries):
                store.index.evict_slot()
            store.publish(tokens, states_at=tuple(boundaries))
            store.index.check()
            store.hit([rnd.randrange(2) for _ in range(30)])
            if rnd.random() < 0.2 and store.blocks.num_idle:
                store.index.evict_block()
            store.index.check()
        assert len(store.index.states._heap) <= 2 * len(store.index.states) + 66


def answer(num_prompt: int, num_tokens: int, num_slots: int = 30) -> tuple[list[int], int]:
    """The depths kept of a prompt and its answer, and how many the books say were kept."""
    cache = manager(num_blocks=40, num_slots=num_slots)
    lease = cache.admit(numbers(num_prompt))
    assert lease is not None
    done = 0
    for n in (num_prompt, *(1 for _ in range(num_tokens - 1))):
        done += n
        assert cache.place(lease, n, 1) is not None
        cache.commit(lease, n, numbers(done))
        cache.check([lease])
    cache.release(lease)
    cache.check([])
    _, slots = cache._index.check()
    usage = cache.usage()
    assert usage.snapshots_kept - usage.snapshots_evicted == len(slots) == usage.slots_cached
    states = getattr(cache._index, "states")  # noqa: B009
    return sorted(entry.depth * B for entry in states), usage.snapshots_kept


def test_an_answer_keeps_its_last_whole_block_and_the_prompt_its_own() -> None:
    assert answer(9, 30) == ([8, 36], 2)
    assert answer(8, 30) == ([4, 8, 36], 3)
    assert answer(3, 30) == ([32], 1)
    assert answer(9, 2) == ([8], 1)


def test_a_state_that_somebody_went_on_from_stays() -> None:
    cache = manager(num_blocks=40, num_slots=20)
    lease = cache.admit(numbers(5))
    assert lease is not None
    done = 0
    for n in (5, *(1 for _ in range(30))):
        done += n
        assert cache.place(lease, n, 1) is not None
        cache.commit(lease, n, numbers(done))
        if done == 18:
            reader = cache.admit(numbers(17))
            assert reader is not None
            assert (reader.num_done, reader.read != NO_SLOT) == (16, True)
            cache.release(reader)
    cache.release(lease)
    assert [cache.admit(numbers(n)).num_done for n in (35, 33, 17)] == [32, 32, 16]  # type: ignore[union-attr]
