"""How many drafts are worth their step: follows what was accepted lately, and what steps took. Knows no request, no
clock and no tensor.

With acceptance a_j of draft j where all before it were accepted, a request gets 1 + a_1 + a_1 a_2 + ... tokens of a
step. The number of drafts with the most tokens for its cost is taken (`costs.py`). What is not taken is not observed:
so now and then a few steps try another number, as seldom as keeps what that can lose to a hundredth of the time.

Where hardly any draft is right for long, a warning says so once, and `alarm` stays until that changes.
"""

from __future__ import annotations

import logging
import math

from deltaserve.scheduler.costs import Costs, StepCost, size_of

logger = logging.getLogger(__name__)

WINDOW = 128.0
"""Verified drafts that count, of each place: older ones fade."""
PRIOR = 4.0
"""Weight of the guess that the acceptance of a place begins with."""
FIRST_GUESS = 0.7
LAYER_SHARE = 0.02
"""Of a step without drafts, what the layer takes if it is kept up: it is one of some fifty."""
MARGIN = 1.01
"""By so much another number must be better to be taken instead of the one before."""
ALARM_DRAFTS = 1000
ALARM_SHARE = 0.05
"""Where fewer of so many drafts are right, something is wrong with the layer that makes them."""
PROBE_STEPS = 4
"""Of a try."""
AFRESH = 2.0
"""Weight of what was known of a place when a try of it begins."""
PROBE_SHARE = 0.01
"""Of the time, at most, lost by tries."""
FIRST_PATIENCE, MOST_PATIENCE = 1 / 8, 4
"""The first try comes so much sooner, as nothing is known yet; tries that change nothing become so much more seldom."""
MOST_WRONG = 4
"""By how much, at most, a guess is held to be too low when a try is put off."""


class Speculation:
    """Chooses the drafts of each step, from 0 to `max_drafts`."""

    def __init__(self, max_drafts: int, cost: StepCost | None = None, adaptive: bool = True) -> None:
        """`adaptive` False: always the most, for tests and benchmarks."""
        self.max_drafts, self.adaptive = max_drafts, adaptive
        self.costs = Costs(cost or StepCost())
        self.alarm = False
        """Of the last ALARM_DRAFTS drafts hardly any was right."""
        self._drafted = [PRIOR] * max_drafts
        self._accepted = [PRIOR * FIRST_GUESS] * max_drafts
        self._counted = self._right = 0
        self._taken = 0
        """The number that is taken but for tries."""
        self._tried, self._tries_left = 0, 0
        self._num_tries = 0
        self._since = 0
        """Steps since the last try."""
        self._patience: float = FIRST_PATIENCE
        self._sizes: set[int] = set()
        """Of batches that there were."""

    def acceptance(self, place: int) -> float:
        """Of the draft at `place`, from 0, where all before it were accepted."""
        return self._accepted[place] / self._drafted[place]

    @property
    def keeps_up(self) -> bool:
        """Whether a step that proposes nothing only tries that, and what drafts are made of is kept up."""
        return self._taken > 0

    def choose(self, num_rows: int) -> int:
        """Drafts to propose for each of `num_rows` requests. Called once a step."""
        if not self.adaptive or not self.max_drafts or not num_rows:
            return self.max_drafts
        if self._tries_left:
            self._tries_left -= 1
            return self._tried
        size = size_of(num_rows)
        if size not in self._sizes:  # what all else is compared with comes first
            self._sizes.add(size)
            self._tried, self._tries_left = 0, PROBE_STEPS - 1
            return 0
        best = self._best(num_rows)
        if best != self._taken:
            self._taken, self._patience = best, min(self._patience, 1)
        self._since += 1
        number = self._next_try()
        if self._since >= self._wait(num_rows, number):
            self._begin_try(number)
            return number
        return best

    def took(self, num_rows: int, num_drafts: int, kept_up: bool, seconds: float) -> None:
        """A step that verified and proposed so many drafts for each of its requests, behind another such step."""
        share = LAYER_SHARE if kept_up and not num_drafts else 0.0
        self.costs.took(num_rows, num_drafts, seconds * (1 - share))

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

    def _tokens(self) -> list[float]:
        """Of a step of a request, by the number of drafts."""
        tokens, chance = [1.0], 1.0
        for place in range(self.max_drafts):
            chance *= self.acceptance(place)
            tokens.append(tokens[-1] + chance)
        return tokens

    def _best(self, num_rows: int) -> int:
        rates = [tokens / self.costs.of(num_rows, number) for number, tokens in enumerate(self._tokens())]
        best = max(range(len(rates)), key=lambda number: (rates[number], -number))
        return best if rates[best] > MARGIN * rates[self._taken] else self._taken

    # ---- tries of other numbers ------------------------------------------------------------------------------------

    def _next_try(self) -> int:
        """In turn: one more, one less, none."""
        near = [n for n in (self._taken + 1, self._taken - 1) if 0 <= n <= self.max_drafts]
        others = near if self._taken <= 1 else [*near, 0]
        return others[self._num_tries % len(others)]

    def _wait(self, num_rows: int, number: int) -> float:
        """Steps before a try of `number`, if drafts at places that are not observed now are all wrong."""
        tokens, guess = self._tokens(), self.costs.guess
        dear = self.costs.of(num_rows, number) / self.costs.of(num_rows, self._taken)
        # A number that was timed once may have met a stall.
        dear = min(dear, MOST_WRONG * guess.of(num_rows, number) / guess.of(num_rows, self._taken))
        gained = tokens[min(number, self._taken)] / tokens[self._taken]
        lost = max(dear - gained, 0.0)
        return max(math.ceil(PROBE_STEPS * lost / PROBE_SHARE) * self._patience, 4 * PROBE_STEPS)

    def _begin_try(self, number: int) -> None:
        self._tried, self._tries_left, self._since = number, PROBE_STEPS - 1, 0
        self._num_tries += 1
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        for place in range(self._taken, number):
            self._forget(place)

    def _forget(self, place: int) -> None:
        """Let what is about to be seen outweigh what was seen before."""
        scale = min(1.0, AFRESH / self._drafted[place])
        self._drafted[place] *= scale
        self._accepted[place] *= scale
