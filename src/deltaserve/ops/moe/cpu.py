"""Mixtures of experts on a CPU that a kernel computes rather than torch: in float32, with a shared expert apart. Knows
no kernel's inside."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.cpu import LANES, is_worth_threads, kernels, takes_tensors


def takes(x_TD: Tensor, scores_TF: Tensor, w13: Tensor, w2: Tensor, top_k: int, shared: tuple[Tensor, Tensor]) -> bool:
    """Whether `sparse_moe` computes this."""
    (num_held, width, inner), shared_inner = w2.shape, shared[1].shape[1]
    return (
        num_held == scores_TF.shape[1] - 1
        and width % LANES == inner % LANES == shared_inner % LANES == 0
        and takes_tensors(x_TD, scores_TF, w13, w2, *shared)
        and x_TD.stride(1) == scores_TF.stride(1) == 1
        and w13.stride() == (2 * inner * width, 1, 2 * inner)
        and w2.stride() == (width * inner, 1, width)
        and shared[0].stride() == (1, 2 * shared_inner)
        and shared[1].stride() == (1, width)
        and not is_worth_threads(x_TD.shape[0] * (top_k * inner + shared_inner) * 3 * width)
    )


def sparse_moe(
    x_TD: Tensor,
    scores_TF: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalize: bool,
    shared: tuple[Tensor, Tensor],
) -> Tensor:
    """As `api.sparse_moe`."""
    out: Tensor = kernels("moe.numba_moe").sparse_moe(x_TD, scores_TF, w13, w2, top_k, renormalize, shared)
    return out
