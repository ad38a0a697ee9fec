"""What the scheduler counts, as `Stats` names it. Knows no queue and no memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.core.stats import CacheUsage, Stats


def _count(counter: dict[str, int], key: str, number: int = 1) -> None:
    counter[key] = counter.get(key, 0) + number


@dataclass
class Counters:
    """All run from the start."""

    steps: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    wanted_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    drafted_at: dict[int, int] = field(default_factory=dict)
    accepted_at: dict[int, int] = field(default_factory=dict)
    tokens_a_step: dict[int, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)
    lost_tokens: dict[str, int] = field(default_factory=dict)

    def finish(self, reason: str) -> None:
        _count(self.finished, reason)

    def abort(self, reason: str) -> None:
        """A stop string that was found in the text counts as finished."""
        _count(self.finished if reason == "stop" else self.aborts, reason)

    def hit(self, wanted: int, saved: int, lost: dict[str, int]) -> None:
        """Tokens that a first admission wanted from the index and got, and the others by reason."""
        self.wanted_tokens += wanted
        self.cached_tokens += saved
        for reason, number in lost.items():
            if number:
                _count(self.lost_tokens, reason, number)

    def drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Of one row that extends. A row that failed accepts none."""
        for counter, number in ((self.drafted_at, num_drafts), (self.accepted_at, num_accepted)):
            for place in range(number):
                counter[place] = counter.get(place, 0) + 1
        self.tokens_a_step[1 + num_accepted] = self.tokens_a_step.get(1 + num_accepted, 0) + 1

    def stats(self, running: int, waiting: int, cache: CacheUsage, draft_alarm: bool = False) -> Stats:
        return Stats(
            running=running,
            waiting=waiting,
            cache=cache,
            draft_alarm=draft_alarm,
            steps=self.steps,
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=self.cached_tokens,
            wanted_tokens=self.wanted_tokens,
            lost_tokens=dict(self.lost_tokens),
            generated_tokens=self.generated_tokens,
            draft_tokens=sum(self.drafted_at.values()),
            accepted_tokens=sum(self.accepted_at.values()),
            drafted_at=dict(self.drafted_at),
            accepted_at=dict(self.accepted_at),
            tokens_a_step=dict(self.tokens_a_step),
            preemptions=self.preemptions,
            finished=dict(self.finished),
            aborts=dict(self.aborts),
        )
