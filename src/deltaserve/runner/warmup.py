"""What happens between loading and the first request on a GPU: kernels are compiled, the largest steps are run to see
what memory they take beside weights and pools, and graphs are recorded. After that nothing compiles.

Knows no request: its rows belong to nobody, read the zero state, and keep their memory in ids that are free.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import Seating
from deltaserve.core.request import SamplingParams
from deltaserve.ops.gpu import compiling_only
from deltaserve.runner.inputs import Batch, Numbers
from deltaserve.runner.memory import blocks_of
from deltaserve.runner.model import logits_to_draw
from deltaserve.runner.runner import Runner
from deltaserve.runner.staging import Ints

logger = logging.getLogger(__name__)

MAX_COMPILERS = 32
"""Threads that compile: each spends its time outside of Python."""


def step_sizes(most: int) -> list[int]:
    """Tokens of the steps that a kernel may be compiled differently for: powers of two up to `most` and their
    neighbours, and `most`."""
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, size + 1}
        size *= 2
    return sorted(size for size in sizes if size <= most)


class WarmUp:
    """Drives a runner through steps that nobody asked for."""

    def __init__(self, runner: Runner, max_tokens: int, mixes: bool = False) -> None:
        """`max_tokens`: of one step. `mixes`: steps hold rows that extend and prompts, as they do without graphs."""
        self._runner = runner
        self._mixes = mixes
        self._max_tokens = min(max_tokens, len(runner.seats.num_blocks) * runner.seats.max_len)

    def compile(self) -> None:
        """Compiles, in parallel, what steps of all sizes need. Results are cached on the disk by Triton."""
        begin = time.perf_counter()
        with compiling_only(min(MAX_COMPILERS, 2 * (os.cpu_count() or 1))), self._runner.model.shortened():
            self._all_sizes()
            with torch.inference_mode():
                for size in step_sizes(self._max_tokens):
                    self._prefill(self._prompts(size), is_padded=True)  # as graphs of prompts are
                self._draw_only()
        torch.cuda.synchronize()
        logger.info("compiled kernels in %.1f s", time.perf_counter() - begin)

    def run(self) -> None:
        """Runs steps of all sizes through few layers, the largest through all, and the sampler with everything a
        request may ask for."""
        with self._runner.model.shortened():
            self._all_sizes()
        with torch.inference_mode():
            self._prefill(self._prompts(self._max_tokens))
        self._sample()
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _all_sizes(self) -> None:
        longest, seats = self._max_tokens, len(self._runner.seats.num_blocks)
        for size in step_sizes(longest):
            self._prefill(self._prompts(size))
        for rows in step_sizes(min(seats, longest)):
            self._prefill(np.full(rows, min(longest // rows, self._runner.seats.max_len)))
            self._decode(rows)
            if self._mixes and rows < seats and rows + 1 < longest:
                self._decode(rows, beside=2)
        if self._runner.guesser is not None:
            self._most_entries()

    def _prompts(self, tokens: int) -> Ints:
        """Lengths of as few prompts as have so many tokens."""
        whole, rest = divmod(tokens, self._runner.seats.max_len)
        return np.array([self._runner.seats.max_len] * whole + [rest] * (rest > 0))

    def _prefill(self, counts: Ints, is_padded: bool = False) -> None:
        """Prompts of so many tokens each, all in the same blocks: no row may own them, so none may be read across
        rows, and what they hold does not matter."""
        self._forward(self._chunks(np.arange(len(counts)), counts), is_padded)

    def _chunks(self, seats: Ints, counts: Ints) -> Numbers:
        self._own_blocks(len(set(seats.tolist())), int(counts.max()))
        zeros = np.zeros(len(counts), dtype=np.int64)
        return Numbers(
            seats=seats,
            starts=zeros,
            counts=counts,
            num_guesses=zeros,
            read_slot=zeros - 1,
            write_slot=np.full(int(counts.sum()), -1),
            row_starts=np.concatenate(([0], counts.cumsum())),
            sampling=np.arange(len(counts)),
            num_decode=0,
        )

    def _decode(self, rows: int, beside: int = 0) -> Tensor:
        """`rows` rows of every length that extends, beside a prompt of so many tokens; the logits of the last."""
        runner, count = self._runner, rows + (beside > 0)
        self._own_blocks(count, max(1, beside))
        seats, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
        for length in range(1, 1 + runner.inputs.recent.shape[1]):
            counts = np.where(seats < rows, length, beside)
            numbers = Numbers(
                seats=seats,
                starts=zeros,
                counts=counts,
                num_guesses=np.where(seats < rows, length - 1, 0),
                read_slot=zeros - 1,
                write_slot=np.full(int(counts.sum()), -1),
                row_starts=np.concatenate(([0], counts.cumsum())),
                sampling=seats,
                num_decode=rows,
            )
            logits_NV = self._forward(numbers)
        return logits_NV

    def _forward(self, numbers: Numbers, is_padded: bool = False) -> Tensor:
        runner = self._runner
        batch = runner.inputs.build(numbers)
        layout = replace(batch.context.layout, is_padded=is_padded, memo={})
        hidden_TD = runner.model(batch.token_ids, replace(batch.context, layout=layout))
        if runner.guesser is not None:
            self._look_ahead(batch, hidden_TD)
        last_ND = hidden_TD if batch.last is None else hidden_TD[batch.last]
        return logits_to_draw(runner.model, last_ND)

    def _most_entries(self) -> None:
        """A prompt's last chunk may have one entry more than tokens."""
        runner, counts = self._runner, np.append(self._prompts(self._max_tokens), 1)
        numbers = self._chunks(np.arange(len(counts)) % len(runner.seats.num_blocks), counts)
        [hidden_SD] = runner.pools.hidden
        hidden_TD = hidden_SD.new_zeros(int(counts.sum()), hidden_SD.shape[1])
        self._look_ahead(runner.inputs.build(numbers), hidden_TD)

    def _look_ahead(self, batch: Batch, hidden_TD: Tensor) -> None:
        """Entries of the MTP layer as they are made behind such a step: one for each of its tokens."""
        runner = self._runner
        runner.inputs.carry_hidden(batch, hidden_TD)
        layout = batch.context.layout
        layout = replace(layout, first_key=torch.ones_like(layout.context_len), memo={})
        runner.model.look_ahead(batch.token_ids, hidden_TD, replace(batch.context, layout=layout))

    def _own_blocks(self, rows: int, length: int) -> None:
        """Seats 0 to `rows` - 1 take the first blocks of the pool, all of them the same ones."""
        seats = self._runner.seats
        seats.num_blocks[:rows] = blocks_of(length)
        seats.block_table[:rows, : blocks_of(length)] = np.arange(blocks_of(length))
        seats.token_ids[:rows, :length] = np.arange(rows * length).reshape(rows, length) % self._runner.vocab_size

    def _draw_only(self) -> None:
        """The kernels of sampling whose results nothing looks up with."""
        runner, rows = self._runner, len(self._runner.seats.num_blocks)
        logits_NV = self._decode(rows)[:rows]
        for asked in _every_stage():
            self._seat_all(asked)
            runner.sampler.draft(logits_NV, list(range(rows)), [1] * rows)

    @torch.inference_mode()
    def _sample(self) -> None:
        """As many rows as may sample at once, with every stage of sampling."""
        runner, rows = self._runner, len(self._runner.seats.num_blocks)
        logits_NV = self._decode(rows)[:rows]
        for asked in _every_stage():
            self._seat_all(asked)
            sampled = runner.sampler.sample(logits_NV, list(range(rows)), [1] * rows)
            sampled.start_copy()
        runner.inputs.remember(torch.arange(rows, device=runner.device), sampled.outcome)

    def _seat_all(self, asked: SamplingParams) -> None:
        for seat in range(len(self._runner.seats.num_blocks)):
            self._runner.sampler.seat(Seating(seat=seat, token_ids=[0], num_prompt=1, params=asked))


def _every_stage() -> Iterator[SamplingParams]:
    """Every combination of what cuts the distribution, with all else; and greedy choice."""
    for top_k, top_p, min_p in product((0, 50), (1.0, 0.9), (0.0, 0.01)):
        yield SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    yield SamplingParams(temperature=0.0, seed=0)
    yield SamplingParams(
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={0: 1.0},
        min_tokens=2,
        stop_token_ids=(0,),
        logprobs=20,
        seed=0,
    )
