"""The kernel of chunks for Hopper on a CPU (see gluon_machine.py) against the reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import deltaserve.ops.attention
from deltaserve.ops.attention import reference
from deltaserve.ops.attention.triton_chunk import HopperConfig
from deltaserve.ops.norm.reference import gemma_rms_norm
from deltaserve.ops.rope.reference import apply_rope
from tests.ops.attention_rows import EPS, Rows
from tests.ops.gluon_machine import load_kernels

WIDTH = 64
CONFIGS = [{"least": 0}, {"key_stages": 3, "slack": 8, "held": 32, "least": 0}]
"""None of which cuts contexts: see interpreted/test_attention_cut.py."""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    (folder,) = deltaserve.ops.attention.__path__
    parts = ["deltaserve.ops.attention.triton_walk"]
    return load_kernels(str(Path(folder) / "triton_hopper.py"), "hopper_kernel", parts=parts)


def rows_of(
    starts: Sequence[int],
    lengths: Sequence[int],
    heads: tuple[int, int] = (16, 2),
    first_key: int = 0,
    padding: Sequence[int] = (),
) -> Rows:
    return Rows(starts, lengths, 0, heads, WIDTH, torch.float16, padding, first_key)


def run(kernels: ModuleType, rows: Rows, config: dict[str, int], gate: bool = True) -> Tensor:
    q = gemma_rms_norm(rows.q, rows.q_weight, EPS)
    k = gemma_rms_norm(rows.k, rows.k_weight, EPS)
    q, k = apply_rope(q, k, rows.layout.position, rows.cos_sin)
    reference.store(k, rows.v, rows.pool, rows.layout)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    (segment,) = rows.layout.segments
    kernels.chunk(
        q.contiguous(), rows.gate if gate else None, out, rows.pool, rows.layout, segment, rows.scale,
        HopperConfig(**config),
    )  # fmt: skip
    return out.flatten(1)


def check(kernels: ModuleType, rows: Rows, config: dict[str, int]) -> None:
    before = rows.pool.clone()
    expected, _ = rows.expected()
    torch.testing.assert_close(run(kernels, rows, config).double(), expected, rtol=4e-3, atol=4e-3)
    assert rows.untouched(before)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 200])
def test_a_prompt_of_every_length(kernels: ModuleType, tokens: int, config: dict[str, int]) -> None:
    check(kernels, rows_of([0], [tokens]), config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("heads", [(16, 2), (6, 2), (1, 1)])
def test_chunks_behind_contexts(kernels: ModuleType, heads: tuple[int, int], config: dict[str, int]) -> None:
    check(kernels, rows_of([0, 5, 64, 130, 500], [1, 63, 64, 65, 20], heads), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_first_keys_anywhere(kernels: ModuleType, config: dict[str, int]) -> None:
    """What lies before them is NaN; a row that sees no key gives zeros."""
    rows = rows_of([0, 70, 64, 200, 130, 300], [1, 2, 70, 2, 40, 20])
    first = [1, 70, 3, 199, 65, 150]
    rows.layout = dataclasses.replace(rows.layout, first_key=torch.tensor(first, dtype=torch.int32))
    for row, key in enumerate(first[1:], 1):
        for place in range(key):
            rows.pool[:, int(rows.layout.block_table[row, place // 64]), place % 64] = torch.nan
    expected, _ = rows.expected()
    out = run(kernels, rows, config)
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=4e-3, atol=4e-3)
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("tokens", [64, 65, 300])
def test_long_rows_of_padding(kernels: ModuleType, tokens: int) -> None:
    """As a graph of one prompt has them before it is used: no key is there for many queries."""
    rows = rows_of([0, 0, 40], [tokens, tokens + 1, 20], padding=(0, 1))
    expected, _ = rows.expected()
    out, own = run(kernels, rows, CONFIGS[0]), slice(2 * tokens + 1, None)
    torch.testing.assert_close(out[own].double(), expected[own], rtol=4e-3, atol=4e-3)
    assert torch.equal(out[: 2 * tokens + 1], torch.zeros_like(out[: 2 * tokens + 1]))


def test_padding_rows_and_no_gate(kernels: ModuleType) -> None:
    rows = rows_of([0, 40, 0, 80], [3, 20, 1, 30], padding=(0, 2))
    rows.gate[:3] = torch.nan
    expected, _ = rows.expected()
    out, plain = run(kernels, rows, CONFIGS[0]), run(kernels, rows, CONFIGS[0], gate=False)
    for own in (slice(3, 23), slice(24, 54)):
        torch.testing.assert_close(out[own].double(), expected[own], rtol=4e-3, atol=4e-3)
        again = plain[own].double() * rows.gate[own].double().sigmoid()
        torch.testing.assert_close(again, expected[own], rtol=4e-3, atol=4e-3)
    for own in (slice(0, 3), slice(23, 24)):
        assert torch.equal(out[own], torch.zeros_like(out[own]))
