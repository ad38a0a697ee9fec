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


def placed(cache: CacheManager, lease: Lease, n: int, keep: int = 1) -> Placement:
    placement = cache.place(lease, n, keep)
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


def test_a_row_behind_an_open_end_reads_what_that_turns_out_to_keep() -> None:
    cache = manager(max_keep=3, num_slots=12, keeps=False)
    lease = admitted(cache, 9)
    placed(cache, lease, 9)
    cache.commit(lease, 9, numbers(10))
    start = lease.read
    first, second = placed(cache, lease, 3, 3), placed(cache, lease, 3, 3)
    assert (first.read_slot, first.later_slots) == (start, ())
    assert (second.read_slot, *second.later_slots) == first.write_slots == second.write_slots
    assert (lease.num_planned, lease.most_planned) == (11, 15)
    assert len(lease.blocks) * B >= 15
    with pytest.raises(AssertionError, match="behind one whose start is open"):
        cache.place(lease, 1, 1)
    cache.commit(lease, 2, numbers(12))
    cache.check([lease])
    assert (lease.num_done, lease.num_planned, lease.most_planned) == (11, 12, 14)
    third = placed(cache, lease, 1, 1)
    assert (third.read_slot, *third.later_slots) == second.write_slots
    assert third.write_slots == (lease.own[0],)
    cache.commit(lease, 3, numbers(15))
    cache.commit(lease, 1, numbers(16))
    cache.check([lease])
    assert (lease.num_done, lease.num_planned, lease.most_planned) == (15, 15, 15)
    assert (lease.read, lease.later) == (lease.own[0], ())


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_states_inside_an_open_end_are_kept_if_it_reaches_them(kept: int) -> None:
    """Of five tokens behind seven the first and the fifth end a block."""
    cache = manager(max_keep=5, num_slots=14)
    lease = admitted(cache, 7)
    placed(cache, lease, 7)
    cache.commit(lease, 7, numbers(8))
    before = cache.usage()
    first, second = placed(cache, lease, 5, 5), placed(cache, lease, 2, 2)
    assert (second.read_slot, *second.later_slots) == first.write_slots
    assert not {first.write_slots[0], first.write_slots[4]} & set(second.write_slots)
    cache.commit(lease, kept, numbers(7 + kept))
    cache.check([lease])
    state = first.write_slots[4 if kept == 5 else 0]
    reader = admitted(cache, 8 + 4 * (kept == 5) + 1)
    assert (reader.num_done, reader.read) == (8 + 4 * (kept == 5), state)
    assert state not in lease.own
    cache.release(reader)
    cache.commit(lease, 1, numbers(8 + kept))
    cache.check([lease])
    cache.release(lease)
    cache.check([])
    assert cache.usage().slots_used == before.slots_used - 5


@pytest.mark.parametrize("num_committed", [0, 1, 2])
def test_open_ends_are_given_back_at_any_moment(num_committed: int) -> None:
    cache = manager(max_keep=3, num_slots=12)
    lease = admitted(cache, 6)
    placed(cache, lease, 6)
    cache.commit(lease, 6, numbers(7))
    placed(cache, lease, 3, 3)
    placed(cache, lease, 3, 3)
    for number in range(num_committed):
        cache.commit(lease, 2, numbers(9 + 2 * number))
    cache.release(lease)
    cache.check([])
    usage = cache.usage()
    assert (usage.blocks_used, usage.slots_used) == (0, 0)
