"""Reference-counted ids. Knows no tensor, no request and no hash: an id stands for a KV block, a slot or a seat."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class IdPool:
    """The ids 0 to size - 1, each free or held by at least one owner.

    One of an id's owners may be the prefix index, whose hold is marked (`cache`, `uncache`). An id that nobody else
    holds is *idle*: it is not free, but the index gives it up when asked.

    `on_free(id)` is called when an id's last owner lets go; tests poison the memory behind it there.
    """

    def __init__(self, size: int, on_free: Callable[[int], None] | None = None) -> None:
        assert size >= 0, f"a pool of {size} ids"
        self.size = size
        self.refs = [0] * size
        self.num_idle = 0
        self._cached = [False] * size
        self._free = list(range(size - 1, -1, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Ids that can be had, those included that the index must give up first."""
        return len(self._free) + self.num_idle

    @property
    def num_used(self) -> int:
        """Ids with an owner besides the index."""
        return self.size - self.num_available

    def take(self, n: int) -> list[int] | None:
        """`n` free ids, each with one owner, or None and nothing has changed."""
        assert n >= 0, f"takes {n} ids"
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for i in taken:
            self.refs[i] = 1
        return taken

    def share(self, i: int) -> None:
        """One more owner."""
        assert self.refs[i] > 0, f"id {i} is free and cannot be shared"
        if self._cached[i] and self.refs[i] == 1:
            self.num_idle -= 1
        self.refs[i] += 1

    def drop(self, i: int) -> None:
        """One owner less; the last one frees the id."""
        assert self.refs[i] > 0, f"id {i} is freed twice"
        self.refs[i] -= 1
        if self.refs[i] == 0:
            assert not self._cached[i], f"id {i} is dropped from under the index"
            self._free.append(i)
            if self._on_free is not None:
                self._on_free(i)
        elif self._cached[i] and self.refs[i] == 1:
            self.num_idle += 1

    def cache(self, i: int) -> None:
        """The index becomes an owner."""
        assert not self._cached[i], f"id {i} is cached twice"
        self.share(i)
        self._cached[i] = True

    def uncache(self, i: int) -> None:
        """The index lets go."""
        assert self._cached[i], f"id {i} is not cached"
        if self.is_idle(i):
            self.num_idle -= 1
        self._cached[i] = False
        self.drop(i)

    def is_idle(self, i: int) -> bool:
        """Only the index holds it."""
        return self._cached[i] and self.refs[i] == 1

    def check(self, name: str, owners: Iterable[int], cached: Iterable[int]) -> None:
        """Balance the ledger: `owners` names an id once for each owner besides the index, `cached` those of the index.

        Raises AssertionError naming the first ids that do not add up.
        """
        # Linear in the ids that somebody owns; of the free ones only whole lists are counted.
        expected: dict[int, int] = {}
        for i in owners:
            expected[i] = expected.get(i, 0) + 1
        marked: set[int] = set()
        for i in cached:
            assert i not in marked, f"{name} {i} stands in the index twice"
            marked.add(i)
            expected[i] = expected.get(i, 0) + 1
        refs = self.refs
        wrong = [(i, refs[i], count) for i, count in expected.items() if refs[i] != count]
        if refs.count(0) != self.size - len(expected):
            wrong += [(i, refs[i], 0) for i in range(self.size) if refs[i] and i not in expected]
        assert not wrong, f"{name}s (id, references, owners found) do not add up: {sorted(wrong)[:8]}"
        is_marked = all(self._cached[i] for i in marked) and self._cached.count(True) == len(marked)
        assert is_marked, f"{name}s marked as cached are not those of the index"
        free = set(self._free)
        is_free = len(free) == len(self._free) == self.size - len(expected) and free.isdisjoint(expected)
        assert is_free, f"the free list of {name}s is wrong"
        idle = sum(refs[i] == 1 for i in marked)
        assert idle == self.num_idle, f"{self.num_idle} idle {name}s counted, {idle} found"
