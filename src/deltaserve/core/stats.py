"""What the engine tells of itself at one moment. Numbers only; knows no exporter and no text."""

from __future__ import annotations

import msgspec


class CacheUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, counted as ids. What only the prefix index keeps is not in use: it goes when a request needs room."""

    blocks_used: int
    """KV blocks that requests hold."""
    blocks_cached: int
    """KV blocks that only the prefix index keeps."""
    blocks_total: int
    slots_used: int
    """State slots that requests hold."""
    slots_cached: int
    """State slots that only the prefix index keeps."""
    slots_total: int
    snapshots_kept: int = 0
    """Counter: states that the prefix index took."""
    snapshots_evicted: int = 0
    """Counter: those of them that it had to give up again."""
    snapshots_dropped: int = 0
    """Counter: states that it wanted while no slot could be had."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges are of now; counters run from the start."""

    running: int
    """Gauge: requests that hold a seat."""
    waiting: int
    """Gauge: requests that hold nothing yet, or nothing any more after a preemption."""
    cache: CacheUsage

    steps: int
    """Counter: plans made."""
    prefilled_tokens: int
    """Counter: tokens computed in prefill rows, those after a preemption included."""
    cached_tokens: int
    """Counter: prompt tokens that a prefix hit saved, once per request."""
    wanted_tokens: int = 0
    """Counter: prompt tokens in whole blocks that a hit could have saved, once per request."""
    lost_tokens: dict[str, int] = {}
    """Counter by reason, in tokens wanted and not saved: "not stored", "no state" there to resume from, "logprobs" of
    the prompt are asked for."""
    generated_tokens: int
    """Counter: tokens handed out; refused drafts and tokens behind a stop do not count."""
    draft_tokens: int
    """Counter: drafts that were verified."""
    accepted_tokens: int
    """Counter: drafts that were right."""
    drafted_at: dict[int, int] = {}
    """Counter by place in the chain, from 0: drafts that were verified."""
    accepted_at: dict[int, int] = {}
    """Counter by place in the chain, from 0: drafts that were right, as were all before them."""
    draft_alarm: bool = False
    """Gauge: of the last thousand drafts fewer than one in twenty was right."""
    tokens_a_step: dict[int, int] = {}
    """Counter by tokens, from 1: rows of requests past their prompt that gave so many."""
    preemptions: int
    """Counter: times a running request was sent back to wait."""
    finished: dict[str, int]
    """Counter by finish reason: "stop", "length", "error"."""
    aborts: dict[str, int]
    """Counter by reason, in the words of whoever aborted."""
