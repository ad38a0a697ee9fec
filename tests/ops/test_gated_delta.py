"""The gated delta rule against a float64 loop over the tokens of one row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deltaserve.ops.gated_delta.api import gated_delta
from deltaserve.ops.layout import Layout
from tests.ops.pools import POISONS, SlotPool

ALWAYS, NEVER = 1000.0, -1000.0
"""Inputs of the sigmoid that give exactly 1 and 0."""


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(**{name: part.to(dtype) for name, part in vars(self).items()})

    def tokens(self, index: Tensor | slice) -> Inputs:
        return replace(self, **{name: getattr(self, name)[index] for name in "qkvab"})

    def run(self, pool: Tensor, layout: Layout) -> Tensor:
        return gated_delta(self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, pool, layout)


def random_inputs(tokens: int, k_heads: int = 1, ratio: int = 2, k_dim: int = 8, v_dim: int = 6) -> Inputs:
    v_heads = k_heads * ratio
    return Inputs(
        torch.randn(tokens, k_heads, k_dim).double(),
        torch.randn(tokens, k_heads, k_dim).double(),
        torch.randn(tokens, v_heads, v_dim).double(),
        torch.randn(tokens, v_heads).double(),
        torch.randn(tokens, v_heads).double(),
        torch.randn(v_heads).double(),
        torch.randn(v_heads).double(),
    )


def zero_state(x: Inputs) -> Tensor:
    return torch.zeros(x.v.shape[1], x.k.shape[2], x.v.shape[2], dtype=torch.float64)


def recurrence(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, Hv, V] and the states after every token [T, Hv, K, V]: token by token in float64."""
    x, state = x.to(torch.float64), state.double()
    v_heads, k_heads = x.v.shape[1], x.k.shape[1]
    group = [h // (v_heads // k_heads) for h in range(v_heads)]
    softplus = torch.log1p(torch.exp((x.a + x.dt_bias).clamp(max=30))).maximum(x.a + x.dt_bias)
    alpha, beta = torch.exp(-torch.exp(x.A_log) * softplus), 1 / (1 + torch.exp(-x.b))
    q = x.q / torch.sqrt((x.q**2).sum(-1, keepdim=True) + 1e-6) / x.q.shape[2] ** 0.5
    k = x.k / torch.sqrt((x.k**2).sum(-1, keepdim=True) + 1e-6)
    q, k = q[:, group, :, None], k[:, group, :, None]
    outputs, states = [], []
    for t in range(len(x.v)):
        state = alpha[t, :, None, None] * state
        u = beta[t, :, None] * (x.v[t] - (state * k[t]).sum(1))
        state = state + k[t] * u[:, None]
        outputs.append((state * q[t]).sum(1))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference, relative to the largest expected value."""
    assert torch.isfinite(actual).all()
    scale = expected.abs().max().clamp(min=1e-3)
    assert float((actual.double() - expected).abs().max() / scale) < tolerance


def set_gates(x: Inputs, decay: Sequence[float], beta: Sequence[float]) -> None:
    """Gates cycle through `decay` (log of it) and `beta` (input of the sigmoid)."""
    x.A_log.zero_()
    x.dt_bias.zero_()
    for t in range(len(x.a)):
        g, b = decay[t % len(decay)], beta[t % len(beta)]
        # softplus(a) is -g: exactly above 20, and exactly 0 far below.
        x.a[t] = NEVER if g == 0 else (-g if g <= -20 else torch.log(torch.expm1(torch.tensor(-g))))
        x.b[t] = b


LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 200, 300)
DECAYS = {
    "none": (0.0,),
    "full": (-80.0,),
    "vanishing": (-1000.0,),
    "light": (-1e-3,),
    "middle": (-20.0,),
    "cliff": (-1e-3,) * 30 + (-80.0,) * 3,
    "mixed": (0.0, -80.0, -0.1, -0.1, -0.1, -5.0, -0.5),
}
BETAS = {"never": (NEVER,), "always": (ALWAYS,), "little": (-9.2,), "mixed": (ALWAYS, NEVER, 0.0, 2.0)}


@pytest.mark.parametrize("same_keys", [False, True], ids=["keys", "same-keys"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("decay", DECAYS)
def test_chunks_and_steps_equal_the_recurrence_at_the_edges(decay: str, beta: str, same_keys: bool) -> None:
    x = random_inputs(max(LENGTHS))
    set_gates(x, DECAYS[decay], BETAS[beta])
    if same_keys:
        x.k[:] = x.k[0]
    expected, states = recurrence(x, zero_state(x))
    rows = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = torch.tensor(LENGTHS) - 1
    slots = list(range(len(LENGTHS)))
    write = [[-1] * (length - 1) + [slot] for length, slot in zip(LENGTHS, slots, strict=True)]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        pool = torch.full((len(LENGTHS), *states.shape[1:]), torch.nan, dtype=dtype)
        output = x.tokens(rows).to(dtype).run(pool, Layout.from_rows(LENGTHS, write_slots=write))
        close(output, expected[rows], tolerance)
        close(pool, states[ends], tolerance)

        step = Layout.from_rows([80], num_step=1, write_slots=[[-1] * 79 + [0]])
        output = x.tokens(slice(80)).to(dtype).run(pool, step)
        close(output, expected[:80], tolerance)
        close(pool[0], states[79], tolerance)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_a_mixed_ragged_step_equals_each_row_alone(ratio: int, poison: float) -> None:
    k_heads, k_dim, v_dim = random.choice([(1, 8, 6), (2, 4, 12), (3, 16, 5)])
    for num_step, step_len in ((0, 1), (3, 1), (2, 4)):
        lengths = [step_len] * num_step + [random.choice([1, 2, 5, 63, 64, 65, 130, 200]) for _ in range(4)]
        x = random_inputs(sum(lengths), k_heads, ratio, k_dim, v_dim)
        state_shape = zero_state(x).shape
        pool = SlotPool(state_shape, 3 * sum(lengths), poison, torch.float64)
        starts = [None if random.random() < 0.3 else torch.randn(state_shape).double() for _ in lengths]
        read = [-1 if state is None else pool.put(state) for state in starts]
        write = [[pool.take() if random.random() < 0.2 else -1 for _ in range(length)] for length in lengths]
        for row in range(len(lengths)):
            # The last token's state goes to a new slot, to where the row read from, or nowhere.
            write[row][-1] = random.choice([pool.take(), read[row], -1])
        output = x.run(pool.tensor, Layout.from_rows(lengths, num_step=num_step, read_slots=read, write_slots=write))

        token = 0
        for row, length in enumerate(lengths):
            own, start = x.tokens(slice(token, token + length)), starts[row]
            expected, states = recurrence(own, zero_state(x) if start is None else start)
            close(output[token : token + length], expected, 1e-12)
            for t, slot in enumerate(write[row]):
                if slot >= 0:
                    close(pool.tensor[slot], states[t], 1e-12)
            token += length
        pool.assert_changed_only(slot for slots in write for slot in slots if slot >= 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_split_of_a_prompt_gives_the_same(dtype: torch.dtype) -> None:
    """199 rows: row s computes its first s + 1 tokens in one call and the rest, in place, in the next."""
    length, tolerance = 200, 1e-12 if dtype == torch.float64 else 2e-5
    x = random_inputs(length)
    expected, states = recurrence(x, zero_state(x))
    firsts = list(range(1, length))
    pool = torch.full((len(firsts), *states.shape[1:]), torch.nan, dtype=dtype)

    def part(starts: Sequence[int], ends: Sequence[int], read: Sequence[int]) -> None:
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        rows = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        write = [[-1] * (n - 1) + [slot] for slot, n in enumerate(lengths)]
        output = x.tokens(rows).to(dtype).run(pool, Layout.from_rows(lengths, read_slots=read, write_slots=write))
        close(output, expected[rows], tolerance)
        close(pool, states[torch.tensor(ends) - 1], tolerance)

    part([0] * len(firsts), firsts, [-1] * len(firsts))
    part(firsts, [length] * len(firsts), list(range(len(firsts))))


def test_prefill_token_by_token_equals_whole() -> None:
    x = random_inputs(130)
    expected, states = recurrence(x, zero_state(x))
    pool = torch.full((1, *states.shape[1:]), torch.nan, dtype=torch.float64)
    for t in range(130):
        layout = Layout.from_rows([1], num_step=t % 2, read_slots=[-1 if t == 0 else 0], write_slots=[[0]])
        close(x.tokens(slice(t, t + 1)).run(pool, layout), expected[t : t + 1], 1e-12)
    close(pool[0], states[-1], 1e-12)


@pytest.mark.parametrize("num_step", [0, 2])
def test_every_token_of_a_row_can_be_kept(num_step: int) -> None:
    length = 150 if num_step == 0 else 5
    x = random_inputs(2 * length)
    start = torch.randn(zero_state(x).shape).double()
    pool = SlotPool(start.shape, 2 * length + 1, torch.nan, torch.float64)
    read = pool.put(start)
    write = [[pool.take() for _ in range(length)], [pool.take() for _ in range(length - 1)] + [read]]
    layout = Layout.from_rows([length] * 2, num_step=num_step, read_slots=[-1, read], write_slots=write)
    x.run(pool.tensor, layout)
    close(pool.tensor[write[0]], recurrence(x.tokens(slice(length)), zero_state(x))[1], 1e-12)
    close(pool.tensor[write[1]], recurrence(x.tokens(slice(length, None)), start)[1], 1e-12)


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slots", [[2, 3, 4], [4, 3, 2], [2, 4, 5], [2]])
def test_decode_in_place_in_neighbouring_and_other_slots(slots: list[int], state_dtype: torch.dtype) -> None:
    tolerance = 1e-12 if state_dtype == torch.float64 else 1e-6
    x, rows = random_inputs(5 * len(slots)), len(slots)
    pool = torch.randn(7, *zero_state(x).shape).to(state_dtype)
    before = pool.clone()
    expected = [recurrence(x.tokens(torch.arange(row, 5 * rows, rows)), pool[slots[row]]) for row in range(rows)]
    for t in range(5):
        layout = Layout.from_rows([1] * rows, num_step=rows, read_slots=slots, write_slots=[[slot] for slot in slots])
        output = x.tokens(slice(t * rows, (t + 1) * rows)).run(pool, layout)
        for row, (outputs, states) in enumerate(expected):
            close(output[row], outputs[t], tolerance)
            close(pool[slots[row]], states[t], tolerance)
    others = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("num_step", [0, 4])
def test_padding_rows_touch_nothing(num_step: int, poison: float) -> None:
    """Rows 1 and 3 are padding: they hold rubbish, read nothing, write nothing and disturb nobody."""
    x = random_inputs(4)
    expected, _ = recurrence(x.tokens(slice(1)), zero_state(x))
    for part in (x.q, x.k, x.v, x.a, x.b):
        part[1] = torch.nan
        part[3] = 0
    pool = SlotPool(zero_state(x).shape, 5, poison, torch.float64)
    state = torch.randn(zero_state(x).shape).double()
    slot, other = pool.put(state), pool.take()
    layout = Layout.from_rows(
        [1] * 4, num_step=num_step, read_slots=[-1, -1, slot, -1], write_slots=[[other], [-1], [slot], [-1]]
    )
    output = x.run(pool.tensor, layout)
    close(output[:1], expected, 1e-12)
    close(output[2:3], recurrence(x.tokens(slice(2, 3)), state)[0], 1e-12)
    assert output[3].isfinite().all()
    pool.assert_changed_only([slot, other])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_single(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    lengths = [1, 1, 100, 70]
    x = random_inputs(sum(lengths), k_dim=32, v_dim=16).to(dtype)
    state = torch.randn(2, 32, 16).to(state_dtype)
    pool = torch.stack([state, state, state, state])
    write = [[-1] * (length - 1) + [row] for row, length in enumerate(lengths)]
    output = x.run(pool, Layout.from_rows(lengths, num_step=2, read_slots=range(4), write_slots=write))
    assert output.dtype == dtype
    token = 0
    for row, length in enumerate(lengths):
        expected, states = recurrence(x.tokens(slice(token, token + length)), state)
        close(output[token : token + length], expected, float(torch.finfo(dtype).eps))
        close(pool[row], states[-1], float(torch.finfo(state_dtype).eps) if state_dtype == torch.bfloat16 else 1e-5)
        token += length


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, layout = random_inputs(3, k_heads=2), Layout.from_rows([3])
    with pytest.raises(AssertionError, match="does not hold"):
        x.run(torch.zeros(1, 4, 6, 8), layout)
    with pytest.raises(AssertionError, match="differ in tokens"):
        x.run(torch.zeros(1, 4, 8, 6), Layout.from_rows([2]))
