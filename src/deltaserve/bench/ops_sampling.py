"""From logits to tokens at a vocabulary of 151,936."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from deltaserve.bench.ops import Case
from deltaserve.ops.sampling import api

VOCAB = 151_936
ROWS = (1, 8, 32, 128, 256)


def sets_of(rows: int) -> int:
    return max(2, min(20, 200 // rows))


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, device="cuda") * 3


def greedy(rows: int) -> Case:
    def make() -> list[Callable[[], object]]:
        return [partial(api.greedy_checked, logits_of(rows)) for _ in range(sets_of(rows))]

    return Case(f"greedy {rows}", make, 4.0 * rows * VOCAB)


def sample(rows: int, cuts: str) -> Case:
    """The floor is one pass over the logits; a cut takes eleven more, a draw two and the largest one."""
    passes = 3 + 11 * len(cuts)

    def make() -> list[Callable[[], object]]:
        one = torch.ones(rows, device="cuda")
        top_k = torch.full((rows,), 20 if "k" in cuts else VOCAB, device="cuda")
        top_p = torch.full((rows,), 0.9 if "p" in cuts else 1.0, dtype=torch.float64, device="cuda")
        number = torch.arange(rows, device="cuda")
        widths = [20 if "k" in cuts else VOCAB if "p" in cuts else 0] * rows
        settings = (one, top_k, top_p, 0 * top_p, number, number, widths, "p" in cuts, False)
        return [partial(api.sample, logits_of(rows), *settings) for _ in range(2)]

    return Case(f"sample {rows} {cuts or 'uncut'} ({passes} passes)", make, 4.0 * rows * VOCAB)


def logprobs(rows: int) -> Case:
    def make() -> list[Callable[[], object]]:
        token = torch.arange(rows, device="cuda")
        return [partial(api.token_logprobs, logits_of(rows), token, 20) for _ in range(2)]

    return Case(f"logprobs {rows}", make, 4.0 * rows * VOCAB)


def cases() -> list[Case]:
    return [
        *(greedy(rows) for rows in ROWS),
        *(sample(rows, cuts) for rows in (1, 32, 256) for cuts in ("", "k", "p", "kp")),
        *(logprobs(rows) for rows in (1, 32)),
    ]
