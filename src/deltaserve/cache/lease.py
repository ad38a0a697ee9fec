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
    later_slots: tuple[int, ...]
    """Behind a row whose end is open: that state if the row starts one token later, two ..."""
    write_slots: tuple[int, ...]
    """The state after each token; NO_SLOT is not kept."""
    ahead: int
    """Tokens behind the row's that have room already."""

    def fill(self, row: Row) -> Row:
        """The row, with its memory."""
        return msgspec.structs.replace(
            row,
            new_blocks=self.new_blocks,
            read_slot=self.read_slot,
            later_slots=self.later_slots,
            write_slots=self.write_slots,
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
    def num_certain(self) -> int:
        """Tokens that will become the truth whatever comes."""
        return self.first_kept + 1

    @property
    def num_open(self) -> int:
        """How many more may."""
        return self.num_tokens - self.num_certain


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
    """And those of the rows in flight that are certain."""
    known: int
    """Tokens the request came with."""
    shared: int = NO_SLOT
    """A slot of the index that the oldest row in flight, or the next one, reads; held until that is committed."""
    num_matched: int = 0
    """Tokens of the longest prefix whose blocks were found at admission, resumable or not."""
    flights: deque[Flight] = field(default_factory=deque)
    """The rows in flight, oldest first."""
    later: tuple[int, ...] = ()
    """Where the last row in flight has an open end: the states after one token more than `num_planned`, two ..."""

    @property
    def in_flight(self) -> bool:
        return bool(self.flights)

    @property
    def most_planned(self) -> int:
        """Tokens that `num_planned` may turn out to be."""
        return self.num_planned + sum(flight.num_open for flight in self.flights)
