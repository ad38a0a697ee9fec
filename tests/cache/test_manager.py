"""The four verbs: what they give, what they leave unchanged, and that the ledger notices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from deltaserve.cache.lease import Lease
from deltaserve.cache.manager import BLOCK_SIZE, CacheManager
from deltaserve.cache.prefix import NoPrefixIndex, PrefixIndex, SnapshotPolicy, every_boundary
from deltaserve.core.plan import NO_SLOT, Row

B = 4


def manager(
    num_blocks: int = 16, num_slots: int = 8, max_keep: int = 1, policy: SnapshotPolicy | None = every_boundary
) -> CacheManager:
    index = NoPrefixIndex if policy is None else partial(PrefixIndex, salt=b"sixteen bytes ..", policy=policy)
    return CacheManager(num_blocks, num_slots, max_keep, index, block_size=B)


def admitted(cache: CacheManager, tokens: list[int], reuse: bool = True, salt: bytes = b"") -> Lease:
    lease = cache.admit(tokens, reuse=reuse, salt=salt)
    assert lease is not None
    return lease


def compute(cache: CacheManager, lease: Lease, tokens: list[int], n: int) -> tuple[int, ...]:
    """Place and commit `n` tokens of a prompt; gives the write slots."""
    placement = cache.place(lease, n, 1)
    assert placement is not None
    cache.commit(lease, n, tokens)
    cache.check([lease])
    return placement.write_slots


def serve(cache: CacheManager, tokens: list[int], chunks: Sequence[int] = (), salt: bytes = b"") -> int:
    """A whole request; gives the tokens it need not compute."""
    lease = admitted(cache, tokens, salt=salt)
    num_cached = lease.num_done
    for n in chunks or (len(tokens) - num_cached,):
        placement = cache.place(lease, n, 1)
        assert placement is not None
        cache.commit(lease, n, tokens)
    cache.release(lease)
    return num_cached


def numbers(n: int) -> list[int]:
    return list(range(n))


def test_a_block_is_what_the_ops_take_for_one() -> None:
    from deltaserve.ops.layout import BLOCK

    assert BLOCK_SIZE == BLOCK


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [((0, 1, 1), "num_blocks is 0"), ((1, 2, 3), "num_slots is 2; one request needs 3"), ((1, 1, 0), "max_keep is 0")],
)
def test_sizes_that_hold_no_request_are_refused(sizes: tuple[int, int, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CacheManager(*sizes)


def test_first_chunk_next_chunk_decode() -> None:
    cache = manager(policy=None)
    lease = admitted(cache, numbers(10))
    first = cache.place(lease, 6, 1)
    assert first is not None
    assert (len(first.new_blocks), first.read_slot) == (2, NO_SLOT)
    assert first.write_slots == (NO_SLOT,) * 5 + (lease.own[0],)
    cache.commit(lease, 6, numbers(10))
    second = cache.place(lease, 4, 1)
    assert second is not None
    assert (len(second.new_blocks), second.read_slot, second.write_slots[-1]) == (1, lease.own[0], lease.own[0])
    cache.commit(lease, 4, numbers(11))
    decode = cache.place(lease, 1, 1)
    assert decode is not None
    assert (decode.new_blocks, decode.read_slot, decode.write_slots) == ((), lease.own[0], (lease.own[0],))


def test_a_placement_fills_a_row() -> None:
    cache = manager(policy=None)
    placement = cache.place(admitted(cache, numbers(3)), 3, 1)
    assert placement is not None
    row = placement.fill(Row(seat=2, start=0, num_tokens=3, samples=True))
    assert (row.seat, row.samples, row.new_blocks) == (2, True, placement.new_blocks)
    assert (row.read_slot, row.write_slots) == (NO_SLOT, placement.write_slots)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_the_state_of_the_last_kept_token_is_read_next(kept: int) -> None:
    cache = manager(max_keep=4, policy=None)
    lease = admitted(cache, numbers(5))
    compute(cache, lease, numbers(6), 5)
    placement = cache.place(lease, 4, 4)
    assert placement is not None
    assert placement.write_slots == tuple(lease.own)
    cache.commit(lease, kept, numbers(5 + kept + 1))
    cache.check([lease])
    following = cache.place(lease, 1, 1)
    assert following is not None
    assert following.read_slot == placement.write_slots[kept - 1]
    assert lease.num_done == 5 + kept


def test_no_room_changes_nothing() -> None:
    cache = manager(num_blocks=3, num_slots=3, max_keep=2)
    lease = admitted(cache, numbers(9))
    assert cache.admit(numbers(4)) is None, "one slot is left of two"
    cache.check([lease])
    compute(cache, lease, numbers(12), 9)
    usage = cache.usage()
    assert cache.place(lease, 5, 2) is None, "14 tokens need a fourth block"
    assert cache.usage() == usage
    assert cache.place(lease, 3, 2) is not None, "a refusal leaves no row in flight"
    cache.release(lease)
    assert cache.admit(numbers(9), spare_blocks=1) is None
    assert cache.admit(numbers(13)) is None
    cache.check([])
    assert cache.admit(numbers(12)) is not None


def test_release_is_idempotent_at_any_phase() -> None:
    cache = manager(max_keep=2)
    serve(cache, numbers(9))
    lease = admitted(cache, numbers(12))
    assert lease.num_done == 8
    cache.release(lease)
    cache.release(lease)
    cache.check([])
    lease = admitted(cache, numbers(12))
    cache.place(lease, 4, 1)
    cache.release(lease)
    cache.release(lease)
    cache.check([])
    with pytest.raises(AssertionError, match="released lease is placed"):
        cache.place(lease, 1, 1)
    usage = cache.usage()
    assert (usage.blocks_used, usage.slots_used) == (0, 0)


def test_misuse_is_told() -> None:
    cache = manager(max_keep=2)
    lease = admitted(cache, numbers(8))
    with pytest.raises(AssertionError, match="keeps 3 of 8 tokens and may keep 2"):
        cache.place(lease, 8, 3)
    cache.place(lease, 8, 2)
    with pytest.raises(AssertionError, match="a row of 2 tokens that keeps 1 starts at an open end"):
        cache.place(lease, 2, 1)
    with pytest.raises(AssertionError, match="keeps 6 tokens of a row that may keep 7 to 8"):
        cache.commit(lease, 6, numbers(8))
    with pytest.raises(AssertionError, match="7 tokens are told, 8 are in the cache"):
        cache.commit(lease, 8, numbers(7))


def test_a_resumed_prefix_is_read_and_never_written() -> None:
    cache = manager()
    serve(cache, numbers(9))
    one, two = admitted(cache, numbers(12)), admitted(cache, numbers(12))
    assert (one.num_done, two.num_done, one.read) == (8, 8, two.read)
    assert one.blocks == two.blocks
    snapshot = one.read
    for lease in (one, two):
        placement = cache.place(lease, 4, 1)
        assert placement is not None
        assert placement.read_slot == snapshot
        assert snapshot not in placement.write_slots
        assert not set(placement.new_blocks) & set(lease.blocks[:2])
    cache.check([one, two])
    cache.commit(one, 4, numbers(13))
    cache.commit(two, 4, numbers(13))
    cache.check([one, two])
    assert snapshot not in (one.read, two.read)


def test_reuse_off_computes_everything_and_still_publishes() -> None:
    cache = manager()
    lease = admitted(cache, numbers(9), reuse=False)
    compute(cache, lease, numbers(9), 9)
    cache.release(lease)
    lease = admitted(cache, numbers(9), reuse=False)
    assert lease.num_done == 0
    cache.release(lease)
    assert admitted(cache, numbers(9)).num_done == 8


@pytest.mark.parametrize("num_tokens", range(1, 40))
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 40])
def test_every_prompt_is_reused_up_to_its_last_whole_block(num_tokens: int, chunk: int) -> None:
    cache = manager(num_slots=40)
    lease = admitted(cache, numbers(num_tokens))
    while lease.num_done < num_tokens:
        compute(cache, lease, numbers(num_tokens), min(chunk, num_tokens - lease.num_done))
    cache.release(lease)
    assert admitted(cache, numbers(num_tokens)).num_done == (num_tokens - 1) // B * B


def test_a_900_token_prompt_reuses_896_of_64() -> None:
    cache = CacheManager(40, 4, index=partial(PrefixIndex, salt=b"sixteen bytes .."))
    serve(cache, numbers(900))
    assert admitted(cache, numbers(900)).num_done == 896


def test_the_state_inside_a_chunk_is_kept_at_the_boundary() -> None:
    cache = manager()
    lease = admitted(cache, numbers(11))
    placement = cache.place(lease, 11, 1)
    assert placement is not None
    kept = [t + 1 for t, slot in enumerate(placement.write_slots) if slot != NO_SLOT]
    assert kept == [8, 11]
    cache.check([lease])
    cache.release(lease)
    cache.check([])
    assert cache.usage().slots_cached == 0, "a row that was never committed publishes nothing"


def test_nothing_inside_an_unverified_span_is_published() -> None:
    cache = manager(num_slots=12, max_keep=4)
    lease = admitted(cache, numbers(6))
    compute(cache, lease, numbers(7), 6)
    cache.place(lease, 4, 4)  # tokens 6 to 9, a boundary after 7
    cache.commit(lease, 1, numbers(8))
    cache.check([lease])
    assert cache.usage().slots_cached == 1, "only the prompt's, after 4"
    assert admitted(cache, numbers(10)).num_done == 4


def test_a_boundary_inside_the_kept_span_is_published_and_the_truth_goes_on() -> None:
    cache = manager(num_slots=12, max_keep=4)
    lease = admitted(cache, numbers(6))
    compute(cache, lease, numbers(7), 6)
    placement = cache.place(lease, 4, 4)
    assert placement is not None
    cache.commit(lease, 3, numbers(10))
    cache.check([lease])
    other = admitted(cache, numbers(10))
    assert (other.num_done, other.read) == (8, placement.write_slots[1])
    assert placement.write_slots[1] not in lease.own
    assert lease.read == placement.write_slots[2]


def test_a_wish_for_a_snapshot_is_asked_of_the_policy_alone() -> None:
    asked: list[tuple[int, int]] = []

    def policy(boundary: int, known: int) -> bool:
        asked.append((boundary, known))
        return boundary == 8

    cache = manager(policy=policy)
    assert serve(cache, numbers(14)) == 0
    assert asked == [(12, 14)]
    assert serve(cache, numbers(14), chunks=(9, 5)) == 0
    assert serve(cache, numbers(14)) == 8


def test_the_index_starves_nobody() -> None:
    """All memory is cached prefixes: they go as it is needed, and not before."""
    cache = manager(num_blocks=8, num_slots=6)
    for i in range(4):
        serve(cache, [100 + i] * 8)
    usage = cache.usage()
    assert (usage.blocks_used, usage.blocks_cached, usage.slots_used, usage.slots_cached) == (0, 8, 0, 5)
    lease = admitted(cache, numbers(32))
    compute(cache, lease, numbers(32), 32)
    assert cache.usage().blocks_used == 8
    cache.release(lease)
    leases = [admitted(cache, [7]) for _ in range(6)]
    cache.check(leases)
    assert cache.usage().slots_used == 6


def test_a_lone_snapshot_is_taken_over() -> None:
    cache = manager(num_slots=3)
    serve(cache, numbers(9))
    others = [admitted(cache, [50]), admitted(cache, [51])]
    assert cache.usage().slots_cached == 1
    lease = admitted(cache, numbers(12))
    assert (lease.num_done, lease.own, lease.shared) == (8, [lease.read], NO_SLOT)
    cache.check([lease, *others])
    cache.release(others.pop())
    assert admitted(cache, numbers(12)).num_done == 0, "what is written in place is no snapshot any more"


def test_a_snapshot_that_another_reads_is_not_taken_over() -> None:
    cache = manager(num_slots=3)
    serve(cache, numbers(9))
    reader, other = admitted(cache, numbers(12)), admitted(cache, [50])
    assert cache.admit(numbers(12)) is None
    cache.check([reader, other])
    assert reader.shared == reader.read != NO_SLOT


def test_an_error_withdraws_what_was_published() -> None:
    cache = manager()
    lease = admitted(cache, numbers(12))
    compute(cache, lease, numbers(12), 8)
    follower = admitted(cache, numbers(12))
    assert follower.num_done == 8
    cache.release(lease, withdraw=True)
    cache.check([follower])
    compute(cache, follower, numbers(12), 4)
    assert cache.usage().blocks_cached == 0, "who resumed from it publishes nothing either"
    assert admitted(cache, numbers(12)).num_done == 0


def test_a_salt_keeps_requests_apart() -> None:
    cache = manager()
    assert serve(cache, numbers(9), salt=b"tenant") == 0
    assert serve(cache, numbers(9)) == 0
    assert serve(cache, numbers(9), salt=b"tenant") == 8


def test_freed_ids_are_told() -> None:
    blocks: list[int] = []
    slots: list[int] = []
    cache = CacheManager(4, 3, 2, NoPrefixIndex, blocks.append, slots.append, block_size=B)
    lease = admitted(cache, numbers(8))
    cache.place(lease, 8, 1)
    assert (blocks, slots) == ([], [])
    cache.release(lease)
    assert (sorted(blocks), sorted(slots)) == ([0, 1], [0, 1])


def test_the_ledger_notices() -> None:
    cache = manager(max_keep=2)
    lease, other = admitted(cache, numbers(8)), admitted(cache, numbers(8))
    assert cache.place(lease, 8, 1) is not None
    assert cache.place(other, 8, 1) is not None
    cache.check([lease, other])
    with pytest.raises(AssertionError, match="do not add up"):
        cache.check([lease])
    lost = lease.blocks.pop()
    with pytest.raises(AssertionError, match=rf"blocks .* \[\({lost}, 1, 0\)\]"):
        cache.check([lease, other])
    lease.blocks.append(lost)
    mine, lease.own = lease.own, [lease.own[0], other.own[0]]
    with pytest.raises(AssertionError, match="two leases write one slot"):
        cache.check([lease, other])
    lease.own = mine
    lease.read = other.own[0]
    with pytest.raises(AssertionError, match="not its own"):
        cache.check([lease, other])
