"""Who gets how much of a step. Pure functions of integers: no queue, no memory, no tensor.

A step computes at most `max_num_batched_tokens` tokens. Requests that extend come first, with one token each and, when
there are any, drafts; what is left is shared among the prompts:

- The oldest prompt gets at least half, so it ends, and then the next one is the oldest: nobody starves.
- The other half goes to those with the least left to compute, so that a short prompt behind very long ones waits for a
  step or two and not for all of them.
- What they do not use goes to the oldest.

A request that extends has its token in every step, or in every second where prompts have steps of their own, and no
step is longer than the budget: a long prompt delays the others' next token by one chunk, never by itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers

from deltaserve.scheduler.sequence import Sequence


def proposed_drafts(sequence: Sequence) -> int:
    """How many drafts to verify in the sequence's next row: those that were proposed in its last one."""
    return sequence.num_proposed


def share_drafts(budget: int, wanted: Numbers[int], prompt_tokens: int) -> int:
    """Drafts that each extending request gets, the same number for all: rows of one length are computed alike. Those
    that want fewer verify some that nobody proposed.

    `prompt_tokens` wait to be prefilled: they have a claim to half the budget before any draft has.
    """
    if not wanted:
        return 0
    left = budget - len(wanted) - min(prompt_tokens, budget // 2)
    return max(min(max(wanted), left // len(wanted)), 0)


def share_prompts(budget: int, remaining: Numbers[int]) -> list[int]:
    """Tokens for each prompt, oldest first, of which `remaining` are still to be computed. 0: not in this step."""
    if not remaining or budget <= 0:
        return [0] * len(remaining)
    shares = [0] * len(remaining)
    shares[0] = min(remaining[0], (budget + 1) // 2)
    left = budget - shares[0]
    for i in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        shares[i] = min(remaining[i], left)
        left -= shares[i]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares


def cut_chunk(start: int, remaining: int, share: int, block_size: int) -> int:
    """Tokens of the next chunk: `share`, or fewer when that ends it on a block boundary and costs no further step.

    A chunk that ends on a boundary leaves a whole block and the state after it, which is what can be kept.
    """
    aligned = (start + share) // block_size * block_size - start
    if share == remaining or aligned <= 0:
        return share
    steps, steps_aligned = -(-remaining // share), 1 - (aligned - remaining) // share
    return aligned if steps == steps_aligned else share
