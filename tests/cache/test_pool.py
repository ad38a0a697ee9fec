"""Reference counts, and that the ledger notices when they are wrong."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from deltaserve.cache.pool import IdPool


def test_take_is_all_or_nothing() -> None:
    pool = IdPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(0) == []
    assert pool.take(1) == [3]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_an_id_is_free_when_its_last_owner_lets_go() -> None:
    freed: list[int] = []
    pool = IdPool(2, freed.append)
    pool.take(1)
    pool.share(0)
    pool.drop(0)
    assert freed == []
    pool.drop(0)
    assert freed == [0]


def test_misuse_is_told() -> None:
    pool = IdPool(2)
    pool.take(1)
    pool.drop(0)
    with pytest.raises(AssertionError, match="id 0 is freed twice"):
        pool.drop(0)
    with pytest.raises(AssertionError, match="id 1 is free and cannot be shared"):
        pool.share(1)
    pool.take(1)
    pool.cache(0)
    with pytest.raises(AssertionError, match="cached twice"):
        pool.cache(0)
    pool.drop(0)
    with pytest.raises(AssertionError, match="from under the index"):
        pool.drop(0)


def test_idle_ids_are_those_that_only_the_index_holds() -> None:
    pool = IdPool(3)
    pool.take(2)
    pool.cache(0)
    assert (pool.num_idle, pool.num_available, pool.num_used) == (0, 1, 2)
    pool.drop(0)
    assert (pool.num_idle, pool.num_available, pool.num_used) == (1, 2, 1)
    assert pool.is_idle(0)
    pool.share(0)
    assert (pool.num_idle, pool.is_idle(0)) == (0, False)
    pool.drop(0)
    pool.uncache(0)
    assert (pool.num_idle, pool.num_free) == (0, 2)


def test_the_ledger_notices() -> None:
    pool = IdPool(4)
    pool.take(3)
    pool.share(1)
    pool.cache(2)
    pool.check("block", owners=[0, 1, 1, 2], cached=[2])
    for owners, cached, complaint in (
        ([0, 1, 2], [2], "do not add up"),
        ([0, 1, 1, 1, 2], [2], "do not add up"),
        ([0, 1, 1, 2, 2], [], "marked as cached"),
        ([0, 1, 1], [2, 2], "twice"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            pool.check("block", owners, cached)
    pool.num_idle = 1
    with pytest.raises(AssertionError, match="1 idle blocks counted, 0 found"):
        pool.check("block", [0, 1, 1, 2], [2])
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free list"):
        pool.check("block", [0, 1, 1, 2], [2])


def test_random_owners_balance() -> None:
    pool = IdPool(8)
    owners: Counter[int] = Counter()
    cached: list[int] = []
    for _ in range(3000):
        held = sorted(owners.elements())
        match random.randrange(5):
            case 0:
                taken = pool.take(random.randrange(4))
                owners.update(taken or [])
            case 1 if held:
                i = random.choice(held)
                pool.share(i)
                owners[i] += 1
            case 2 if held:
                i = random.choice(held)
                pool.drop(i)
                owners[i] -= 1
            case 3 if set(held) - set(cached):
                i = random.choice(sorted(set(held) - set(cached)))
                pool.cache(i)
                cached.append(i)
            case 4 if cached:
                i = cached.pop(random.randrange(len(cached)))
                pool.uncache(i)
        pool.check("id", owners.elements(), cached)
        assert pool.num_used == len(set(owners.elements()))
