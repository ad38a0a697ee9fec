"""Both ways to compute guessed tokens say the same, so that their times can be compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.bench.ops_replay import cases, keeping_all, replaying
from deltaserve.ops.gated_delta.api import gated_delta
from deltaserve.ops.layout import Layout

ROWS, HEADS, WIDTH = 3, 2, 5


def inputs(tokens: int) -> list[Tensor]:
    """Of each row [B, T, ...]: q, k, v, a, b."""
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(ROWS, tokens, HEADS, *shape, dtype=torch.float64, generator=draw)

    return [normal(WIDTH), normal(WIDTH), normal(WIDTH), normal(), normal()]


def run(parts: list[Tensor], pool: Tensor, layout: Layout) -> Tensor:
    q, k, v, a, b = (part.flatten(0, 1) for part in parts)
    heads = torch.zeros(HEADS, dtype=torch.float64)
    return gated_delta(q, k, v, a, b, heads, heads, pool, layout).view(ROWS, -1, HEADS, WIDTH)


@pytest.mark.parametrize(("again", "length"), [(1, 2), (2, 2), (1, 4), (3, 4), (4, 4)])
def test_a_replayed_step_says_what_a_kept_state_says(again: int, length: int) -> None:
    first, second = inputs(length), inputs(length + 1)
    second = [part[:, :length] for part in second]
    start = torch.randn(ROWS, HEADS, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    kept = torch.full((ROWS * length, HEADS, WIDTH, WIDTH), float("nan"), dtype=torch.float64)
    kept[::length] = start
    run(first, kept, keeping_all(ROWS, length, "cpu"))
    kept[::length] = kept[again - 1 :: length].clone()  # what a commit does by integers
    state = kept[::length].clone()
    right = run(second, kept, keeping_all(ROWS, length, "cpu"))

    pool = start.clone()
    both = [torch.cat([a[:, :again], b], 1) for a, b in zip(first, second, strict=True)]
    told = run(both, pool, replaying(ROWS, again, length, "cpu"))[:, again:]
    torch.testing.assert_close(told, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(pool, state, rtol=0, atol=1e-12)


def test_replaying_moves_fewer_bytes() -> None:
    found = {case.name: case.num_bytes for case in cases()}
    for length in (2, 4):
        names = [f"gdn guesses B=128 L={length} {way}" for way in ("replays 1", f"replays {length}", "keeps all")]
        least, more, most = (found.pop(name) for name in names)
        assert least < more < most
    assert not found
