"""How varied the worded sums are: ``python -m training.data.diversity [SUMS] [SEED]``.

Prints the number of distinct skeletons (questions without numbers, names and things) among drawn sums, and how much of
the hand-written development set is in their words: the share of its runs of three and of four words that occur in a
drawn sum, and the share of its sums of which at least half the runs of four do.  The test set is not read.
"""

import random
import re
import sys
from collections.abc import Iterable
from functools import cache

from training.data.cast import plural, words
from training.data.heldout import written_by_hand
from training.data.problems import problem
from training.data.sums import TEENS, TENS, WORDS

NUMBERS = frozenset(WORDS + TEENS + TENS)
NAMES = ("girls", "boys", "surnames", "cities")
THINGS = ("things", "foods", "goods", "trades", "places", "colors", "groups", "boxes")


@cache
def masks() -> dict[str, str]:
    """What stands for a name and for a thing of the word lists."""
    out = {form: "*" for name in THINGS for word in words(name) for form in (word, plural(word))}
    return out | {word.lower(): "@" for name in NAMES for word in words(name)} | dict.fromkeys(NUMBERS, "#")


def skeleton(text: str) -> list[str]:
    """The words in lower case, with ``#``, ``@`` and ``*`` for numbers, names and things; marks are words too."""
    out = []
    for token in re.findall(r"[A-Za-z']+|\d+|[.?!,;:]", text):
        word = token.lower()
        out.append("#" if token.isdigit() else masks().get(word.removesuffix("'s"), word))
    return out


def runs(tokens: list[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]


def covered(written: list[list[str]], drawn: Iterable[list[str]]) -> tuple[float, float, float]:
    """Shares of the runs of 3 and 4 words of `written` in `drawn`, and of texts half covered by runs of 4."""
    wanted = {length: {run for text in written for run in runs(text, length)} for length in (3, 4)}
    found: dict[int, set[tuple[str, ...]]] = {3: set(), 4: set()}
    for text in drawn:
        for length in (3, 4):
            found[length].update(wanted[length].intersection(runs(text, length)))
    all_runs = {n: [r for text in written for r in runs(text, n)] for n in found}
    share = {n: sum(r in found[n] for r in all_runs[n]) / len(all_runs[n]) for n in found}
    half = sum(2 * sum(r in found[4] for r in runs(t, 4)) >= len(runs(t, 4)) for t in written) / len(written)
    return share[3], share[4], half


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    drawn = [skeleton(problem(rng).question) for _ in range(count)]
    distinct = len({" ".join(text) for text in drawn})
    print(
        f"{count} sums, {distinct} distinct skeletons, {len({r for t in drawn for r in runs(t, 4)})} runs of four words"
    )
    three, four, half = covered([skeleton(row["question"]) for row in written_by_hand("hand_written_dev")], drawn)
    print(f"development set: {three:.1%} of runs of three, {four:.1%} of runs of four, {half:.1%} of sums half covered")


if __name__ == "__main__":
    main()
