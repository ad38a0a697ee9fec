"""What steps cost: a guess from their sizes, corrected by times that they took. Knows no clock: it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTH = 16
"""Steps that a mean follows, about."""
SURE = 4
"""From so many on, a time counts as at least half of what was expected. Before, one that is less says that those before
it were stalls, and they are forgotten; for stalls are all on one side. At most twice of it counts always."""


@dataclass(frozen=True)
class StepCost:
    """The guess, in units of a plain step of one request: `fixed + per_token * tokens` and what its experts take;
    having drafts costs `drafting`, and each draft of a batch `per_draft` and `per_drafted_token` for each request.

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
    drafting: float = 0.0
    """Having any drafts at all."""

    def of(self, num_rows: int, num_drafts: int) -> float:
        """A step that verifies and proposes so many drafts for each of its rows."""
        tokens = num_rows * (1 + num_drafts)
        step = self.fixed + self.per_token * tokens + self.experts * (1 - (1 - self.per_expert) ** tokens)
        drafting = self.drafting if num_drafts else 0.0
        return step + drafting + num_drafts * (self.per_draft + self.per_drafted_token * num_rows)


GPU_COST = StepCost(0.85, 0.0125, 0.08, 0.0, experts=9.8, per_expert=10 / 512, drafting=0.46)
"""Of the 80B model in FP8 on one H200, where a plain step of one request takes 2.17 ms: a fit to the steps of 1 to 128
requests and of 1 and 8 with up to three drafts in `docs/LOG.md`, within a sixth of each."""


def size_of(num_rows: int) -> int:
    """Batches of one size are taken for alike: those up to the next power of two."""
    return num_rows.bit_length()


@dataclass
class _Ratio:
    """Of times to guesses, smoothed."""

    mean: float = 0.0
    count: int = 0

    def add(self, ratio: float) -> None:
        if self.count >= SURE:
            ratio = max(ratio, self.mean / 2)
        elif ratio < self.mean / 2:
            self.count = 0
        if self.count:
            ratio = min(ratio, self.mean * 2)
        self.count = min(self.count + 1, SMOOTH)
        self.mean += (ratio - self.mean) / self.count


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
