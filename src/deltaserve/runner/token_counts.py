"""How often each token occurs in a sequence, for the requests that have penalties. Knows no seat and no logits.

Shape letters: P sequences counted, V vocabulary, N sequences looked at, J tokens added to each at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for it; on a CPU the tensor itself."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


class TokenCounts:
    """Rows of counts, handed out by number. Memory grows with the most rows in use at once: 5 bytes * V each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output_PV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt_PV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._output_PV) - len(self._free)

    def take(self, token_ids: Sequence[int], num_prompt: int) -> int:
        """Count a sequence whose first `num_prompt` tokens are the prompt. Returns its row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        device = self._output_PV.device
        tokens = send(
            torch.from_numpy(np.array(token_ids, dtype=np.int64)), device
        )  # at the speed of memory, if packed
        output = tokens[num_prompt:]
        self._prompt_PV[row].fill_(False).index_fill_(0, tokens[:num_prompt], True)
        self._output_PV[row].fill_(0)
        self._output_PV[row].index_add_(0, output, torch.ones(len(output), dtype=torch.int32, device=device))
        return row

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"row {row} of the token counts is free already"
        self._free.append(row)

    def of(self, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """Copies: counts in the output [N, V] int32, presence in the prompt [N, V] bool."""
        return self._output_PV[row_N], self._prompt_PV[row_N]

    def add(self, row_N: Tensor, token_NJ: Tensor, num_N: Tensor) -> None:
        """The first `num_N` tokens of each row of `token_NJ` join the outputs."""
        is_new_NJ = torch.arange(token_NJ.shape[1], device=token_NJ.device) < num_N[:, None]
        rows_NJ = row_N[:, None].expand_as(token_NJ)
        self._output_PV.index_put_((rows_NJ, token_NJ), is_new_NJ.int(), accumulate=True)

    def _grow(self) -> None:
        had, vocab_size = self._output_PV.shape
        more = max(had, 1)
        self._output_PV = torch.cat([self._output_PV, self._output_PV.new_zeros(more, vocab_size)])
        self._prompt_PV = torch.cat([self._prompt_PV, self._prompt_PV.new_zeros(more, vocab_size)])
        self._free.extend(range(had, had + more))
