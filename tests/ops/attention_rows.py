"""One attention layer's inputs for tests: rows whose first tokens lie in a poisoned pool already."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deltaserve.ops.attention import reference
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.ops.norm.reference import gemma_rms_norm
from deltaserve.ops.rope.api import rope_table
from deltaserve.ops.rope.reference import apply_rope

EPS = 1e-6
GUARD = 1024


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int8)


class Rows:
    """`heads`: of queries, of keys. `padding`: rows without memory. The pool lies between guards of NaN."""

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        num_step: int,
        heads: tuple[int, int],
        width: int,
        dtype: torch.dtype,
        padding: Sequence[int] = (),
        first_key: int = 0,
        device: str = "cpu",
    ) -> None:
        (num_q, num_kv), tokens = heads, sum(lengths)
        self.width, self.scale = width, width**-0.5
        starts = [0 if row in padding else start for row, start in enumerate(starts)]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        needs = [0 if row in padding else -(-end // BLOCK) for row, end in enumerate(ends)]
        num_blocks = sum(needs) + 3
        ids = random.sample(range(num_blocks), sum(needs))
        blocks = [[ids.pop() for _ in range(need)] for need in needs]
        entry = num_kv * width
        self.memory = torch.full((2 * num_blocks * BLOCK * entry + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        self.pool = self.memory[GUARD:-GUARD].view(2, num_blocks, BLOCK, num_kv, width)
        for start, own in zip(starts, blocks, strict=True):
            if start > first_key and own:
                flat = self.pool[:, own].flatten(1, 2)
                flat[:, first_key:start] = torch.randn(2, start - first_key, num_kv, width, device=device).to(dtype)
                self.pool[:, own] = flat.view(2, len(own), BLOCK, num_kv, width)
        layout = Layout.from_rows(lengths, num_step=num_step, starts=starts, blocks=blocks, device=device)
        table = torch.nn.functional.pad(layout.block_table, (0, 2), value=-1)
        first = torch.full((len(lengths),), first_key, dtype=torch.int32, device=device) if first_key else None
        self.layout = dataclasses.replace(layout, first_key=first, block_table=table)
        # Between other columns, as a projection leaves them.
        widths = [16, num_q * width, num_q * width, num_kv * width, num_kv * width]
        projected = torch.randn(tokens, sum(widths), device=device).to(dtype)
        _, q, self.gate, k, v = torch.split(projected, widths, dim=1)
        self.q, self.k, self.v = (x.view(tokens, -1, width) for x in (q, k, v))
        self.q_weight, self.k_weight = (torch.rand(width, device=device) + 0.5 for _ in range(2))
        self.cos_sin = rope_table(max(ends) + 1, max(2, width // 4), 1e4, device=device)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output in float64, and the pool."""
        q = gemma_rms_norm(self.q.double(), self.q_weight.double(), EPS)
        k = gemma_rms_norm(self.k.double(), self.k_weight.double(), EPS)
        q, k = apply_rope(q, k, self.layout.position, self.cos_sin)
        pool = self.pool.double()
        layout = dataclasses.replace(self.layout, memo={})
        reference.store(k, self.v.double(), pool, layout)
        parts = [
            (reference.step if segment.is_step else reference.chunk)(q, pool, layout, segment, self.scale)
            for segment in layout.segments
        ]
        return torch.cat(parts).flatten(1) * self.gate.double().sigmoid(), pool

    def run(self, gate: bool = True, chunk: Callable[..., None] | None = None) -> Tensor:
        """By the kernels, into memory between guards: [T, H * D]. `chunk`: instead of the one for all GPUs."""
        from deltaserve.ops.attention import triton_chunk, triton_entry, triton_step

        weights = (self.q_weight, self.k_weight, EPS, self.cos_sin)
        layout = self.layout
        q = triton_entry.enter(self.q, self.k, self.v, *weights, layout.position, self.pool, layout.kv_index)
        memory = torch.full((q.numel() + 2 * GUARD,), torch.nan, dtype=q.dtype, device=q.device)
        out = memory[GUARD:-GUARD].view(q.shape)
        for segment in layout.segments:
            look_back = triton_step.step if segment.is_step else chunk or triton_chunk.chunk
            look_back(q, self.gate if gate else None, out, self.pool, layout, segment, self.scale)
        for whole in (memory, self.memory):
            assert bool(whole[:GUARD].isnan().all()), "written before the start"
            assert bool(whole[-GUARD:].isnan().all()), "written behind the end"
        return out.flatten(1)

    def untouched(self, before: Tensor) -> bool:
        """Whether all of the pool but the step's own entries is what it was, bit for bit."""
        kept = torch.ones(self.pool.shape[1] * BLOCK, dtype=torch.bool, device=self.pool.device)
        kept[self.layout.kv_index[self.layout.kv_index >= 0]] = False
        pairs = zip(self.pool.flatten(1, 2), before.flatten(1, 2), strict=True)
        return all(torch.equal(bits(x[kept]), bits(y[kept])) for x, y in pairs)
