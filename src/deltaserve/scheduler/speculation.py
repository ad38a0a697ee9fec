"""How many drafts are worth their step: follows what was accepted lately. Knows no request, no clock and no tensor.

A step costs, in units of a plain step of one request, `fixed + per_token * tokens` and what its experts take; having
drafts costs `drafting`, and each draft of a batch `per_draft` and `per_drafted_token` for each request. With acceptance
a_j of draft j where all before it were accepted, a request gets 1 + a_1 + a_1 a_2 + ... tokens. The number of drafts
with the most tokens for its cost is taken.

The costs are numbers given at start, not times taken meanwhile: equal histories give equal plans. Where hardly any
draft is right for long, a warning says so once, and `alarm` stays until that changes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

WINDOW = 64.0
"""Verified drafts that count, of each place: older ones fade."""
PRIOR = 4.0
"""Weight of the guess that the acceptance of a place begins with."""
FIRST_GUESS = 0.7
ALARM_DRAFTS = 1000
ALARM_SHARE = 0.05
"""Where fewer of so many drafts are right, something is wrong with the layer that makes them."""
PROBE_EVERY = 256
"""Steps without drafts after which some are tried again ..."""
PROBE_STEPS = 8
"""... for so many steps, which cost a few hundredths of the steps between at most."""


@dataclass(frozen=True)
class StepCost:
    """The defaults are those of the built-in model on two CPU cores; `docs/LOG.md` tells how they were measured."""

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


@dataclass
class Speculation:
    """Chooses the drafts of each step, from 0 to `max_drafts`."""

    max_drafts: int
    cost: StepCost = field(default_factory=StepCost)
    adaptive: bool = True
    """False: always the most, for tests and benchmarks."""
    _drafted: list[float] = field(default_factory=list)
    _accepted: list[float] = field(default_factory=list)
    alarm: bool = False
    """Of the last ALARM_DRAFTS drafts hardly any was right."""
    _counted: int = 0
    _right: int = 0
    _idle: int = 0
    """Steps since the last draft."""
    _probe: int = 0
    """Steps of a probe that are left."""

    def __post_init__(self) -> None:
        self._drafted = [PRIOR] * self.max_drafts
        self._accepted = [PRIOR * FIRST_GUESS] * self.max_drafts

    def acceptance(self, place: int) -> float:
        """Of the draft at `place`, from 0, where all before it were accepted."""
        return self._accepted[place] / self._drafted[place]

    def choose(self, num_rows: int) -> int:
        """Drafts to propose for each of `num_rows` requests. Called once a step."""
        if not self.adaptive or not self.max_drafts or not num_rows:
            return self.max_drafts
        best = self._best(num_rows)
        if best:
            self._idle = self._probe = 0
            return best
        if self._probe:
            self._probe -= 1
            return 1
        self._idle += 1
        if self._idle >= PROBE_EVERY:
            self._idle, self._probe = 0, PROBE_STEPS - 1
            self._forget(PRIOR)
            return 1
        return 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One request's step: so many drafts, of which the first so many were right."""
        self._watch(num_drafts, num_accepted)
        for place in range(min(num_accepted + 1, num_drafts, self.max_drafts)):
            keep = min(1.0, WINDOW / (self._drafted[place] + 1))
            self._drafted[place] = (self._drafted[place] + 1) * keep
            self._accepted[place] = (self._accepted[place] + (place < num_accepted)) * keep

    def _watch(self, num_drafts: int, num_accepted: int) -> None:
        self._counted += num_drafts
        self._right += num_accepted
        if self._counted < ALARM_DRAFTS:
            return
        before, self.alarm = self.alarm, self._right < ALARM_SHARE * self._counted
        if self.alarm and not before:
            logger.warning(
                "of the last %d drafts %d were right: the MTP layer's weights look wrong, or belong to another model; "
                "check that mtp.* comes from this checkpoint, or start with --speculative-tokens 0",
                self._counted,
                self._right,
            )
        self._counted = self._right = 0

    def _best(self, num_rows: int) -> int:
        best, best_rate = 0, num_rows / self.cost.of(num_rows, 0)
        tokens, chance = 1.0, 1.0
        for number in range(1, self.max_drafts + 1):
            chance *= self.acceptance(number - 1)
            tokens += chance
            rate = num_rows * tokens / self.cost.of(num_rows, number)
            if rate > best_rate:
                best, best_rate = number, rate
        return best

    def _forget(self, weight: float) -> None:
        """Let what is about to be seen outweigh what was seen before."""
        for place, drafted in enumerate(self._drafted):
            scale = min(1.0, weight / drafted)
            self._drafted[place] *= scale
            self._accepted[place] *= scale
