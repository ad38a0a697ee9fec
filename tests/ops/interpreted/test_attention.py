"""The kernels of attention, interpreted, against the reference in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltaserve.ops.attention import reference, triton_chunk, triton_entry, triton_step
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.ops.norm.reference import gemma_rms_norm
from deltaserve.ops.rope.api import rope_table
from deltaserve.ops.rope.reference import apply_rope

WIDTH, ROTARY, SCALE, EPS = 32, 8, 0.25, 1e-6
HEADS = [(8, 1), (4, 2), (1, 1), (6, 2)]


class Step:
    """Rows whose first tokens are in a poisoned pool, and everything that one attention layer gets."""

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        num_step: int,
        heads: tuple[int, int] = (4, 2),
        dtype: torch.dtype = torch.float32,
        padding: Sequence[int] = (),
        first_key: int = 0,
    ) -> None:
        (num_q, num_kv), tokens = heads, sum(lengths)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        needs = [0 if row in padding else -(-end // BLOCK) for row, end in enumerate(ends)]
        ids = random.sample(range(sum(needs) + 3), sum(needs))
        blocks = [[ids.pop() for _ in range(need)] for need in needs]
        self.pool = torch.full((2, sum(needs) + 3, BLOCK, num_kv, WIDTH), torch.nan, dtype=dtype)
        for row, own in enumerate(blocks):
            for position in range(first_key, starts[row] if own else 0):
                at = own[position // BLOCK], position % BLOCK
                self.pool[:, at[0], at[1]] = torch.randn(2, num_kv, WIDTH)
        starts = [0 if row in padding else start for row, start in enumerate(starts)]
        layout = Layout.from_rows(lengths, num_step=num_step, starts=starts, blocks=blocks)
        table = torch.nn.functional.pad(layout.block_table, (0, 2), value=-1)
        self.layout = dataclasses.replace(layout, first_key=first_key, block_table=table)
        # Between other columns, as a projection leaves them.
        widths = [7, num_q * WIDTH, num_q * WIDTH, num_kv * WIDTH, num_kv * WIDTH]
        _, q, self.gate, k, v = torch.split(torch.randn(tokens, sum(widths)).to(dtype), widths, dim=1)
        self.q, self.k, self.v = (x.view(tokens, -1, WIDTH) for x in (q, k, v))
        self.q_weight, self.k_weight = torch.rand(WIDTH) + 0.5, torch.rand(WIDTH) + 0.5
        self.cos_sin = rope_table(max(ends) + 1, ROTARY, 1e4)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output before its rounding, and the pool."""
        q = gemma_rms_norm(self.q.double(), self.q_weight.double(), EPS)
        k = gemma_rms_norm(self.k.double(), self.k_weight.double(), EPS)
        q, k = apply_rope(q, k, self.layout.position, self.cos_sin)
        pool = self.pool.double()
        reference.store(k, self.v.double(), pool, self.layout)
        parts = [
            (reference.step if segment.is_step else reference.chunk)(q, pool, self.layout, segment, SCALE)
            for segment in self.layout.segments
        ]
        return torch.cat(parts).flatten(1) * self.gate.double().sigmoid(), pool

    def run(self, gate: bool = True) -> Tensor:
        q = triton_entry.enter(
            self.q,
            self.k,
            self.v,
            self.q_weight,
            self.k_weight,
            EPS,
            self.cos_sin,
            self.layout.position,
            self.pool,
            self.layout.kv_index,
        )
        out = torch.empty_like(q)
        for segment in self.layout.segments:
            look_back = triton_step.step if segment.is_step else triton_chunk.chunk
            look_back(q, self.gate if gate else None, out, self.pool, self.layout, segment, SCALE)
        return out.flatten(1)

    def check(self) -> None:
        before = self.pool.clone()
        expected, pool = self.expected()
        out = self.run()
        eps = 1e-5 if out.dtype == torch.float32 else 4e-3
        torch.testing.assert_close(out.double(), expected, rtol=eps, atol=eps)
        torch.testing.assert_close(self.pool.double(), pool, rtol=eps, atol=eps, equal_nan=True)
        untouched = torch.ones(self.pool.shape[1] * BLOCK, dtype=torch.bool)
        untouched[self.layout.kv_index[self.layout.kv_index >= 0]] = False
        for x, y in zip(self.pool.flatten(1, 2), before.flatten(1, 2), strict=True):
            assert torch.equal(bits(x[untouched]), bits(y[untouched]))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int8)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_steps_over_contexts_of_every_length(heads: tuple[int, int], length: int) -> None:
    contexts = [max(length, context) for context in (1, 63, 64, 65, 640)]
    Step([context - length for context in contexts], [length] * 5, 5, heads).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_long_row_among_short_ones(dtype: torch.dtype) -> None:
    Step([0, 4095, 5], [1, 1, 1], 3, (8, 1), dtype).check()


@pytest.mark.parametrize("rows", [1, 2, 130])
def test_many_rows(rows: int) -> None:
    Step([random.choice([0, 3, 63, 64, 130]) for _ in range(rows)], [1] * rows, rows, (1, 1)).check()


def test_nine_tokens_of_eight_heads() -> None:
    Step([100, 0], [9, 9], 2, (8, 1)).check()


@pytest.mark.parametrize("heads", HEADS)
def test_chunks_behind_contexts(heads: tuple[int, int]) -> None:
    lengths = [1, 63, 64, 65, 200] if heads == (4, 2) else [1, 17, 65]
    Step([0, 5, 64, 130, 0][: len(lengths)], lengths, 0, heads).check()


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128])
def test_a_prompt_of_every_length(tokens: int) -> None:
    Step([0], [tokens], 0, (8, 2), torch.float16).check()


def test_steps_and_chunks_in_one_step() -> None:
    Step([70, 3, 0, 64], [2, 2, 33, 64], 2).check()


@pytest.mark.parametrize("num_step", [0, 4])
def test_a_first_key_that_is_not_there(num_step: int) -> None:
    """A row of one token sees no key, and gives zeros."""
    step = Step([0, 1, 64, 200], [1] * 4, num_step, first_key=1)
    step.pool[:, :, 0] = torch.nan  # where first keys would be, and those of later blocks
    for row in (2, 3):
        position = int(step.layout.position[row])
        for block in step.layout.block_table[row, 1 : position // BLOCK + 1].tolist():
            step.pool[:, block, 0] = torch.randn(2, 2, WIDTH)
    expected, _ = step.expected()
    out = step.run()
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows(num_step: int) -> None:
    step = Step([0, 40, 0, 80], [1] * 4, num_step, padding=(0, 2))
    for x in (step.q, step.k, step.v, step.gate):
        x[2] = torch.nan
    before = step.pool.clone()
    expected, pool = step.expected()
    out = step.run()
    torch.testing.assert_close(out[[1, 3]].double(), expected[[1, 3]], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    torch.testing.assert_close(step.pool.double(), pool, rtol=1e-5, atol=1e-5, equal_nan=True)
    changed = (bits(step.pool) != bits(before)).view(2, -1, 2 * WIDTH * 4).any(2).any(0).nonzero().squeeze(1)
    assert sorted(changed.tolist()) == sorted(step.layout.kv_index[[1, 3]].tolist())


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's, in the interpreter
def test_a_row_of_nan_stays_alone() -> None:
    step = Step([70, 70, 3], [1, 1, 20], 2)
    expected, _ = step.expected()
    step.q[0] = torch.nan
    out = step.run()
    assert bool(out[0].isnan().all())
    torch.testing.assert_close(out[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)


def test_without_a_gate_and_a_plain_store() -> None:
    step = Step([70, 3], [1, 20], 1)
    gated = step.run()
    plain = step.run(gate=False)
    torch.testing.assert_close(plain * step.gate.sigmoid(), gated, rtol=1e-5, atol=1e-6)
    k, pool = torch.randn(21, 2, WIDTH), step.pool.clone()
    triton_entry.store(k, step.v, step.pool, step.layout.kv_index)
    reference.store(k, step.v, pool, step.layout)
    assert torch.equal(bits(step.pool), bits(pool))
