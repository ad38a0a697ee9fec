"""Tiles of short pieces whose contexts are cut into parts: the kernel for Hopper on a CPU (see gluon_machine.py), and
what puts its parts together in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import deltaserve.ops.attention
from deltaserve.ops.attention import triton_join
from deltaserve.runner.graphs import PROMPT_TOKENS
from tests.ops.attention_rows import Rows
from tests.ops.gluon_machine import load_kernels
from tests.ops.test_attention_hopper import rows_of, run

TARGET, HEADS = 24, (8, 1)
CONFIGS = [{"least": 1}, {"key_stages": 3, "slack": 8, "held": 32, "least": 2}]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    (folder,) = deltaserve.ops.attention.__path__
    parts = ["deltaserve.ops.attention.triton_walk"]
    return load_kernels(str(Path(folder) / "triton_hopper.py"), "hopper_kernel", parts=parts)


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that fill the card."""
    monkeypatch.setattr(triton_join, "target_of", lambda *_: TARGET)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that were put together."""
    found: list[int] = []
    inner = triton_join.join

    def join(gate: Tensor, out: Tensor, *args: object, **options: object) -> None:
        before = out.isnan().all(-1).any(-1)
        inner(gate, out, *args, **options)  # type: ignore[arg-type]
        found.append(int((before & ~out.isnan().any(-1).any(-1)).sum()))

    monkeypatch.setattr(triton_join, "join", join)
    return found


def check(kernels: ModuleType, rows: Rows, config: dict[str, int]) -> None:
    before = rows.pool.clone()
    expected, _ = rows.expected()
    torch.testing.assert_close(run(kernels, rows, config).double(), expected, rtol=4e-3, atol=4e-3)
    assert rows.untouched(before)


@pytest.mark.parametrize(("start", "tokens", "config"), [(700, 1, 1), (640, 16, 0), (500, 20, 1), (1000, 37, 0)])
def test_a_piece_behind_a_context(kernels: ModuleType, joined: list[int], start: int, tokens: int, config: int) -> None:
    check(kernels, rows_of([start], [tokens], HEADS), CONFIGS[config])
    assert joined == [tokens]


@pytest.mark.parametrize("heads", [(6, 2), (1, 1)])
def test_rows_of_all_lengths(kernels: ModuleType, joined: list[int], heads: tuple[int, int]) -> None:
    """Those with short contexts stay whole."""
    check(kernels, rows_of([700, 5, 300, 20], [3, 20, 16, 1], heads), CONFIGS[1])
    assert joined == [19]


def test_nothing_is_cut_that_saves_little(kernels: ModuleType, joined: list[int]) -> None:
    check(kernels, rows_of([600, 0], [3, 10], HEADS), {})
    assert joined == [0]


def test_padding_changes_nothing(kernels: ModuleType, joined: list[int]) -> None:
    torch.manual_seed(0)
    rows = rows_of([600, 0], [20, 29], HEADS, padding=(1,))
    out = run(kernels, rows, CONFIGS[0])
    (segment,) = rows.layout.segments
    layout = rows.layout
    alone = dataclasses.replace(
        layout,
        segments=(
            dataclasses.replace(segment, row_end=1, token_end=20, max_len=20, cu_seqlens=segment.cu_seqlens[:2]),
        ),
        block_table=layout.block_table[:1],
        context_len=layout.context_len[:1],
        position=layout.position[:20],
        kv_index=layout.kv_index[:20],
        write_slot=layout.write_slot[:20],
        memo={},
    )
    assert torch.equal(out[20:], torch.zeros_like(out[20:]))
    rows.layout, rows.q, rows.k, rows.v, rows.gate = alone, rows.q[:20], rows.k[:20], rows.v[:20], rows.gate[:20]
    assert torch.equal(run(kernels, rows, CONFIGS[0]), out[:20])
    expected, _ = rows.expected()
    torch.testing.assert_close(out[:20].double(), expected, rtol=4e-3, atol=4e-3)
    assert joined == [20, 20]


def test_rows_without_a_token(kernels: ModuleType, joined: list[int]) -> None:
    """A graph of several prompts has them before, between and behind the others."""
    rows = rows_of([600, 700], [17, 3], HEADS)
    expected, _ = rows.expected()
    plain = run(kernels, rows, CONFIGS[0])
    torch.testing.assert_close(plain.double(), expected, rtol=4e-3, atol=4e-3)
    layout, (segment,) = rows.layout, rows.layout.segments
    bounds = torch.tensor([0, 0, 17, 17, 20, 20], dtype=torch.int32)
    own = torch.tensor([0, 0, 0, 1, 1])
    is_there = torch.tensor([False, True, False, True, False])
    rows.layout = dataclasses.replace(
        layout,
        segments=(dataclasses.replace(segment, row_end=5, cu_seqlens=bounds),),
        block_table=torch.where(is_there[:, None], layout.block_table[own], -1),
        context_len=torch.where(is_there, layout.context_len[own], 0),
        memo={},
    )
    assert torch.equal(run(kernels, rows, CONFIGS[0]), plain)
    assert joined == [20, 20]


def test_first_keys_anywhere(kernels: ModuleType) -> None:
    """What lies before them is NaN; tokens that see no key give zeros, tiles that see few have empty parts."""
    starts, lengths, first = [640, 700, 500], [16, 5, 3], [600, 701, 500]
    rows = rows_of(starts, lengths, HEADS)
    rows.layout = dataclasses.replace(rows.layout, first_key=torch.tensor(first, dtype=torch.int32))
    for row, key in enumerate(first):
        for place in range(min(key, starts[row])):
            rows.pool[:, int(rows.layout.block_table[row, place // 64]), place % 64] = torch.nan
    expected, _ = rows.expected()
    rows.gate[16] = torch.nan
    out = run(kernels, rows, CONFIGS[0])
    own = [token for token in range(24) if token != 16]
    torch.testing.assert_close(out[own].double(), expected[own], rtol=4e-3, atol=4e-3)
    assert torch.equal(out[16], torch.zeros_like(out[16]))


def plan(lengths: Sequence[int], target: int) -> int:
    tiles = sum(-(-length // 16) for length in lengths)
    once, twice = target // tiles, 2 * target // tiles
    return twice if once < 4 and twice > 2 * once else once


@pytest.mark.parametrize("target", [2, 16, 66, 132])
def test_a_step_that_is_not_cut_has_no_parts(target: int) -> None:
    """Nor in the graph that holds it."""
    for tokens in range(1, 4000):
        if plan([tokens], target) > 1:
            size = next(size for size in PROMPT_TOKENS if size >= tokens)
            assert triton_join.is_cut(size // 16, target) or tokens < 64
