"""The kernel of chunks for Hopper on such a GPU: against float64, and what it must neither read nor write."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from deltaserve.ops.attention.triton_chunk import ChunkConfig, HopperConfig, chunk
from deltaserve.ops.gpu import properties
from tests.ops.attention_rows import Rows

pytestmark = pytest.mark.gpu
LARGE = ((16, 2), 256)
PLAIN = ChunkConfig(128, 64, 8, 2)
CONFIGS = [HopperConfig(), HopperConfig(slack=8, held=64), HopperConfig(key_stages=3, slack=8, held=128)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not properties(torch.device("cuda", 0)).is_hopper:
        pytest.skip("the kernel is for GPUs of compute capability 9.0, which this one is not")


def rows_of(
    starts: list[int],
    lengths: list[int],
    shape: tuple[tuple[int, int], int] = LARGE,
    dtype: torch.dtype = torch.bfloat16,
    padding: tuple[int, ...] = (),
    first_key: int = 0,
) -> Rows:
    return Rows(starts, lengths, 0, *shape, dtype, padding, first_key, "cuda")


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def check(rows: Rows, config: HopperConfig, limit: float = 1e-2) -> None:
    before = rows.pool.clone()
    expected, _ = rows.expected()
    out = rows.run(chunk=partial(chunk, config=config))
    assert error(out, expected) <= limit
    assert rows.untouched(before)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 63, 64, 65, 127, 128, 1000, 5000])
def test_a_prompt_of_every_length(tokens: int, config: HopperConfig) -> None:
    check(rows_of([0], [tokens]), config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [(LARGE, torch.bfloat16), (((6, 2), 256), torch.float16), (((1, 1), 256), torch.bfloat16)]
)
def test_chunks_behind_contexts(shape: tuple[tuple[int, int], int], dtype: torch.dtype, config: HopperConfig) -> None:
    check(rows_of([0, 5, 64, 130, 0, 3000], [1, 63, 64, 65, 200, 1000], shape, dtype), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_many_short_chunks(config: HopperConfig) -> None:
    lengths = [random.randrange(1, 40) for _ in range(150)]
    check(rows_of([random.choice([0, 64, 90]) for _ in lengths], lengths), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_scores_that_grow_and_fall(config: HopperConfig) -> None:
    """The maximum moves at every block, by much and by little, forwards and backwards. Scores are large, so that the
    rounding of queries and keys, which both kernels share, is most of the error."""
    for grows in (False, True):
        rows = rows_of([0, 700], [900, 100])
        size = torch.linspace(0.1, 30, 900, device="cuda")[:, None]
        for own, tokens in ((slice(0, 900), 900), (slice(900, 1000), 100)):
            rows.k[own, :, 0] = (size if grows else size.flip(0))[:tokens].to(rows.k.dtype)
            rows.q[own, :, 0] = 30.0
        plain = rows.run(chunk=partial(chunk, config=PLAIN))
        check(rows, config, 1.1 * error(plain, rows.expected()[0]))


@pytest.mark.parametrize("config", CONFIGS)
def test_first_keys_anywhere(config: HopperConfig) -> None:
    """What lies before them is NaN; a row that sees no key gives zeros."""
    starts, first = [0, 70, 64, 200, 130, 900], [1, 70, 3, 199, 65, 500]
    rows = rows_of(starts, [2, 2, 100, 2, 40, 70])
    rows.layout = dataclasses.replace(
        rows.layout, first_key=torch.tensor(first, dtype=torch.int32, device="cuda"), memo={}
    )
    for row, key in enumerate(first[1:], 1):
        for place in range(key):
            rows.pool[:, int(rows.layout.block_table[row, place // 64]), place % 64] = torch.nan
    expected, _ = rows.expected()
    out = rows.run(chunk=partial(chunk, config=config))
    assert error(out[1:], expected[1:]) <= 1e-2
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize(("shape", "dtype"), [(((6, 2), 128), torch.float16), (((4, 2), 64), torch.bfloat16)])
def test_narrow_heads(shape: tuple[tuple[int, int], int], dtype: torch.dtype) -> None:
    check(rows_of([0, 5, 64, 130, 0, 3000], [1, 63, 64, 65, 200, 1000], shape, dtype), HopperConfig())


def test_padding_rows_and_a_row_of_nan() -> None:
    rows = rows_of([0, 40, 0, 80, 70], [1, 20, 3, 65, 2], padding=(0, 2))
    for x in (rows.q, rows.k, rows.v, rows.gate):
        x[21:24] = torch.nan
    expected, _ = rows.expected()
    rows.q[89:] = torch.nan
    out = rows.run(chunk=partial(chunk, config=HopperConfig()))
    for own in (slice(1, 21), slice(24, 89)):
        assert error(out[own], expected[own]) <= 1e-2
    for own in (slice(0, 1), slice(21, 24)):
        assert torch.equal(out[own], torch.zeros_like(out[own]))
    assert bool(out[89:].isnan().all())


@pytest.mark.parametrize("config", CONFIGS)
def test_long_rows_of_padding(config: HopperConfig) -> None:
    """As a graph of one prompt has them before it is used."""
    rows = rows_of([0, 0, 40], [1024, 1025, 20], padding=(0, 1))
    expected, _ = rows.expected()
    out = rows.run(chunk=partial(chunk, config=config))
    assert error(out[2049:], expected[2049:]) <= 1e-2
    assert torch.equal(out[:2049], torch.zeros_like(out[:2049]))


def test_without_a_gate_and_twice_the_same() -> None:
    rows = rows_of([70, 3], [300, 20])
    gated, plain = (rows.run(gate, partial(chunk, config=HopperConfig())).float() for gate in (True, False))
    assert error(plain * rows.gate.float().sigmoid(), gated.double()) <= 1e-2
    again = rows.run(False, partial(chunk, config=HopperConfig()))
    assert torch.equal(again.float(), plain)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 16, 40, 129, 500])
def test_short_pieces_behind_long_contexts(tokens: int, config: HopperConfig) -> None:
    """Their contexts are cut into parts."""
    for least in (1, config.least):
        check(rows_of([9000], [tokens]), config._replace(least=least))
    check(rows_of([3000, 5, 0, 20_000, 64], [tokens, 20, 3, 7, 1], padding=(2,)), config)


@pytest.mark.parametrize(("shape", "dtype"), [(((6, 2), 128), torch.float16), (((4, 2), 64), torch.bfloat16)])
def test_short_pieces_of_narrow_heads(shape: tuple[tuple[int, int], int], dtype: torch.dtype) -> None:
    check(rows_of([9000, 3, 4000], [40, 2, 100], shape, dtype), HopperConfig())


def test_parts_do_not_follow_from_padding() -> None:
    config = HopperConfig(slack=8, held=64)
    alone = rows_of([6000], [70])
    rows = rows_of([0, 6000, 0], [30, 70, 90], padding=(0, 2))
    block_table = rows.layout.block_table.clone()
    block_table[1] = alone.layout.block_table[0]
    kv_index = rows.layout.kv_index.clone()
    kv_index[30:100] = alone.layout.kv_index
    rows.layout = dataclasses.replace(rows.layout, block_table=block_table, kv_index=kv_index, memo={})
    rows.memory, rows.pool, rows.cos_sin = alone.memory, alone.pool, alone.cos_sin
    rows.q_weight, rows.k_weight = alone.q_weight, alone.k_weight
    for name in ("q", "k", "v", "gate"):
        getattr(rows, name)[30:100] = getattr(alone, name)
    found, expected = (x.run(chunk=partial(chunk, config=config)) for x in (rows, alone))
    assert torch.equal(found[30:100], expected)
    uncut = alone.run(chunk=partial(chunk, config=config._replace(least=0)))
    assert not torch.equal(uncut, expected), "nothing was cut"
