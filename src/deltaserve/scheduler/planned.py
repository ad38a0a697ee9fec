"""A row of a step that was planned, until its outcome is taken."""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.cache.lease import Lease
from deltaserve.core.plan import Row
from deltaserve.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Planned:
    """A row in flight, with the lease it was planned with."""

    sequence: Sequence
    lease: Lease
    row: Row
    extends: bool
    num_real: int = 0
    """Drafts of the row that were proposed. Behind them stand such as make the row as long as its mates."""

    @property
    def is_live(self) -> bool:
        """Its request has neither ended nor been sent back since."""
        return self.sequence.lease is self.lease
