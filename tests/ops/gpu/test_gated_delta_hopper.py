"""The pass over chunks by warps with roles on a GPU, against float64 and against the pass of other GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from deltaserve.ops.gated_delta import triton_chunk
from deltaserve.ops.gpu import properties
from tests.ops.gated_delta_nets import Net, Shape, check, chunk_rows

BIG = Shape(16, 2, 128, 128)
ROWS = [
    ([63], [0]),
    ([65], [64]),
    ([5], [61]),  # begins inside a block, as do some of all that follow, at odd tokens of steps of any length
    ([4001, 3], [35, 0]),
    ([1, 63, 64, 65, 200, 301], [3, 1, 64, 70, 0, 127]),
    ([2, 1, 1, 130, 7, 90, 61], [62, 63, 0, 33, 1, 66, 130]),
    ([31 + 19 * row for row in range(16)], [41 * row for row in range(16)]),
]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "starts"), ROWS, ids=str)
def test_rows_that_begin_anywhere(
    lengths: Sequence[int], starts: Sequence[int], state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not properties(torch.device("cuda", 0)).is_hopper:
        pytest.skip("the kernel is for Hopper")
    net = Net.random(BIG, chunk_rows(lengths, starts), torch.bfloat16, state_dtype, "cuda")
    before, other = net.copy("cuda"), net.copy("cuda")
    out = net.run()
    monkeypatch.setattr(triton_chunk, "HOPPER", None)
    torch.testing.assert_close(out, other.run(), rtol=0, atol=0)
    written = net.rows.written
    torch.testing.assert_close(net.state_pool[written], other.state_pool[written], rtol=0, atol=0)
    check(net, out, before, 1e-2, 1e-2)
