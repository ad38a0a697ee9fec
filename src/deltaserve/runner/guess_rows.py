"""Which rows of a step's logits belong to which guesses, on the device. Batches are alike for long, so few are made.

Shape letters: B requests, K the most guesses of one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from deltaserve.runner.token_counts import send


@lru_cache(maxsize=64)
def places(counts: tuple[int, ...], behind: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row of requests with so many guesses: its request, and which of its rows it is, plus `behind`."""
    request = [b for b, count in enumerate(counts) for _ in range(count + 1)]
    offset = [behind + j for count in counts for j in range(count + 1)]
    return send(torch.tensor(request), device), send(torch.tensor(offset), device)


@lru_cache(maxsize=64)
def checked(counts: tuple[int, ...], shares: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each guess: the row whose token it must equal, and the share of its place; behind the last, the last one."""
    starts = [0, *accumulate(count + 1 for count in counts)]
    rows = [starts[b] + place for b, count in enumerate(counts) for place in range(count)]
    own = [shares[min(place, len(shares) - 1)] for count in counts for place in range(count)]
    return send(torch.tensor(rows), device), send(torch.tensor(own, dtype=torch.float64), device)


@lru_cache(maxsize=64)
def chains(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of requests with so many guesses, K at most: their rows [B, K + 1], the last one again where there are fewer; the
    numbers of their guesses [B, K], and which of these there are; 0 to K. Batches are alike for long, so few are made.
    """
    longest, starts = max(counts), [0, *accumulate(count + 1 for count in counts)]
    places = torch.arange(longest + 1)
    count_B1 = torch.tensor(counts)[:, None]
    start_B1 = torch.tensor(starts[:-1])[:, None]
    row_BJ = start_B1 + places.minimum(count_B1)
    is_guess_BK = places[:-1] < count_B1
    guess_BK = torch.where(is_guess_BK, start_B1 - torch.arange(len(counts))[:, None] + places[:-1], 0)
    return send(row_BJ, device), send(guess_BK, device), send(is_guess_BK, device), send(places, device)
