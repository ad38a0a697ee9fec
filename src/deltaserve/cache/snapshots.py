"""Which of the kept states goes first: what each saves, weighed against its room and against how long nobody used it.

Knows entries of the prefix index and their depth; no token, no request and no queue. A state saves the tokens between
it and the nearest kept state before it: whoever does not find it goes on from that one. When a state goes, those that
lean on it save more. All states take one slot, so their bytes are equal and do not show in the comparison.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deltaserve.cache.entry import Entry


def worth(num_saved: int, mark: int) -> int:
    """The state with the least goes first.

    num_saved: blocks that it saves.
    mark: what the last one that went was worth, when this one was last of use. So what is not used falls behind what
        comes and is used, the sooner the less it saves.
    """
    return mark + num_saved


@dataclass(eq=False, slots=True)
class Snapshot:
    """A kept state among the others."""

    entry: Entry
    before: Snapshot | None
    """The nearest kept state before it."""
    mark: int
    used: int
    """Its number in the order of last use; decides between equals."""
    behind: set[Snapshot] = field(default_factory=set)
    """Those whose `before` it is."""
    resumed: bool = False
    """Some request has gone on from it."""

    @property
    def num_saved(self) -> int:
        return self.entry.depth - (0 if self.before is None else self.before.entry.depth)

    @property
    def standing(self) -> tuple[int, int]:
        return worth(self.num_saved, self.mark), self.used


class Snapshots:
    """The kept states, and the order in which they go."""

    def __init__(self) -> None:
        self._all: dict[bytes, Snapshot] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        """Worth, last use and key. Items that have become untrue stay until they surface."""
        self._mark = self._clock = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, entry: Entry) -> bool:
        return entry.key in self._all

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first."""
        return (snapshot.entry for snapshot in self._all.values())

    def add(self, entry: Entry) -> None:
        """A state is kept at the end of `entry`."""
        before, place = None, entry.parent
        while place is not None and before is None:
            before, place = self._all.get(place.key), place.parent
        snapshot = self._all[entry.key] = Snapshot(entry, before, self._mark, self._clock)
        self._clock += 1
        if entry.children:  # otherwise nothing continues it
            others = self._all.values() if before is None else before.behind
            for other in [it for it in others if it.before is before and it is not snapshot]:
                if _leads_to(entry, other.entry):
                    self._lean(other, snapshot)
        if before is not None:
            before.behind.add(snapshot)
        self._push(snapshot)

    def use(self, entry: Entry) -> None:
        """A request goes on from it."""
        snapshot = self._all[entry.key]
        snapshot.mark, snapshot.used, snapshot.resumed = self._mark, self._clock, True
        self._clock += 1
        self._push(snapshot)

    def remove(self, entry: Entry) -> None:
        snapshot = self._all.pop(entry.key)
        if snapshot.before is not None:
            snapshot.before.behind.discard(snapshot)
        for other in list(snapshot.behind):
            self._lean(other, snapshot.before)

    def before(self, entry: Entry) -> Entry | None:
        """The nearest kept state before that of `entry`, if no request has gone on from it."""
        before = self._all[entry.key].before
        return None if before is None or before.resumed else before.entry

    def least(self, may_go: Callable[[Entry], bool]) -> Entry | None:
        """The state that is worth the least among those that may go; it is removed by the caller."""
        passed, found = [], None
        while self._heap and found is None:
            item = heapq.heappop(self._heap)
            snapshot = self._all.get(item[2])
            if snapshot is None or item[:2] != snapshot.standing:
                continue
            passed.append(item)
            if may_go(snapshot.entry):
                found = snapshot.entry
                self._mark = max(self._mark, item[0])
        for item in passed:
            heapq.heappush(self._heap, item)
        return found

    def check(self) -> None:
        """Raises AssertionError where what stands here contradicts itself."""
        offered = set(self._heap)
        for key, snapshot in self._all.items():
            assert (*snapshot.standing, key) in offered, "a state cannot be given up"
            before, place = None, snapshot.entry.parent
            while place is not None and before is None:
                before, place = self._all.get(place.key), place.parent
            assert snapshot.before is before, "a state leans on the wrong one"
            assert all(other.before is snapshot for other in snapshot.behind), "a state is leant on by the wrong ones"
            assert before is None or snapshot in before.behind, "a state is not known to the one it leans on"

    def _lean(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        if snapshot.before is not None:
            snapshot.before.behind.discard(snapshot)
        snapshot.before = before
        if before is not None:
            before.behind.add(snapshot)
        self._push(snapshot)

    def _push(self, snapshot: Snapshot) -> None:
        if len(self._heap) > 2 * len(self._all) + 64:
            self._heap = [(*s.standing, key) for key, s in self._all.items() if s is not snapshot]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (*snapshot.standing, snapshot.entry.key))


def _leads_to(entry: Entry, other: Entry) -> bool:
    """Whether `other` continues `entry`."""
    place: Entry | None = other
    while place is not None and place.depth > entry.depth:
        place = place.parent
    return place is entry
