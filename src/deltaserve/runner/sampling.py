"""From logits to tokens. Knows seats and positions; knows no request, no queue and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.core.plan import RowResult, Seating
from deltaserve.core.request import TokenLogprobs


class NonFiniteLogits(ArithmeticError):
    """Some logit is NaN or infinite: the request they belong to cannot go on."""


@dataclass(frozen=True)
class Drafts:
    """Guessed tokens of a step. `counts[b]` of them belong to request b; `token_ids` [sum(counts)] int64, on the device."""

    counts: tuple[int, ...]
    token_ids: Tensor


@dataclass(frozen=True)
class Sampled:
    """
    Name           Shape       Dtype   Meaning
    token_BJ       [B, 1+K]    int64   the new tokens, on the device; K is the largest number of drafts
    num_tokens_B   [B]         int64   how many of them are meant: accepted drafts + 1
    ok_B           [B]         bool    the logits were finite
    """

    token_BJ: Tensor
    num_tokens_B: Tensor
    ok_B: Tensor

    def results(self) -> list[RowResult]:
        """Copies to the host (waits for the device): tokens and logprobs, or the error, one per request."""
        raise NotImplementedError


class Sampler:
    """Draws the tokens of a step; parameters and token counts live in tables with one row per seat."""

    def __init__(
        self, num_seats: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        raise NotImplementedError

    def seat(self, seating: Seating) -> None:
        """Take over a request's parameters and recount its tokens. Replaces whoever sat there."""
        raise NotImplementedError

    def sample(
        self, logits_RV: Tensor, seats: Sequence[int], positions: Sequence[int] | Tensor, drafts: Drafts | None = None
    ) -> Sampled:
        """One step.

        Name        Shape    Dtype       Meaning
        logits_RV   [R, V]   fp32/fp64   R = sum(1 + drafts of b); rows of a request are consecutive
        seats       [B]      ints        one per request
        positions   [B]      ints        number, in its sequence, of the first token to draw
                                         (`row.start + row.num_tokens - row.num_drafts`); a list or an int64 tensor
        drafts      -        -           None: no request has any
        """
        raise NotImplementedError

    def prompt_logprobs(self, logits_NV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """What the model thought of N known tokens. `logits_NV[i]` are those that predict `token_ids[i]`.

        Raises NonFiniteLogits.
        """
        raise NotImplementedError
