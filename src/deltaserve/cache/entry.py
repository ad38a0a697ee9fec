"""A record of the prefix index; the index and the order of its snapshots read and write it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.core.plan import NO_SLOT


@dataclass(eq=False, slots=True)
class Entry:
    """One block of a prefix, with the state after its last token where that is kept."""

    key: bytes
    parent: Entry | None
    salt: bytes
    tokens: bytes
    block: int
    depth: int
    """Blocks from the start of the prefix, this one included."""
    slot: int = NO_SLOT
    children: dict[bytes, Entry] = field(default_factory=dict)
    """What continues it, by the next block's tokens."""
    used: int = 0
    """The index's clock at the last use."""
    alive: bool = True
    """Still in the index."""
    withdrawn: bool = False
    """Left the index because it is not to be trusted."""
