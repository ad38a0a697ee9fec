"""The kernels of the convolution on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.conv.api import causal_conv
from deltaserve.ops.layout import Layout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("channels", "taps", "dtype"),
    [(8192, 4, torch.float32), (8192, 4, torch.bfloat16), (8192, 4, torch.float16), (300, 2, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("lengths", "num_step"),
    [([tokens], 0) for tokens in (1, 2, 63, 64, 65, 127, 128, 1000)]
    + [([2, 1, 130], 0), ([1] * 8, 8), ([3, 3, 70], 2)],
    ids=str,
)
def test_conv(lengths: list[int], num_step: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    """Any token may be kept, even in the slot that its row was read from."""
    tokens = sum(lengths)
    x = torch.randn(tokens, channels + 8, device="cuda").to(dtype)[:, :channels]
    weight = torch.randn(taps, channels, device="cuda").to(dtype).t()
    slot = iter(range(1, 2 * tokens + 2))
    read = [next(slot) if row % 2 == 0 else -1 for row in range(len(lengths))]
    write = [[next(slot) if t % 30 == 2 else -1 for t in range(length)] for length in lengths]
    for row, index in enumerate(read):
        write[row][-1] = index
    pool = torch.full((next(slot) + 2, taps - 1, channels), torch.nan, dtype=dtype, device="cuda")
    for index in read:
        if index >= 0:
            pool[index] = torch.randn(taps - 1, channels, device="cuda").to(dtype)
    starts = [5 if index >= 0 else 0 for index in read]
    layout = Layout.from_rows(
        lengths, num_step=num_step, starts=starts, read_slots=read, write_slots=write, device="cuda"
    )
    inner = pool[1:-1]  # the first slot and the last are watched
    layout.read_slot.sub_((layout.read_slot >= 0).long())
    layout.write_slot.sub_((layout.write_slot >= 0).long())
    expected_pool = pool.double()
    expected = causal_conv(x.double(), weight.double(), expected_pool[1:-1], layout)
    layout.memo.clear()
    actual = causal_conv(x, weight, inner, layout)
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(pool.double(), expected_pool, rtol=0, atol=0, equal_nan=True)
