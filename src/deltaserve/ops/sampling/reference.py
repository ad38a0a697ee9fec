"""Sampling in torch. The contracts stand in `api.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WEIGHT_ONE = 2**43

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
SPLITMIX = _GOLDEN, _MIX_1, _MIX_2
"""Of `uniform`."""


def is_finite(logits_RV: Tensor) -> Tensor:
    # Both carry NaN along; two plain reductions are several times faster than isfinite().all().
    return (logits_RV.amax(1) - logits_RV.amin(1)) < torch.inf


def penalize(
    logits_RV: Tensor,
    output_count_RV: Tensor,
    in_prompt_RV: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> Tensor:
    in_output_RV = output_count_RV > 0
    by_R1 = repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / by_R1, logits_RV * by_R1)
    repeated_RV = torch.where(in_output_RV | in_prompt_RV, repeated_RV, logits_RV)
    return repeated_RV - frequency_R[:, None] * output_count_RV - presence_R[:, None] * in_output_RV


def greedy(logits_RV: Tensor) -> Tensor:
    return logits_RV.argmax(1)


def weigh(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    # The largest is taken off first, so that a tiny temperature gives -inf and never inf - inf.
    scaled_RV = (logits_RV - logits_RV.amax(1, keepdim=True)).div_(temperature_R[:, None])
    return scaled_RV.exp_().mul_(WEIGHT_ONE).long()


def cut_top(weight_RV: Tensor, logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, width: int) -> Tensor:
    value_RW, id_RW = logits_RV.topk(width, 1)
    kth_R1 = value_RW.gather(1, top_k_R[:, None] - 1)
    weight_RV = weight_RV * (logits_RV >= kth_R1)

    sorted_RW = weight_RV.gather(1, id_RW)
    before_RW = sorted_RW.cumsum(1) - sorted_RW
    kept_R1 = (before_RW < top_p_R[:, None] * weight_RV.sum(1, keepdim=True)).sum(1, keepdim=True)
    least_R1 = value_RW.gather(1, (kept_R1 - 1).clamp_(min=0))
    return weight_RV * (logits_RV >= least_R1)


def cut_min(weight_RV: Tensor, min_p_R: Tensor) -> Tensor:
    return weight_RV * (weight_RV >= (min_p_R * WEIGHT_ONE).ceil().long()[:, None])


def stream_key(seed: int, stream: int) -> int:
    mixed = (seed + _GOLDEN * (stream + 1)) & _MASK
    mixed = (mixed ^ mixed >> 30) * _MIX_1 & _MASK
    mixed = (mixed ^ mixed >> 27) * _MIX_2 & _MASK
    return _signed(mixed ^ mixed >> 31)


def uniform_on_host(key_R: Tensor, position_R: Tensor) -> Tensor:
    """`uniform` in numpy, for tensors on the CPU: a tenth of the time for a few rows."""
    x_R = (key_R.numpy() + (position_R.numpy() + 1) * np.int64(_signed(_GOLDEN))).view(np.uint64)
    x_R = (x_R ^ (x_R >> np.uint64(30))) * np.uint64(_MIX_1)
    x_R = (x_R ^ (x_R >> np.uint64(27))) * np.uint64(_MIX_2)
    x_R = x_R ^ (x_R >> np.uint64(31))
    return torch.from_numpy((x_R >> np.uint64(11)) * 2.0**-53)


def uniform(key_R: Tensor, position_R: Tensor) -> Tensor:
    x_R = key_R + (position_R + 1) * _signed(_GOLDEN)
    x_R = (x_R ^ _shift(x_R, 30)) * _signed(_MIX_1)
    x_R = (x_R ^ _shift(x_R, 27)) * _signed(_MIX_2)
    x_R = x_R ^ _shift(x_R, 31)
    return _shift(x_R, 11).double() * 2.0**-53


def draw(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    sum_RV = weight_RV.cumsum(1)
    total_R = sum_RV[:, -1]
    # The product may round up to the total, which lies beyond the last token.
    goal_R = torch.minimum((uniform_R * total_R).long(), total_R - 1)
    return torch.searchsorted(sum_RV, goal_R[:, None], right=True)[:, 0].clamp_(max=weight_RV.shape[1] - 1)


def count_right(token_BJ: Tensor, ok_BJ: Tensor, guess_BK: Tensor) -> Tensor:
    num_guesses = guess_BK.shape[1]
    if not num_guesses:  # what the lines below come to then, for much less on a CPU
        return torch.stack([torch.ones_like(token_BJ[:, 0]), ok_BJ[:, 0].long(), token_BJ[:, 0]], 1)
    is_right_BK = token_BJ[:, :num_guesses] == guess_BK
    num_B1 = is_right_BK.long().cumprod(1).sum(1, keepdim=True) + 1
    place_J = torch.arange(num_guesses + 1, device=token_BJ.device)
    ok_B1 = (ok_BJ | (place_J >= num_B1)).all(1, keepdim=True)
    return torch.cat([num_B1, ok_B1.long(), token_BJ], 1)


def token_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprob_NV = logits_NV.float().log_softmax(1)
    own_N1 = logits_NV.gather(1, token_N[:, None])
    id_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    before_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (id_V < token_N[:, None]))
    top_NK = _top_ids(logits_NV, num_top)
    logprob_N = logprob_NV.gather(1, token_N[:, None])[:, 0]
    return logprob_N, before_NV.sum(1) + 1, top_NK, logprob_NV.gather(1, top_NK)


def _top_ids(logits_NV: Tensor, num_top: int) -> Tensor:
    """Largest first, equals by id: `topk` alone leaves the order of equals open."""
    if logits_NV.dtype != torch.float32:
        order_NV: Tensor = logits_NV.argsort(dim=1, descending=True, stable=True)
        return order_NV[:, :num_top]
    # fp32 bits, turned so that they order as integers, above the id, turned so that the lowest is largest.
    # Adding zero makes one zero of two.
    bits_NV = (logits_NV + 0.0).view(torch.int32)
    bits_NV = bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)
    last = logits_NV.shape[1] - 1
    key_NV = bits_NV.long() * 2**32 + torch.arange(last, -1, -1, device=logits_NV.device)
    low_NK: Tensor = key_NV.topk(num_top, 1).values & 0xFFFFFFFF
    return last - low_NK


def _shift(x_R: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    shifted_R: Tensor = (x_R >> bits) & (2 ** (64 - bits) - 1)
    return shifted_R


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
