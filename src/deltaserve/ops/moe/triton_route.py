"""Chooses each token's experts. Knows no weights. One program per token, bound by its launch.

Programs beside it may quantise the tokens for their experts meanwhile, once instead of in every program of theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, quantize, stored

NARROW_NONE: tl.constexpr = tl.constexpr(-(1 << 31))
NONE: tl.constexpr = tl.constexpr(-(1 << 62))


PART: tl.constexpr = tl.constexpr(512)
"""Inputs that a program quantises."""

MATES: tl.constexpr = tl.constexpr(16)
"""First tokens of a step, whose experts padding shares."""


@triton.jit
def quantize_part(x_ptr, q_ptr, scale_ptr, t, part, WIDTH: tl.constexpr, FP8: tl.constexpr):
    """x [T, WIDTH] -> q the same, scales [T, blocks]."""
    k = part * PART + tl.arange(0, PART)
    block = part * (PART // 128) + tl.arange(0, PART // 128)
    x = tl.load(x_ptr + t * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    q, scale = quantize(tl.reshape(x, (PART // 128, 128)), FP8)
    tl.store(q_ptr + t * WIDTH + k, stored(tl.reshape(q, (PART,)), FP8), mask=k < WIDTH)
    tl.store(scale_ptr + t * ((WIDTH + 127) // 128) + block, scale, mask=block * 128 < WIDTH)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["place_ptr"])
def route_kernel(
    scores_ptr,
    weights_ptr,
    ids_ptr,
    count_ptr,
    x_ptr,
    q_ptr,
    scale_ptr,
    place_ptr,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SHARED: tl.constexpr,
    INPUTS: tl.constexpr,
    FP8: tl.constexpr,
    IS_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    t = tl.program_id(0).to(tl.int64)
    if FP8 != 0:  # noqa: SIM102 - known when this is compiled, the other is not
        if tl.program_id(1) > 0:
            quantize_part(x_ptr, q_ptr, scale_ptr, t, tl.program_id(1) - 1, INPUTS, FP8)
            return
    if t == 0:
        tl.store(count_ptr, 0)
    e = tl.arange(0, EP)
    source = t
    if IS_PADDED:  # spread, so that no expert gets more pairs than fit beside those that it has
        mate = tl.where(tl.load(place_ptr + t % MATES) < 0, 0, t % MATES)
        source = tl.where(tl.load(place_ptr + t) < 0, mate, t)
    scores_ptr += source * stride
    s = tl.load(scores_ptr + e, mask=e < E, other=float("-inf")).to(tl.float32)
    s = tl.where(s == 0, 0.0, s)  # -0 equals 0
    # An integer that orders as the scores do, and of equals the lowest expert first; a NaN's bits are a number like
    # any other, so that ids are valid whatever comes.
    bits = s.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # A bf16 score is the upper half of it: then all fits 32 bits, which a warp compares in one instruction.
    IS_NARROW: tl.constexpr = scores_ptr.dtype.element_ty == tl.bfloat16
    if IS_NARROW:
        key = tl.where(e < E, (order & -65536) | (65535 - e), NARROW_NONE)
    else:
        key = tl.where(e < E, (order.to(tl.int64) << 16) | (65535 - e).to(tl.int64), NONE)
    place = tl.arange(0, KP)
    ids = tl.full((KP,), E, tl.int32)
    chosen = tl.full((KP,), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(key, 0)
        if IS_NARROW:
            key = tl.where(key == best, NARROW_NONE, key)
            score = ((best ^ ((best >> 31) & 0x7FFFFFFF)) & -65536).to(tl.float32, bitcast=True)
        else:
            key = tl.where(key == best, NONE, key)
            ordered = (best >> 16).to(tl.int32)
            score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        ids = tl.where(place == i, (65535 - (best & 65535)).to(tl.int32), ids)
        chosen = tl.where(place == i, score, chosen)
    top = tl.max(chosen, 0)
    weights = tl.exp(chosen - top)
    total = tl.sum(weights, 0) if RENORMALIZE else tl.sum(tl.where(e < E, tl.exp(s - top), 0.0), 0)
    weights = weights / total
    if SHARED:
        gate = tl.load(scores_ptr + E).to(tl.float32)
        weights = tl.where(place == K, 1.0 / (1.0 + tl.exp(-gate)), weights)
    WIDTH: tl.constexpr = K + 1 if SHARED else K
    tl.store(weights_ptr + t * WIDTH + place, weights, mask=place < WIDTH)
    tl.store(ids_ptr + t * WIDTH + place, ids, mask=place < WIDTH)


def route(
    scores_TF: Tensor,
    top_k: int,
    renormalize: bool,
    shared: bool,
    early: bool | None = None,
    place_T: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """scores [T, E + 1], its last column the shared expert's gate, rows at any stride; place as api.sparse_moe says.

    Returns weights float32 and ids int32 [T, top_k, or one more where the shared expert is the expert E], and an int32
    that is zero, for `triton_members.group`.
    """
    return _launch(scores_TF, None, top_k, renormalize, shared, early, place_T)[:3]


def route_and_quantize(
    scores_TF: Tensor,
    x_TD: Tensor,
    top_k: int,
    renormalize: bool,
    shared: bool,
    early: bool | None = None,
    place_T: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """As `route`, and x [T, D] as e4m3 [T, D] and float32 scales [T, d]."""
    return _launch(scores_TF, x_TD.contiguous(), top_k, renormalize, shared, early, place_T)


def _launch(
    scores_TF: Tensor,
    x_TD: Tensor | None,
    top_k: int,
    renormalize: bool,
    shared: bool,
    early: bool | None,
    place_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    tokens, num_experts = scores_TF.shape[0], scores_TF.shape[1] - 1
    assert scores_TF.stride(1) == 1, f"moe: scores with strides {scores_TF.stride()}"
    assert num_experts < 1 << 16, f"moe: {num_experts} experts"
    shape, device = (tokens, top_k + shared), scores_TF.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    x_q, scale, out, way, width = scores_TF, weights, scores_TF, 0, 0
    if x_TD is not None:
        width = x_TD.shape[1]
        x_q = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty((tokens, -(-width // 128)), dtype=torch.float32, device=device)
        out, way = fp8_way(x_q, scale)
    route_kernel[(tokens, 1 + triton.cdiv(width, PART.value))](
        scores_TF,
        weights,
        ids,
        count,
        scores_TF if x_TD is None else x_TD,
        out,
        scale,
        ids if place_T is None else place_T,
        scores_TF.stride(0),
        E=num_experts,
        K=top_k,
        EP=triton.next_power_of_2(num_experts),
        KP=triton.next_power_of_2(top_k + shared),
        RENORMALIZE=renormalize,
        SHARED=shared,
        INPUTS=width,
        FP8=way,
        IS_PADDED=place_T is not None,
        num_warps=1,
        **early_options(device, early, tokens),
    )
    return weights, ids, count, (x_q, scale)
