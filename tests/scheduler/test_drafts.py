"""Drafts cost no request its seat: where memory is short they are cut."""

from __future__ import annotations

import pytest

from deltaserve.cache.lease import Lease
from deltaserve.scheduler import policy
from deltaserve.scheduler.sequence import Sequence
from deltaserve.scheduler.speculation import Speculation
from tests.scheduler.rig import Rig


class Grudging(Rig):
    """Whenever somebody is sent back, no block of anybody is held for drafts alone."""

    def __init__(self, k: int, num_blocks: int, block_size: int, num_seqs: int = 4, overlap: bool = False) -> None:
        super().__init__(
            num_blocks=num_blocks,
            num_slots=num_seqs * (1 + k),
            block_size=block_size,
            max_num_seqs=num_seqs,
            max_drafts=k,
            right_drafts=lambda _: 0,
            num_drafts_for=policy.proposed_drafts,
            speculation=Speculation(k, adaptive=False),
            overlap=overlap,
        )
        stand = self.scheduler._lines.stand

        def checked(sequence: Sequence) -> Lease:
            for other in self.scheduler._lines.running:
                assert other.lease is not None
                held, needed = len(other.lease.blocks), -(-len(other.token_ids) // block_size)
                assert held <= needed, f"{other.request_id} holds {held - needed} blocks for drafts"
            return stand(sequence)

        self.scheduler._lines.stand = checked  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [4, 8])
def test_drafts_send_nobody_back(block_size: int, overlap: bool) -> None:
    """All drafts are wrong, so a request gains its tokens step by step with drafts and without."""
    sent_back = drafted = 0
    for num_blocks in range(36 // block_size, 100 // block_size):
        counts = []
        for k in (0, 3):
            rig = Grudging(k, num_blocks, block_size, overlap=overlap)
            for i in range(5):
                rig.add(range(3 + 2 * i), max_tokens=17 + i)
            rig.finish()
            counts.append(rig.scheduler.stats().preemptions)
            drafted += rig.scheduler.stats().draft_tokens
        assert counts[1] <= counts[0], f"{num_blocks} blocks"
        sent_back += counts[1]
    assert sent_back > 0
    assert drafted > 0


def test_the_last_free_block_is_left_to_the_youngest() -> None:
    """The older of two would draft over the end of its block while the younger needs a block for its next token."""
    rig = Grudging(3, num_blocks=4, block_size=8, num_seqs=2)
    rig.add(range(2), max_tokens=12)
    rig.add(range(13), max_tokens=5)
    rig.finish()
    assert rig.scheduler.stats().preemptions == 0
    assert rig.scheduler.stats().draft_tokens > 5
