"""What one running request holds in the cache, and what one row of a step is given. The manager keeps the books."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from deltaserve.cache.prefix import Chain
from deltaserve.core.plan import NO_SLOT, Row


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one row of one step keeps its memory."""

    new_blocks: tuple[int, ...]
    """Behind the lease's other blocks."""
    read_slot: int
    """The state before the row's first token; NO_SLOT is the zero state."""
    write_slots: tuple[int, ...]
    """The state after each token; NO_SLOT is not kept."""
    ahead: int
    """Tokens behind the row's that have room already."""

    def fill(self, row: Row) -> Row:
        """The row, with its memory."""
        return msgspec.structs.replace(
            row, new_blocks=self.new_blocks, read_slot=self.read_slot, write_slots=self.write_slots
        )


@dataclass(eq=False, slots=True)
class Flight:
    """A row that is placed and not committed."""

    num_tokens: int
    first_kept: int
    """own[i] gets the state after token first_kept + i."""
    spares: list[tuple[int, int]] = field(default_factory=list)
    """(slot, boundary): slots that get the state at a boundary of the row, for the index. No other row writes them."""

    @property
    def is_certain(self) -> bool:
        """All its tokens will become the truth, so that a row can be placed behind it."""
        return self.first_kept == self.num_tokens - 1


@dataclass(eq=False, slots=True)
class Lease:
    """What one running request holds. Its owner reads `num_done`, `num_planned`, `in_flight` and `blocks`; the rest is
    the manager's."""

    chain: Chain
    blocks: list[int]
    own: list[int]
    """Slots that only this lease writes."""
    read: int
    """The state that the next row goes on from: that after the first `num_planned` tokens."""
    num_done: int
    """Tokens whose KV and state are in the cache."""
    num_planned: int
    """And those of the rows in flight."""
    known: int
    """Tokens the request came with."""
    shared: int = NO_SLOT
    """A slot of the index that the oldest row in flight, or the next one, reads; held until that is committed."""
    num_matched: int = 0
    """Tokens of the longest prefix whose blocks were found at admission, resumable or not."""
    flights: deque[Flight] = field(default_factory=deque)
    """The rows in flight, oldest first."""

    @property
    def in_flight(self) -> bool:
        return bool(self.flights)
