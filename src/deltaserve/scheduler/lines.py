"""The waiting and the running line, and the seats between them. Knows the order of arrival; no memory and no budget."""

from __future__ import annotations

from bisect import insort

from deltaserve.cache.lease import Lease
from deltaserve.cache.pool import IdPool
from deltaserve.scheduler.sequence import Sequence


def _order(sequence: Sequence) -> int:
    return sequence.order


class Lines:
    """Every request stands in exactly one line, each line in the order of arrival."""

    def __init__(self, num_seats: int) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._seats = IdPool(num_seats)

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    @property
    def candidates(self) -> list[Sequence]:
        """Those that wait and for which there is a seat: as many from the head as seats are free, so that one who is
        passed over never finds its seat taken."""
        return self.waiting[: self._seats.num_free]

    @property
    def extending(self) -> list[Sequence]:
        """Running requests whose prompt is planned, and for which there may be another row."""
        return [s for s in self.running if s.is_extending and not s.is_ending]

    @property
    def prefilling(self) -> list[Sequence]:
        """Running requests of whose prompt some is not planned."""
        return [s for s in self.running if not s.is_extending]

    def join(self, sequence: Sequence) -> None:
        """A new request waits, behind all others."""
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} joins twice"
        self._sequences[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_order)

    def sit(self, sequence: Sequence, lease: Lease) -> None:
        """From waiting to running."""
        seat = self._seats.take(1)
        assert seat is not None, f"{sequence.request_id} finds no seat"
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        sequence.sit(lease, seat[0])

    def stand(self, sequence: Sequence) -> Lease:
        """From running back to waiting, to the old place. Gives the lease, which the caller releases."""
        lease = self._free(sequence)
        insort(self.waiting, sequence, key=_order)
        return lease

    def leave(self, sequence: Sequence) -> Lease | None:
        """Out of both lines. Gives the lease, if there is one, which the caller releases."""
        del self._sequences[sequence.request_id]
        if sequence.lease is not None:
            return self._free(sequence)
        self.waiting.remove(sequence)
        return None

    def check(self) -> list[Lease]:
        """The leases of those who run. Raises AssertionError where lines and seats do not add up."""
        everybody = sorted([*self.waiting, *self.running], key=_order)
        assert everybody == list(self._sequences.values()), "the two lines do not hold every request once"
        for line in (self.waiting, self.running):
            assert line == sorted(line, key=_order), "a line is not in the order of arrival"
        assert all(s.lease is None for s in self.waiting), "a waiting request holds a lease"
        leases = [s.lease for s in self.running if s.lease is not None]
        assert len(leases) == len(self.running), "a running request holds no lease"
        self._seats.check("seat", [s.seat for s in self.running], [])
        return leases

    def _free(self, sequence: Sequence) -> Lease:
        lease, seat = sequence.stand()
        self._seats.drop(seat)
        self.running.remove(sequence)
        return lease
