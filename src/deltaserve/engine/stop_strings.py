"""Finds the first of many strings in a text that comes in pieces. Knows nothing of tokens.

The automaton of Aho and Corasick (1975): one step a character, whatever the number and length of the strings. Its state
is the longest end of the text that some string begins with, so it also says how much of the text must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """States are numbers, 0 the start. Read-only once built: any number of texts may use one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """Length of the end of the text that is the beginning of a string."""
        self.found = [0]
        """Length of the longest string that ends here, or 0."""
        for string in strings:
            self._insert(string)
        self._fall = [0] * len(self._next)
        """Where to go on when a character does not fit: the next shorter end that begins a string."""
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            after = self._next[state].get(char)
            if after is None:
                after = self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
            state = after
        self.found[state] = len(string)

    def _link(self) -> None:
        # By growing depth, so that what a state falls to is linked already.
        level = list(self._next[0].values())
        while level:
            below = []
            for state in level:
                self.found[state] = self.found[state] or self.found[self._fall[state]]
                for char, after in self._next[state].items():
                    self._fall[after] = self.step(self._fall[state], char)
                    below.append(after)
            level = below
