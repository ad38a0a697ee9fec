"""What steps cost: a guess from their sizes, corrected by times that they took. Knows no clock: it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTH = 16
"""Steps that a mean follows, about."""
SURE = 4
"""Of so many times the least counts, for stalls are all on one side. Behind them a time counts as half of what was
expected at least, and twice of it at most."""


@dataclass(frozen=True)
class StepCost:
    """The guess, in units of a plain step of one request: `fixed + per_token * tokens` and what its experts take, and
    `several` for more than one token; each draft of a batch costs `per_draft` and `per_drafted_token` for each request.

    The defaults are those of the built-in model on two CPU cores; `docs/LOG.md` tells how they were measured.
    """

    fixed: float = 0.95
    per_token: float = 0.05
    per_draft: float = 0.3
    per_drafted_token: float = 0.02
    experts: float = 0.0
    """Reading all experts' weights, of which each token asks for `per_expert` and those of a step share what they read.
    """
    per_expert: float = 0.0
    several: float = 0.0
    """Having more than one token: kernels for one are left."""

    def of(self, num_rows: int, num_drafts: int) -> float:
        """A step that verifies and proposes so many drafts for each of its rows."""
        tokens = num_rows * (1 + num_drafts)
        step = self.fixed + self.per_token * tokens + self.experts * (1 - (1 - self.per_expert) ** tokens)
        step += self.several if tokens > 1 else 0.0
        return step + num_drafts * (self.per_draft + self.per_drafted_token * num_rows)


GPU_COST = StepCost(0.8, 0.0186, 0.153, 0.0, experts=8.96, per_expert=10 / 512, several=0.474)
"""Of the 80B model in FP8 on one H200, where a plain step of one request takes 2.09 ms: a fit to the steps of 1, 8, 32
and 128 requests with up to three drafts in `docs/LOG.md`, within 6 % of each and, beside the same requests' without
drafts, 8 %; plain steps of 2 and 256 requests are 13 and 9 % off."""


def size_of(num_rows: int) -> int:
    """Batches of one size are taken for alike: those up to the next power of two."""
    return num_rows.bit_length()


@dataclass
class _Ratio:
    """Of times to guesses, smoothed."""

    mean: float = 0.0
    count: int = 0

    def add(self, ratio: float) -> None:
        self.count = min(self.count + 1, SMOOTH)
        if self.count <= SURE:
            self.mean = ratio if self.count == 1 else min(self.mean, ratio)
        else:
            self.mean += (min(max(ratio, self.mean / 2), self.mean * 2) - self.mean) / self.count


@dataclass
class Costs:
    """Comparable among numbers of drafts for the same requests, and only so: of sizes that were never timed only the
    guess is known, in the unit of the nearest that were."""

    guess: StepCost
    _ratios: dict[int, dict[int, _Ratio]] = field(default_factory=dict)
    """By size and the number of drafts."""

    def of(self, num_rows: int, num_drafts: int) -> float:
        """A step that verifies and proposes so many drafts for each of its rows."""
        return self.guess.of(num_rows, num_drafts) * self._ratio(size_of(num_rows), num_drafts)

    def took(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Such a step, behind another such step, took so long."""
        like = self._ratios.setdefault(size_of(num_rows), {})
        like.setdefault(num_drafts, _Ratio()).add(seconds / self.guess.of(num_rows, num_drafts))

    def _ratio(self, size: int, num_drafts: int) -> float:
        if not self._ratios:
            return 1.0
        like = self._ratios.get(size)
        if like is None:
            like = self._ratios[min(self._ratios, key=lambda other: (abs(other - size), other))]
        ratio = like.get(num_drafts)
        if ratio is None:
            ratio = like[min(like, key=lambda other: (abs(other - num_drafts), other))]
        return ratio.mean
