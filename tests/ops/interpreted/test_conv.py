"""The kernels of the convolution, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.conv import triton_conv
from deltaserve.ops.conv.api import causal_conv
from deltaserve.ops.conv.chunks import CHUNK, chunk_table
from deltaserve.ops.layout import Layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("channels", [40, 256])
@pytest.mark.parametrize(
    ("lengths", "num_step"), [([1], 0), ([2, 1, 3], 0), ([63, 64, 65], 0), ([127, 128], 0), ([1, 1], 2), ([2, 2, 5], 2)]
)
def test_conv(lengths: list[int], num_step: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    """Any token may be kept, even in the slot that its row was read from."""
    tokens, slot = sum(lengths), iter(torch.randperm(3 * sum(lengths) + 3).tolist())
    x = torch.randn(tokens, channels + 8).to(dtype)[:, :channels]
    weight = torch.randn(taps, channels).to(dtype).t()
    pool = torch.full((3 * tokens + 4, taps - 1, channels), torch.nan, dtype=dtype)
    read = [next(slot) if row % 2 == 0 else -1 for row in range(len(lengths))]
    for index in read:
        if index >= 0:
            pool[index] = torch.randn(taps - 1, channels).to(dtype)
    write = [[next(slot) if t % 3 != 1 else -1 for t in range(length)] for length in lengths]
    for row, index in enumerate(read):
        write[row][-1] = index
    starts = [5 if index >= 0 else 0 for index in read]
    layout = Layout.from_rows(lengths, num_step=num_step, starts=starts, read_slots=read, write_slots=write)
    expected_pool = pool.double()
    expected = causal_conv(x.double(), weight.double(), expected_pool, layout)
    parts = [triton_conv.conv(x, weight, pool, layout, segment) for segment in layout.segments]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool.double(), expected_pool, rtol=0, atol=0, equal_nan=True)


def test_chunks_begin_at_blocks_of_the_sequence() -> None:
    lengths, starts = [1, 64, 130, 2], [0, 0, 61, 63]
    layout = Layout.from_rows([7, *lengths], num_step=1, starts=[9, *starts])
    table = chunk_table(layout, layout.segments[1]).tolist()
    found = []
    for row, base, first, end in table:
        if end > first:
            assert first == sum(lengths[:row])
            assert end == first + lengths[row]
            found += [(row, token) for token in range(max(first, base), min(end, base + CHUNK))]
            assert (base - first + starts[row]) % CHUNK == 0
    assert found == [(row, t) for row in range(4) for t in range(sum(lengths[:row]), sum(lengths[: row + 1]))]
    assert [entry for entry in table if entry[2] == entry[3]] == [[0] * 4] * (len(table) - 7)
