"""Rows placed behind a row in flight: what they read and write, and what the commit in between publishes."""

from __future__ import annotations

from functools import partial

import pytest

from deltaserve.cache.lease import Lease, Placement
from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import NoPrefixIndex, PrefixIndex
from deltaserve.core.plan import NO_SLOT

B = 4


def manager(num_blocks: int = 16, num_slots: int = 8, max_keep: int = 1, keeps: bool = True) -> CacheManager:
    index = partial(PrefixIndex, salt=b"sixteen bytes ..") if keeps else NoPrefixIndex
    return CacheManager(num_blocks, num_slots, max_keep, index, block_size=B)


def numbers(n: int) -> list[int]:
    return list(range(n))


def admitted(cache: CacheManager, n: int) -> Lease:
    lease = cache.admit(numbers(n))
    assert lease is not None
    return lease


def placed(cache: CacheManager, lease: Lease, n: int) -> Placement:
    placement = cache.place(lease, n, 1)
    assert placement is not None
    cache.check([lease])
    return placement


def test_a_row_goes_on_from_the_row_in_flight() -> None:
    cache = manager(keeps=False)
    lease = admitted(cache, 11)
    first, second, third = placed(cache, lease, 6), placed(cache, lease, 5), placed(cache, lease, 1)
    own = lease.own[0]
    assert [p.read_slot for p in (first, second, third)] == [NO_SLOT, own, own]
    assert [p.write_slots[-1] for p in (first, second, third)] == [own, own, own]
    assert [len(p.new_blocks) for p in (first, second, third)] == [2, 1, 0]
    for n, done in ((6, 6), (5, 11), (1, 12)):
        cache.commit(lease, n, numbers(13))
        cache.check([lease])
        assert (lease.num_done, lease.num_planned, lease.in_flight) == (done, 12, done < 12)


def test_a_state_that_will_be_published_is_not_written_in_place() -> None:
    cache = manager()
    lease = admitted(cache, 9)
    first = placed(cache, lease, 8)
    second = placed(cache, lease, 1)
    kept = first.write_slots[-1]
    assert second.read_slot == kept
    assert kept not in second.write_slots
    cache.commit(lease, 8, numbers(9))
    cache.check([lease])
    reader = admitted(cache, 10)
    assert (reader.num_done, reader.read) == (8, kept)
    assert kept not in lease.own
    cache.commit(lease, 1, numbers(10))
    cache.check([lease, reader])
    assert lease.read == lease.own[0] == second.write_slots[0]


@pytest.mark.parametrize("ends_at", [7, 9])
def test_off_a_boundary_a_row_writes_in_place(ends_at: int) -> None:
    cache = manager()
    lease = admitted(cache, 20)
    first, second = placed(cache, lease, ends_at), placed(cache, lease, 2)
    assert first.write_slots[-1] == second.read_slot == second.write_slots[-1]


def test_without_a_fresh_slot_the_state_is_lost_and_nothing_waits() -> None:
    cache = manager(num_slots=1)
    lease = admitted(cache, 9)
    first, second = placed(cache, lease, 8), placed(cache, lease, 1)
    assert first.write_slots[-1] == second.write_slots[0]
    dropped = cache.usage().snapshots_dropped
    assert dropped > 0
    cache.commit(lease, 8, numbers(9))
    cache.commit(lease, 1, numbers(10))
    usage = cache.usage()
    assert (usage.slots_cached, usage.snapshots_kept, usage.snapshots_dropped) == (0, 0, dropped)
    cache.release(lease)
    cache.check([])
    assert admitted(cache, 10).num_done == 0


def test_what_another_published_meanwhile_is_not_published_twice() -> None:
    cache = manager()
    one, two = admitted(cache, 9), admitted(cache, 9)
    for lease in (one, two):
        assert cache.place(lease, 8, 1) is not None
        assert cache.place(lease, 1, 1) is not None
    for lease in (one, two):
        cache.commit(lease, 8, numbers(9))
        cache.check([one, two])
    usage = cache.usage()
    assert (usage.snapshots_kept, usage.slots_cached) == (1, 1)


def test_a_request_that_ends_leaves_the_row_behind_nothing_to_write_but_free_memory() -> None:
    cache = manager()
    lease = admitted(cache, 9)
    placed(cache, lease, 8)
    behind = placed(cache, lease, 5)  # over the boundary at 12: with a spare, and a block of its own
    cache.commit(lease, 8, numbers(9))
    cache.release(lease)
    cache.check([])
    kept_blocks, kept_slots = cache._index.check()
    assert len(kept_blocks) == 2
    assert not set(behind.write_slots) & set(kept_slots)
    assert not set(behind.new_blocks) & set(kept_blocks)
    usage = cache.usage()
    assert (usage.blocks_used, usage.slots_used) == (0, 0)


@pytest.mark.parametrize("num_committed", [0, 1, 2])
def test_release_at_any_moment_gives_all_back(num_committed: int) -> None:
    cache = manager()
    lease = admitted(cache, 20)
    chunks = (8, 4, 8)
    for n in chunks[:2]:
        placed(cache, lease, n)
    for n in chunks[:num_committed]:
        cache.commit(lease, n, numbers(20))
    placed(cache, lease, chunks[2])
    cache.release(lease)
    cache.release(lease)
    cache.check([])
    usage = cache.usage()
    assert (usage.blocks_used, usage.slots_used) == (0, 0)
    assert usage.blocks_cached == sum(chunks[:num_committed]) // B, "only what was committed is published"


def test_a_hit_is_held_until_its_reader_is_committed() -> None:
    cache = manager(num_slots=4)
    lease = admitted(cache, 9)
    placed(cache, lease, 9)
    cache.commit(lease, 9, numbers(9))
    cache.release(lease)
    reader = admitted(cache, 12)
    snapshot = reader.shared
    first, second = placed(cache, reader, 2), placed(cache, reader, 2)
    assert (first.read_slot, second.read_slot) == (snapshot, reader.own[0])
    assert reader.shared == snapshot
    cache.commit(reader, 2, numbers(12))
    assert reader.shared == NO_SLOT
    cache.commit(reader, 2, numbers(12))
    cache.check([reader])


def test_a_row_whose_end_is_open_has_none_behind_it() -> None:
    cache = manager(max_keep=3)
    lease = admitted(cache, 9)
    placed(cache, lease, 9)
    with pytest.raises(AssertionError, match="may turn out shorter"):
        cache.place(lease, 3, 3)
    cache.commit(lease, 9, numbers(10))
    assert cache.place(lease, 3, 3) is not None
    with pytest.raises(AssertionError, match="may turn out shorter"):
        cache.place(lease, 1, 1)
    cache.commit(lease, 2, numbers(12))
    cache.check([lease])
    after = placed(cache, lease, 1)
    assert after.read_slot == lease.own[1]
    assert after.write_slots == (lease.own[0],)
    assert placed(cache, lease, 1).read_slot == after.write_slots[0]
