"""The causal convolution against a float64 loop over tokens and taps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deltaserve.ops.conv.api import causal_conv
from deltaserve.ops.layout import Layout
from tests.ops.pools import POISONS, SlotPool

CHANNELS = 7


def naive(x_TC: Tensor, weight_CW: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, C] and the windows after every token [T, W - 1, C], in float64."""
    taps = weight_CW.shape[1]
    seen = torch.cat([window.double(), x_TC.double()])
    outputs, windows = torch.zeros_like(x_TC, dtype=torch.float64), []
    for t in range(len(x_TC)):
        for tap in range(taps):
            outputs[t] += weight_CW[:, tap].double() * seen[t + tap]
        windows.append(seen[t + 1 : t + taps])
    return outputs / (1 + torch.exp(-outputs)), torch.stack(windows)


def close(actual: Tensor, expected: Tensor, eps: float = 1e-12) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("taps", [2, 3, 4, 5])
def test_a_mixed_ragged_step_equals_each_row_alone(taps: int, poison: float) -> None:
    weight = torch.randn(CHANNELS, taps).double()
    for num_step, step_len in ((0, 1), (3, 1), (2, 4)):
        # Rows shorter than the window, as long, and longer.
        lengths = [step_len] * num_step + random.sample([1, 2, taps - 1, taps, taps + 1, 30], 6)
        x = torch.randn(sum(lengths), CHANNELS).double()
        pool = SlotPool((taps - 1, CHANNELS), 3 * sum(lengths), poison, torch.float64)
        starts = [None if random.random() < 0.3 else torch.randn(taps - 1, CHANNELS).double() for _ in lengths]
        read = [-1 if state is None else pool.put(state) for state in starts]
        write = [[pool.take() if random.random() < 0.2 else -1 for _ in range(length)] for length in lengths]
        for row in range(len(lengths)):
            write[row][-1] = random.choice([pool.take(), read[row], -1])
        layout = Layout.from_rows(lengths, num_step=num_step, read_slots=read, write_slots=write)
        output = causal_conv(x, weight, pool.tensor, layout)

        token = 0
        for row, length in enumerate(lengths):
            start = starts[row]
            window = torch.zeros(taps - 1, CHANNELS) if start is None else start
            expected, windows = naive(x[token : token + length], weight, window)
            close(output[token : token + length], expected)
            for t, slot in enumerate(write[row]):
                if slot >= 0:
                    assert torch.equal(pool.tensor[slot], windows[t])
            token += length
        pool.assert_changed_only(slot for slots in write for slot in slots if slot >= 0)


@pytest.mark.parametrize("taps", [2, 3, 4, 5])
def test_every_split_of_a_prompt_gives_the_same(taps: int) -> None:
    """Row s computes its first s + 1 tokens in one call and the rest, in place, in the next."""
    length = 40
    x, weight = torch.randn(length, CHANNELS).double(), torch.randn(CHANNELS, taps).double()
    expected, windows = naive(x, weight, torch.zeros(taps - 1, CHANNELS))
    firsts = list(range(1, length))
    pool = torch.full((len(firsts), taps - 1, CHANNELS), torch.nan, dtype=torch.float64)

    def part(starts: Sequence[int], ends: Sequence[int], read: Sequence[int]) -> None:
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        rows = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        write = [[-1] * (n - 1) + [slot] for slot, n in enumerate(lengths)]
        layout = Layout.from_rows(lengths, read_slots=read, write_slots=write)
        close(causal_conv(x[rows], weight, pool, layout), expected[rows])
        assert torch.equal(pool, windows[torch.tensor(ends) - 1])

    part([0] * len(firsts), firsts, [-1] * len(firsts))
    part(firsts, [length] * len(firsts), list(range(len(firsts))))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("num_step", [0, 3])
def test_padding_rows_touch_nothing(num_step: int, poison: float) -> None:
    x, weight = torch.randn(3, CHANNELS).double(), torch.randn(CHANNELS, 4).double()
    expected, windows = naive(x[2:], weight, torch.zeros(3, CHANNELS))
    x[1] = torch.nan
    pool = SlotPool((3, CHANNELS), 3, poison, torch.float64)
    layout = Layout.from_rows([1] * 3, num_step=num_step, write_slots=[[-1], [-1], [2]])
    output = causal_conv(x, weight, pool.tensor, layout)
    assert output[0].isfinite().all()
    close(output[2:], expected)
    assert torch.equal(pool.tensor[2], windows[0])
    pool.assert_changed_only([2])


@pytest.mark.parametrize("num_step", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_rounded_once(dtype: torch.dtype, num_step: int) -> None:
    x, weight = torch.randn(10, CHANNELS).to(dtype), torch.randn(CHANNELS, 4).to(dtype)
    pool = torch.randn(2, 3, CHANNELS).to(dtype)
    start = pool.clone()
    layout = Layout.from_rows([5, 5], num_step=num_step, read_slots=[0, 1])
    output = causal_conv(x, weight, pool, layout)
    assert output.dtype == dtype
    for row in range(2):
        tokens = slice(5 * row, 5 * row + 5)
        expected, _ = naive(x[tokens], weight, start[row])
        close(output[tokens], expected, eps=2 * float(torch.finfo(dtype).eps))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight, layout = torch.zeros(3, CHANNELS), torch.zeros(CHANNELS, 4), Layout.from_rows([3])
    with pytest.raises(AssertionError, match="does not hold windows of 3"):
        causal_conv(x, weight, torch.zeros(1, 4, CHANNELS), layout)
    with pytest.raises(AssertionError, match="expected"):
        causal_conv(x[:2], weight, torch.zeros(1, 3, CHANNELS), layout)
    with pytest.raises(AssertionError, match="pool is"):
        causal_conv(x, weight, torch.zeros(1, 3, CHANNELS, dtype=torch.float64), layout)
