"""Runs a model by hand: rows of chosen lengths, one step at a time, over pools that are NaN wherever nobody wrote.

Stands for scheduler, cache and runner in tests that are about the model or an op. Knows no sampling but greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaserve.layers.context import ForwardContext
from deltaserve.models.qwen3_next import Qwen3Next
from deltaserve.ops.layout import BLOCK, Layout

NAN = float("nan")


@dataclass
class Row:
    """One sequence: all its tokens known so far, and how many of them are in the cache."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1


class Driver:
    """Owns the pools. Every step writes a row's state to a fresh slot and poisons the one it was read from.

    `in_place` writes it back to the slot it was read from instead, as a server does.
    """

    def __init__(
        self,
        model: Qwen3Next,
        *,
        num_blocks: int = 64,
        num_slots: int = 40,
        state_dtype: torch.dtype | None = None,
        in_place: bool = False,
        poison: float = NAN,
    ) -> None:
        self.model, self.in_place, self.poison = model, in_place, poison
        config, weight = model.config, model.embed_tokens.weight
        dtype, device = weight.dtype, weight.device
        state_dtype = torch.promote_types(dtype, torch.float32) if state_dtype is None else state_dtype
        kv = (2, num_blocks, BLOCK, config.num_kv_heads, config.head_dim)
        conv = (num_slots, config.conv_width - 1, config.conv_dim)
        state = (num_slots, config.gdn_v_heads, config.gdn_k_dim, config.gdn_v_dim)

        def pools(count: int, shape: tuple[int, ...], of: torch.dtype) -> list[Tensor]:
            return [torch.full(shape, poison, dtype=of, device=device) for _ in range(count)]

        self.kv = pools(config.num_full_layers, kv, dtype)
        self.conv = pools(config.num_gdn_layers, conv, dtype)
        self.state = pools(config.num_gdn_layers, state, state_dtype)
        self.device = device
        # Handed out from the end, so that neighbours in a batch are not neighbours in memory.
        self.free_blocks = list(range(num_blocks))
        self.free_slots = list(range(num_slots))

    def step(self, rows: Sequence[Row], counts: Sequence[int], num_step: int = 0) -> list[Tensor]:
        """Compute the next `counts[i]` known tokens of each row; the first `num_step` rows are the step segment.

        Returns each row's logits [count, V].
        """
        for row, count in zip(rows, counts, strict=True):
            assert row.num_computed + count <= len(row.token_ids), "the row has no such tokens"
            while len(row.blocks) * BLOCK < row.num_computed + count:
                row.blocks.append(self.free_blocks.pop())
        read = [row.slot for row in rows]
        write = [
            row.slot if self.in_place and row.slot >= 0 else self.free_slots.pop(0 if index % 2 else -1)
            for index, row in enumerate(rows)
        ]
        layout = Layout.from_rows(
            counts,
            num_step=num_step,
            starts=[row.num_computed for row in rows],
            read_slots=read,
            write_slots=[[-1] * (count - 1) + [slot] for count, slot in zip(counts, write, strict=True)],
            blocks=[row.blocks for row in rows],
            device=self.device,
        )
        token_ids = [
            token
            for row, count in zip(rows, counts, strict=True)
            for token in row.token_ids[row.num_computed : row.num_computed + count]
        ]
        with torch.inference_mode():
            context = ForwardContext(layout=layout, kv=self.kv, conv=self.conv, state=self.state)
            hidden_TD = self.model(torch.tensor(token_ids, device=self.device), context)
            logits_TV = self.model.logits(hidden_TD)
        for row, count, slot in zip(rows, counts, write, strict=True):
            row.num_computed += count
            if slot != row.slot:
                self._free_slot(row.slot)
                row.slot = slot
        return list(torch.split(logits_TV, list(counts)))

    def prefill(self, row: Row, chunks: Sequence[int] | None = None) -> Tensor:
        """All known tokens of one row, cut into `chunks`; their logits [tokens, V]."""
        chunks = [len(row.token_ids) - row.num_computed] if chunks is None else chunks
        return torch.cat([self.step([row], [count])[0] for count in chunks])

    def decode(self, rows: Sequence[Row]) -> list[Tensor]:
        """The one token of each row that is not computed yet, in one step; each row's logits [1, V]."""
        return self.step(rows, [1] * len(rows), num_step=len(rows))

    def release(self, row: Row) -> None:
        """Free and poison what the row held; it starts anew."""
        for pool in self.kv:
            pool[:, row.blocks] = self.poison
        self.free_blocks += row.blocks
        self._free_slot(row.slot)
        row.blocks, row.slot, row.num_computed = [], -1, 0

    def _free_slot(self, slot: int) -> None:
        if slot < 0:
            return
        for pool in (*self.conv, *self.state):
            pool[slot] = self.poison
        self.free_slots.append(slot)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """`num_tokens` greedy tokens for each prompt: rows in their prompt and rows past it share every step."""
        rows = [Row(list(prompt)) for prompt in prompts]
        lengths = [len(prompt) + num_tokens for prompt in prompts]
        while busy := [row for row, length in zip(rows, lengths, strict=True) if len(row.token_ids) < length]:
            decoding = [row for row in busy if len(row.token_ids) - row.num_computed == 1]
            filling = [row for row in busy if row not in decoding]
            counts = [min(chunk, len(row.token_ids) - row.num_computed) for row in (*decoding, *filling)]
            for row, logits in zip(
                (*decoding, *filling), self.step((*decoding, *filling), counts, len(decoding)), strict=True
            ):
                if row.num_computed == len(row.token_ids):
                    row.token_ids.append(int(logits[-1].argmax()))
        for row in rows:
            self.release(row)
        return [row.token_ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
