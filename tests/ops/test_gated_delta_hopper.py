"""The pass over chunks by warps that have roles, on a CPU (see gluon_machine.py), against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import deltaserve.ops.gated_delta
from deltaserve.ops.gated_delta.triton_chunk import HopperConfig
from deltaserve.ops.layout import BLOCK
from tests.ops.gated_delta_nets import Rows, chunk_rows, with_rows_behind
from tests.ops.gluon_machine import load_kernels
from tests.ops.guarded import guarded, relative

K_HEADS, V_HEADS, WIDTH = 1, 2, 128
KEYS = K_HEADS * WIDTH


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    (folder,) = deltaserve.ops.gated_delta.__path__
    return load_kernels(str(Path(folder) / "triton_hopper.py"), "relay_kernel")


class Pass:
    """Random tokens of rows, as the convolution leaves them, and what preparing their chunks makes of them."""

    def __init__(self, rows: Rows) -> None:
        tokens = sum(rows.lengths)
        q, k = (torch.nn.functional.normalize(torch.randn(2, tokens, WIDTH) + 0.5, dim=-1)).half()
        q = q / WIDTH**0.5
        self.rows, self.layout = rows, rows.layout("cpu")
        self.mixed = torch.cat([q, k, torch.randn(tokens, V_HEADS * WIDTH).half()], 1)
        self.g = -torch.rand(tokens, V_HEADS, dtype=torch.float64) / 8
        self.beta = torch.rand(tokens, V_HEADS, dtype=torch.float64)
        self.pool = torch.full((rows.num_slots, V_HEADS, WIDTH, WIDTH), torch.nan)
        for slot in rows.read:
            if slot >= 0:
                self.pool[slot] = torch.randn(V_HEADS, WIDTH, WIDTH) / 10

    def bounds(self) -> list[tuple[int, int]]:
        ends = torch.tensor(self.rows.lengths).cumsum(0).tolist()
        return [(end - length, end) for end, length in zip(ends, self.rows.lengths, strict=True)]

    def parts(self, head: int, some: slice) -> list[Tensor]:
        """q, k, v, g and beta in float64."""
        first = 2 * KEYS + head * WIDTH
        found = [self.mixed[some, :KEYS], self.mixed[some, KEYS : 2 * KEYS], self.mixed[some, first : first + WIDTH]]
        return [*(part.double() for part in found), self.g[some, head], self.beta[some, head]]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs, and the pool."""
        out = torch.empty(len(self.mixed), V_HEADS, WIDTH, dtype=torch.float64)
        pool = self.pool.double()
        for row, (first, end) in enumerate(self.bounds()):
            read = self.rows.read[row]
            for head in range(V_HEADS):
                state = self.pool[read, head].double() if read >= 0 else torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
                for token, q, k, v, g, beta in zip(
                    range(first, end), *self.parts(head, slice(first, end)), strict=True
                ):
                    state = g.exp() * state
                    state = state + torch.outer(k, beta * (v - k @ state))
                    out[token, head] = q @ state
                    slot = self.rows.write[row][token - first]
                    if slot >= 0:
                        pool[slot, head] = state
        return out, pool

    def prepared(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `prepare_kernel` leaves them: mixed with u, w, P and the gates."""
        tokens = len(self.mixed)
        mixed, w = self.mixed.clone(), torch.empty(tokens, V_HEADS, WIDTH, dtype=torch.float16)
        p, gates = torch.zeros(tokens, V_HEADS, BLOCK, dtype=torch.float16), torch.empty(V_HEADS, tokens, 2)
        for (first, end), start in zip(self.bounds(), self.rows.starts, strict=True):
            base = first - start % BLOCK
            for low in range(base, end, BLOCK):
                some = slice(max(low, first), min(low + BLOCK, end))
                own = slice(some.start - low, some.stop - low)
                for head in range(V_HEADS):
                    q, k, v, g, beta = self.parts(head, some)
                    total = g.cumsum(0)
                    between = (total[:, None] - total[None, :]).exp().tril()
                    system = (k @ k.T * between * beta[:, None]).tril(-1)
                    inverse = torch.linalg.inv(torch.eye(len(g), dtype=g.dtype) + system)
                    mixed[some, 2 * KEYS + head * WIDTH :][:, :WIDTH] = (inverse * beta @ v).half()
                    w[some, head] = (inverse * (beta * total.exp()) @ k).half()
                    p[some, head, own] = (q @ k.T * between).half()
                    gates[head, some] = torch.stack([total, total[-1] - total], 1).exp().float()
        return mixed, w, p, gates


def run(kernels: ModuleType, given: Pass, config: HopperConfig) -> tuple[Tensor, Tensor]:
    (segment,) = given.layout.segments
    pool = given.pool.clone()
    with guarded():
        out = torch.empty(len(given.mixed), V_HEADS, WIDTH, dtype=torch.float16)
        kernels.pass_chunks(*given.prepared(), pool, out, given.layout, segment, config)
    return out, pool


def check(kernels: ModuleType, given: Pass, config: HopperConfig, spoilt: int = -1) -> None:
    """`spoilt`: a row whose numbers are NaN, which may not be seen elsewhere."""
    expected, states = given.expected()
    out, pool = run(kernels, given, config)
    for row, (first, end) in enumerate(given.bounds()):
        if row == spoilt:
            continue
        assert relative(out[first:end], expected[first:end]) < 4e-3, f"row {row}"
        for slot in given.rows.write[row]:
            assert slot < 0 or relative(pool[slot], states[slot]) < 4e-3, f"slot {slot}"
    kept = [slot for slot in range(len(pool)) if slot not in given.rows.written]
    torch.testing.assert_close(pool[kept], given.pool[kept], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("config", [HopperConfig(), HopperConfig(2, 3, 1)], ids=str)
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1], [0]), ([64], [0]), ([200], [0]), ([63, 65, 130], [1, 64, 100]), ([2, 5, 1, 70], [62, 61, 63, 130])],
    ids=str,
)
def test_rows_of_every_length(
    kernels: ModuleType, lengths: Sequence[int], starts: Sequence[int], config: HopperConfig
) -> None:
    check(kernels, Pass(chunk_rows(lengths, starts)), config)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_row_of_nan_spoils_no_other(kernels: ModuleType, spoilt: int) -> None:
    given = Pass(chunk_rows([70, 40, 80], [30, 0, 100]))
    first, end = given.bounds()[spoilt]
    given.mixed[first:end] = torch.nan
    check(kernels, given, HopperConfig(), spoilt)


def test_states_that_nobody_keeps(kernels: ModuleType) -> None:
    given = Pass(Rows([100], 0, [0], [-1], [[-1] * 100]))
    check(kernels, given, HopperConfig())


def test_rows_without_a_token_behind_the_others(kernels: ModuleType) -> None:
    """Their first token would stand behind the last of all."""
    given = Pass(chunk_rows([70, 5], [0, 60]))
    given.layout = with_rows_behind(given.layout, 2)
    check(kernels, given, HopperConfig())
