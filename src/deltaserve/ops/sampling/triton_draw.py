"""Draws tokens from logits on a GPU: weights, top-k, top-p, min-p and the draw, without sorting. Knows no request.

A cut keeps the logits from some value up. That value is the largest u for which as many logits as top-k says, or as
much weight as top-p says, lie at u or above. It is found digit by digit, three bits of a float's order at a time: each
launch counts (or adds up) what lies above seven candidates, slice by slice of the vocabulary; the next launch joins
the slices and goes on. Weights are integers, so that all sums are exact whatever their order, and are made anew from
the logits in every pass: 4 bytes to read instead of 8. The draw adds up the slices, finds the slice of the goal, and
the token in it.

Reads the logits eleven times for each of the two cuts, as far as asked for, and twice for the draw. Everything is
enqueued at once; nothing depends on the host.

Variants: the vocabulary; the first and the other passes of each cut; whether min-p cuts. Numbers of rows are none.

Shape letters: R rows, V vocabulary, N slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.sampling import reference
from deltaserve.ops.sampling.triton_greedy import SLICE, extremes

ONE = float(reference.WEIGHT_ONE)
BITS = 3
SHIFTS = tuple(range(30, -1, -BITS))
"""Of the digits: the first has two bits."""


@triton.jit
def order_of(x):
    """fp32 as int32 that order as the floats do; one zero of two."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(x, largest, temperature, ONE: tl.constexpr):
    """As `weigh`. The exponent is split, because a rounded product with log2(e) would cost up to 20 last bits."""
    scaled = tl.math.div_rn(x - largest, temperature)
    scaled = tl.maximum(scaled, -120.0)  # its weight is 0 from -30 down
    high = scaled * 1.4426950408889634
    low = tl.fma(scaled, 1.4426950216293335, -high) + scaled * 1.925963033500e-08
    power = tl.exp2(high)
    return ((power + power * (low * 0.6931471805599453)) * ONE).to(tl.int64)


@triton.jit
def settle(part_ptr, row, shift, prefix, goal, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The prefix with its next digit: the largest whose sum reaches the goal. `part` [R, 8, N] are its pass's sums."""
    digit = tl.arange(0, 8)
    part = tl.arange(0, BLOCK_N)
    at = (row * 8 + digit)[:, None] * NUM_SLICES + part[None, :]
    sums = tl.sum(tl.load(part_ptr + at, mask=(part < NUM_SLICES)[None, :], other=0), 1)
    reaches = (digit > 0) & (sums.to(tl.float64) >= goal)
    return prefix + (tl.sum(reaches.to(tl.int64), 0) << shift)


@triton.jit
def total_of(part_ptr, row, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a pass found from its prefix up: the whole row's, in the first."""
    part = tl.arange(0, BLOCK_N)
    return tl.sum(tl.load(part_ptr + row * 8 * NUM_SLICES + part, mask=part < NUM_SLICES, other=0), 0)


@triton.jit(do_not_specialize=["shift", "limit_stride"], do_not_specialize_on_alignment=["limit_ptr"])
def search_kernel(
    logits_ptr,
    largest_ptr,
    temperature_ptr,
    limit_ptr,
    floor_ptr,
    before_ptr,
    after_ptr,
    last_part_ptr,
    part_ptr,
    row_stride,
    limit_stride,
    shift,
    VOCAB: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr,
    BITS: tl.constexpr,
    ONE: tl.constexpr,
    WEIGHS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """One digit. `before` and `after` [R, 2]: the prefix and, for weights, the goal's bits, as the last pass left them
    and as this one does. `limit`: how many logits, or what part of the weight. Nothing below `floor` [R, 2] counts.
    """
    slice_number = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    largest = tl.load(largest_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    limit = tl.load(limit_ptr + row * limit_stride)
    goal = limit.to(tl.float64)
    if IS_FIRST:
        prefix = tl.full((), -2147483648, tl.int64)
    else:
        if WEIGHS:
            # The first pass has found the whole weight; the pass behind it writes the goal down for the others.
            kept_goal = tl.load(before_ptr + row * 2 + 1)
            whole = total_of(last_part_ptr, row, NUM_SLICES, BLOCK_N)
            goal = tl.where(
                shift == 30 - BITS, limit.to(tl.float64) * whole.to(tl.float64), kept_goal.to(tl.float64, bitcast=True)
            )
        prefix = settle(last_part_ptr, row, shift + BITS, tl.load(before_ptr + row * 2), goal, NUM_SLICES, BLOCK_N)
    if slice_number == 0:
        tl.store(after_ptr + row * 2, prefix)
        tl.store(after_ptr + row * 2 + 1, goal.to(tl.int64, bitcast=True))

    token = slice_number * SLICE + tl.arange(0, SLICE)
    inside = token < VOCAB
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0)
    order = order_of(x)
    counts = inside
    if HAS_FLOOR:
        counts = counts & (order >= tl.load(floor_ptr + row * 2).to(tl.int32))
    value = tl.where(counts, weight_of(x, largest, temperature, ONE), 0) if WEIGHS else counts.to(tl.int32)
    to = part_ptr + row * 8 * NUM_SLICES + slice_number
    for digit in tl.static_range(8):
        bound = prefix + (tl.full((), digit, tl.int64) << shift)
        found = tl.sum(tl.where(order >= bound.to(tl.int32), value, 0), 0).to(tl.int64)
        tl.store(to + digit * NUM_SLICES, tl.where(bound <= 2147483647, found, 0))


@triton.jit(do_not_specialize=["limit_stride"], do_not_specialize_on_alignment=["limit_ptr"])
def settle_kernel(before_ptr, part_ptr, out_ptr, limit_ptr, limit_stride, NUM_SLICES: tl.constexpr,
                  BLOCK_N: tl.constexpr, WEIGHS: tl.constexpr):  # fmt: skip
    """The last digit."""
    row = tl.program_id(0).to(tl.int64)
    if WEIGHS:
        goal = tl.load(before_ptr + row * 2 + 1).to(tl.float64, bitcast=True)
    else:
        goal = tl.load(limit_ptr + row * limit_stride).to(tl.float64)
    prefix = settle(part_ptr, row, 0, tl.load(before_ptr + row * 2), goal, NUM_SLICES, BLOCK_N)
    tl.store(out_ptr + row * 2, prefix)


@triton.jit
def kept_weight(
    logits_ptr, largest_ptr, temperature_ptr, floor_ptr, least_ptr, row, token, row_stride,
    VOCAB: tl.constexpr, ONE: tl.constexpr, HAS_FLOOR: tl.constexpr, HAS_LEAST: tl.constexpr,
):  # fmt: skip
    """The weights of some tokens of a row, 0 where they are cut."""
    inside = token < VOCAB
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0)
    weight = weight_of(x, tl.load(largest_ptr + row), tl.load(temperature_ptr + row), ONE)
    if HAS_FLOOR:
        inside = inside & (order_of(x) >= tl.load(floor_ptr + row * 2).to(tl.int32))
    if HAS_LEAST:
        inside = inside & (weight >= tl.load(least_ptr + row))
    return tl.where(inside, weight, 0)


@triton.jit
def sum_kernel(
    logits_ptr, largest_ptr, temperature_ptr, floor_ptr, least_ptr, sum_ptr, row_stride,
    VOCAB: tl.constexpr, NUM_SLICES: tl.constexpr, SLICE: tl.constexpr, ONE: tl.constexpr, HAS_FLOOR: tl.constexpr,
    HAS_LEAST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = part * SLICE + tl.arange(0, SLICE)
    weight = kept_weight(
        logits_ptr, largest_ptr, temperature_ptr, floor_ptr, least_ptr, row, token, row_stride,
        VOCAB, ONE, HAS_FLOOR, HAS_LEAST,
    )  # fmt: skip
    tl.store(sum_ptr + row * NUM_SLICES + part, tl.sum(weight, 0))


@triton.jit
def draw_kernel(
    logits_ptr, largest_ptr, temperature_ptr, floor_ptr, least_ptr, sum_ptr, uniform_ptr, token_ptr, row_stride,
    VOCAB: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, ONE: tl.constexpr,
    HAS_FLOOR: tl.constexpr, HAS_LEAST: tl.constexpr,
):  # fmt: skip
    """The first token whose weights up to itself exceed the goal."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_N)
    sums = tl.load(sum_ptr + row * NUM_SLICES + part, mask=part < NUM_SLICES, other=0)
    ends = tl.cumsum(sums, 0)
    total = tl.sum(sums, 0)
    goal = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
    # The product may round up to the total, which lies beyond the last token.
    goal = tl.maximum(tl.minimum(goal, total - 1), 0)
    chosen = tl.minimum(tl.sum(((ends <= goal) & (part < NUM_SLICES)).to(tl.int32), 0), NUM_SLICES - 1)
    before = tl.sum(tl.where(part < chosen, sums, 0), 0)
    token = chosen * SLICE + tl.arange(0, SLICE)
    weight = kept_weight(
        logits_ptr, largest_ptr, temperature_ptr, floor_ptr, least_ptr, row, token, row_stride,
        VOCAB, ONE, HAS_FLOOR, HAS_LEAST,
    )  # fmt: skip
    place = tl.sum((before + tl.cumsum(weight, 0) <= goal).to(tl.int32), 0)
    tl.store(token_ptr + row, tl.minimum(chosen * SLICE + place, VOCAB - 1).to(tl.int64))


class _Rows:
    """Logits [R, V] float32 with what every kernel wants to know of them."""

    def __init__(self, logits_RV: Tensor, temperature_R: Tensor) -> None:
        self.logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
        self.temperature = temperature_R.contiguous()
        self.rows, self.vocab = logits_RV.shape
        self.num_slices = triton.cdiv(self.vocab, SLICE)
        self.block_n = triton.next_power_of_2(self.num_slices)
        _, _, self.largest = extremes(logits_RV)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(self.rows, *shape, dtype=torch.int64, device=self.logits.device)

    def find(self, limit_R: Tensor, floor: Tensor | None) -> Tensor:
        """The cut's least order in column 0 of [R, 2]. An int64 limit counts logits, a float64 one weighs them."""
        weighs = limit_R.dtype == torch.float64
        states, parts = (self.empty(2), self.empty(2)), (self.empty(8, self.num_slices), self.empty(8, self.num_slices))
        for number, shift in enumerate(SHIFTS):
            here, there = number % 2, 1 - number % 2
            search_kernel[(self.num_slices, self.rows)](
                self.logits, self.largest, self.temperature, limit_R, states[0] if floor is None else floor,
                states[there], states[here], parts[there], parts[here],
                self.logits.stride(0), limit_R.stride(0), shift,
                VOCAB=self.vocab, NUM_SLICES=self.num_slices, BLOCK_N=self.block_n, SLICE=SLICE, BITS=BITS,
                ONE=ONE, WEIGHS=weighs, IS_FIRST=number == 0, HAS_FLOOR=floor is not None, num_warps=4,
            )  # fmt: skip
        last = (len(SHIFTS) - 1) % 2
        found = self.empty(2)
        settle_kernel[(self.rows,)](
            states[last], parts[last], found, limit_R, limit_R.stride(0),
            NUM_SLICES=self.num_slices, BLOCK_N=self.block_n, WEIGHS=weighs, num_warps=4,
        )  # fmt: skip
        return found

    def draw(self, uniform_R: Tensor, floor: Tensor | None, least_R: Tensor | None) -> Tensor:
        token, sums = self.empty(), self.empty(self.num_slices)
        cuts = (sums if floor is None else floor, sums if least_R is None else least_R)
        flags = {"HAS_FLOOR": floor is not None, "HAS_LEAST": least_R is not None}
        sum_kernel[(self.num_slices, self.rows)](
            self.logits, self.largest, self.temperature, *cuts, sums, self.logits.stride(0),
            VOCAB=self.vocab, NUM_SLICES=self.num_slices, SLICE=SLICE, ONE=ONE, **flags, num_warps=4,
        )  # fmt: skip
        draw_kernel[(self.rows,)](
            self.logits, self.largest, self.temperature, *cuts, sums, uniform_R, token, self.logits.stride(0),
            VOCAB=self.vocab, NUM_SLICES=self.num_slices, BLOCK_N=self.block_n, SLICE=SLICE, ONE=ONE, **flags,
            num_warps=4,
        )  # fmt: skip
        return token


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    uniform_R: Tensor,
    top_k_R: Tensor | None,
    top_p_R: Tensor | None,
    min_p_R: Tensor | None,
) -> Tensor:
    """Tokens int64 [R] drawn from logits [R, V] float32, finite; temperature float32, uniform, top_p and min_p float64,
    top_k int64, all [R]. A cut that is None cuts nothing.
    """
    rows = _Rows(logits_RV, temperature_R)
    floor = None if top_k_R is None else rows.find(top_k_R, None)
    if top_p_R is not None:
        # From the top: what top-p keeps of the rest never reaches below it.
        floor = rows.find(top_p_R, floor)
    least_R = None if min_p_R is None else (min_p_R * ONE).ceil().long()
    return rows.draw(uniform_R.contiguous(), floor, least_R)
