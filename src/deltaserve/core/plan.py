"""The seam between who and how: a plan goes down, a result comes up. Integers only, no tensor.

A *seat* is a row of the runner's tables that a request keeps while it runs. Everything that outlives a step is keyed
by seat, never by the position of a row in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from deltaserve.core.request import SamplingParams, TokenLogprobs

NO_SLOT = -1
"""As a read slot: the zero state. As a write slot: do not keep."""


class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a seat: what the runner must know of it while it runs. Sent once per admission."""

    seat: int
    token_ids: list[int] | bytes
    """All tokens known now: the prompt, and after a preemption the output so far. As bytes, 64 bits each, a long one
    goes from memory to memory without being taken apart."""
    num_prompt: int
    params: SamplingParams
    """`seed` is always set here; `stop_token_ids` holds all ids that end the request, end-of-text included."""
    blocks: tuple[int, ...] = ()
    """KV blocks of a prefix that need not be computed."""

    @property
    def known(self) -> Sequence[int]:
        """The tokens, one by one."""
        return memoryview(self.token_ids).cast("q") if isinstance(self.token_ids, bytes) else self.token_ids


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one request computes in this step, and where its memory is.

    The row's tokens are number `start` to `start + num_tokens - 1` of its sequence. Those the scheduler has not seen
    yet (the last sampled token, the drafts) the runner takes from the seat.
    """

    seat: int
    start: int
    """Tokens of this sequence that are already in the cache."""
    num_tokens: int
    num_drafts: int = 0
    """How many of the tokens, at the end, are drafts to be verified."""
    num_propose: int = 0
    """How many tokens to draft behind the one that the row samples. All of them are in the seat's table then, and
    there are KV blocks for `num_propose` tokens behind the row's."""
    samples: bool
    """The row reaches the end of the known tokens: its result has at least one new token."""
    new_blocks: tuple[int, ...] = ()
    """Appended to the seat's block table before the step."""
    read_slot: int = NO_SLOT
    """The state before the row's first token."""
    later_slots: tuple[int, ...] = ()
    """Planned while the request's row before is in flight, of which some tokens may turn out wrong: that state if this
    row starts at `start` + 1, + 2, ... It starts there if that row gives one token more than its first, two more ..."""
    write_slots: tuple[int, ...] = ()
    """The state after each token; one per token."""

    @property
    def num_guesses(self) -> int:
        """The drafts, for those who only need to know that these tokens may turn out wrong."""
        return self.num_drafts


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Rows that only extend (`num_decode` of them, 1 + drafts tokens each) come first, prefill rows after."""

    step: int
    seatings: list[Seating] = []
    rows: list[Row]
    num_decode: int
    drafts: bool = True
    """Drafts are in use: what they are made of is kept up, also by a step that proposes none."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one row gave. `len(token_ids)` is 0 for a chunk that is not the last, else accepted drafts + 1."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For the prompt tokens `start + 1` to `start + num_tokens` that exist, when asked for."""
    error: str | None = None
    """The logits were not finite: this request cannot go on."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one plan, row by row in the plan's order."""

    step: int
    rows: list[RowResult]


class Pending(Protocol):
    """A plan that was launched."""

    @property
    def is_over(self) -> bool:
        """Whether the outcome was there when the launch returned, as on a CPU."""

    def result(self) -> Result:
        """Waits for the outcome. Called once, for each plan in the order of their launch."""
