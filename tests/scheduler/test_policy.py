"""The shares of a step, as arithmetic."""

from __future__ import annotations

import random

import pytest

from deltaserve.scheduler.policy import cut_chunk, share_drafts, share_prompts


@pytest.mark.parametrize(
    ("budget", "remaining", "shares"),
    [
        (100, [], []),
        (0, [5, 5], [0, 0]),
        (100, [40], [40]),
        (100, [1000], [100]),
        (100, [1000, 10], [90, 10]),
        (100, [1000, 1000], [50, 50]),
        (100, [1000, 1000, 10], [50, 40, 10]),
        (100, [10, 1000, 20], [10, 70, 20]),
        (1, [7, 1], [1, 0]),
        (101, [1000, 1000], [51, 50]),
    ],
)
def test_share_prompts(budget: int, remaining: list[int], shares: list[int]) -> None:
    assert share_prompts(budget, remaining) == shares


def test_shares_use_the_step_and_favour_the_oldest() -> None:
    for _ in range(2000):
        budget = random.randrange(1, 300)
        remaining = [random.randrange(1, 400) for _ in range(random.randrange(1, 8))]
        shares = share_prompts(budget, remaining)
        assert sum(shares) == min(budget, sum(remaining)), (budget, remaining)
        assert all(0 <= s <= r for s, r in zip(shares, remaining, strict=True)), (budget, remaining)
        assert shares[0] >= min(remaining[0], (budget + 1) // 2), (budget, remaining)
        shortest = min(range(len(remaining)), key=lambda i: (remaining[i], i))
        assert shares[shortest] >= min(remaining[shortest], budget // 2), (budget, remaining)


def test_share_drafts_leaves_prompts_half() -> None:
    assert share_drafts(10, [4, 4], 0) == 4
    assert share_drafts(10, [4, 4], 2) == 3
    assert share_drafts(10, [4, 4], 1000) == 1
    assert share_drafts(2, [4, 4], 0) == 0
    assert share_drafts(3, [4, 4], 1000) == 0
    assert share_drafts(10, [], 5) == 0


def test_all_verify_as_many_drafts_as_the_one_with_the_most() -> None:
    assert share_drafts(100, [0, 3, 1], 0) == 3


def num_steps(remaining: int, share: int) -> int:
    return -(-remaining // share)


def test_cut_chunk_ends_on_a_boundary_when_that_is_free() -> None:
    assert cut_chunk(0, 100, 70, 64) == 64  # 64 + 36 instead of 70 + 30
    assert cut_chunk(0, 140, 70, 64) == 70  # 64 + 70 + 6 would be one step more
    assert cut_chunk(0, 100, 100, 64) == 100  # nothing left to compute: the end is the end
    assert cut_chunk(10, 100, 50, 64) == 50  # no boundary within
    assert cut_chunk(10, 100, 60, 64) == 54
    for _ in range(5000):
        start, block_size = random.randrange(0, 300), random.choice([1, 2, 8, 64])
        remaining = random.randrange(1, 600)
        share = random.randrange(0, remaining + 1)
        n = cut_chunk(start, remaining, share, block_size)
        case = (start, remaining, share, block_size)
        assert 0 <= n <= share, case
        assert (n == 0) == (share == 0), case
        if n < share:
            assert (start + n) % block_size == 0, case
            assert 1 + num_steps(remaining - n, share) == num_steps(remaining, share), case
