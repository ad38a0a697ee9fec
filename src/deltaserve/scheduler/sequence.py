"""One request on its way: its tokens so far, what it may still do, and when it ends. Knows no queue and no batch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import msgspec

from deltaserve.cache.lease import Lease
from deltaserve.core.plan import Row, RowResult, Seating
from deltaserve.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs

NO_SEAT = -1


@dataclass(frozen=True)
class Ending:
    """Why a sequence is over."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(eq=False)
class Sequence:
    """The state of one request.

    It waits (no lease, no seat) or runs (both). While it runs, tokens number 0 to `prompt_end - 1` are prefilled;
    behind them it extends, from a token that is sampled since it took its seat. That token may be in flight: a sequence
    is planned by its lease's `num_planned`, and `token_ids` are what was handed out.
    """

    request_id: str
    order: int
    """Of arrival. The smaller one goes first, always."""
    params: SamplingParams
    """As the runner gets them: the seed is set, `stop_token_ids` are all ids that end the sequence."""
    token_ids: array[int]
    """The prompt and all tokens that were handed out, of 64 bits."""
    num_prompt: int
    max_len: int
    """Prompt and output together never get longer."""
    salt: bytes = b""
    """Requests share prefixes only with those of the same salt."""
    lease: Lease | None = None
    seat: int = NO_SEAT
    prompt_end: int = 0
    num_cached: int | None = None
    """Prompt tokens that the first admission did not have to compute."""
    has_spoken: bool = False
    """Its first output is out."""
    num_proposed: int = 0
    """Drafts that its seat holds behind its last token."""
    _prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _stop_ids: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        request: Request,
        order: int,
        stop_ids: Tokens[int],
        seed: int,
        max_len: int,
        token_ids: array[int] | None = None,
    ) -> Sequence:
        """`seed` counts when the request brings none; `max_len` is the longest a sequence may get; `token_ids` are the
        prompt's, if they are packed already."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        stop_ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)})
        return cls(
            request_id=request.request_id,
            order=order,
            params=msgspec.structs.replace(
                params, seed=seed if params.seed is None else params.seed, stop_token_ids=tuple(stop_ids)
            ),
            token_ids=array("q", request.prompt_token_ids if token_ids is None else token_ids),
            num_prompt=num_prompt,
            max_len=max_len if params.max_tokens is None else min(max_len, num_prompt + params.max_tokens),
            salt=_salt(request.cache_salt),
            _stop_ids=frozenset(stop_ids),
        )

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_planned(self) -> int:
        """Tokens that are in the cache or in flight to it."""
        return 0 if self.lease is None else self.lease.num_planned

    @property
    def num_expected(self) -> int:
        """Tokens it will have when all that is in flight has arrived, if none of them ends it."""
        return max(len(self.token_ids), self.num_planned + 1)

    @property
    def is_extending(self) -> bool:
        """Its next row starts at a token that is sampled since it took its seat."""
        return self.lease is not None and self.lease.num_planned >= self.prompt_end

    @property
    def is_ending(self) -> bool:
        """Its last row is in flight: whatever token that gives, none may follow."""
        return self.is_extending and self.num_expected >= self.max_len

    @property
    def is_unpublished(self) -> bool:
        """Some of its prompt is not in the cache yet."""
        return self.lease is not None and self.lease.num_done < self.prompt_end

    @property
    def num_to_prefill(self) -> int:
        """Tokens to plan before it extends."""
        return len(self.token_ids) if self.lease is None else self.prompt_end - self.lease.num_planned

    @property
    def needs_whole_prompt(self) -> bool:
        """Logprobs of the prompt are owed: they cost every prompt token, cached or not."""
        return self.params.prompt_logprobs is not None and not self.has_spoken

    def follows(self, leader: Sequence, block_size: int) -> bool:
        """Whether the prompt that `leader` computes will leave a state that this sequence can resume from.

        It is kept after the leader's last whole block that leaves a token to compute.
        """
        length = (len(leader.token_ids) - 1) // block_size * block_size
        return (
            0 < length < len(self.token_ids)
            and self.salt == leader.salt
            and not self.needs_whole_prompt
            and self.token_ids[:block_size] == leader.token_ids[:block_size]
            and self.token_ids[:length] == leader.token_ids[:length]
        )

    @property
    def wants_output(self) -> bool:
        return self.max_len > self.num_prompt

    # ---- to the seat and back --------------------------------------------------------------------------------------

    def sit(self, lease: Lease, seat: int) -> None:
        assert self.lease is None, f"{self.request_id} takes a second seat"
        self.lease, self.seat = lease, seat
        self.prompt_end = len(self.token_ids)
        self.num_proposed = 0
        self._prompt_logprobs = [None]
        if self.num_cached is None:
            self.num_cached = lease.num_done

    def stand(self) -> tuple[Lease, int]:
        """Leave the seat. Logprobs of a prompt that is not yet whole are computed again by whoever sits down anew."""
        assert self.lease is not None, f"{self.request_id} has no seat"
        lease, seat = self.lease, self.seat
        self.lease, self.seat = None, NO_SEAT
        return lease, seat

    def seating(self) -> Seating:
        """What the runner must know. Call it before the first row is placed."""
        assert self.lease is not None, f"{self.request_id} has no seat"
        params = self.params
        if params.prompt_logprobs is not None and not self.needs_whole_prompt:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return Seating(
            seat=self.seat,
            token_ids=self.token_ids.tobytes(),
            num_prompt=self.num_prompt,
            params=params,
            blocks=tuple(self.lease.blocks),
        )

    # ---- results ---------------------------------------------------------------------------------------------------

    def take(self, row: Row, result: RowResult) -> tuple[Output | None, int]:
        """The outcome of a row: what to hand out, if anything, and how many of the row's tokens became the truth.

        Tokens go out one by one; those behind one that ends the sequence are dropped, and so are their logprobs.
        """
        if self.needs_whole_prompt and result.prompt_logprobs is not None:
            self._prompt_logprobs += result.prompt_logprobs
        given, most = len(result.token_ids), 1 + row.num_drafts if row.samples else 0
        least = min(most, 1) if result.error is None else 0
        assert least <= given <= most, f"a row gives {given} tokens, not {least} to {most}"
        ending, num_new = None, 0
        while ending is None and num_new < given:
            ending = self._append(result.token_ids[num_new])
            num_new += 1
        if ending is None and result.error is not None:
            ending = Ending("error")
        elif not self.wants_output and row.start + row.num_tokens == self.num_prompt:
            ending = Ending("length")
        kept = row.num_tokens - row.num_drafts + max(num_new - 1, 0)
        if not num_new and ending is None:
            return None, kept
        return self._speak(num_new, result, ending), kept

    def _append(self, token_id: int) -> Ending | None:
        self.token_ids.append(token_id)
        if token_id in self._stop_ids and self.num_output > self.params.min_tokens:
            return Ending("stop", token_id)
        return Ending("length") if len(self.token_ids) >= self.max_len else None

    def _speak(self, num_new: int, result: RowResult, ending: Ending | None) -> Output:
        output = Output(request_id=self.request_id, token_ids=self.token_ids[len(self.token_ids) - num_new :].tolist())
        if result.logprobs is not None:
            output.logprobs = result.logprobs[:num_new]
        if not self.has_spoken:
            output.num_cached_tokens = self.num_cached or 0
            if self.needs_whole_prompt and (ending is None or ending.reason != "error"):
                count = len(self._prompt_logprobs)
                assert count == self.num_prompt, f"{count} prompt logprobs of {self.num_prompt} tokens"
                output.prompt_logprobs = self._prompt_logprobs
        self.has_spoken = True
        if ending is not None:
            output.finish_reason, output.stop_token_id = ending.reason, ending.stop_token_id
            output.error = result.error if ending.reason == "error" else None
        return output


def _salt(words: str | None) -> bytes:
    """Of one length, so that it never looks like the start of a prompt."""
    return b"" if words is None else hashlib.blake2b(words.encode(), digest_size=16).digest()
