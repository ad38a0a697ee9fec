"""Gated delta nets on a CPU that a kernel computes rather than torch: in float32. Knows no kernel's inside."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.cpu import LANES, is_worth_threads, kernels, takes_tensors
from deltaserve.ops.layout import Layout

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""mixed, z, b, a, conv_weight, A_log, dt_bias and norm_weight of `api.gated_delta_net`."""


FEW_THREADS, MANY_THREADS = 2, 6
"""That torch needs to be as fast: for chunks of large states, which are products, and for all else."""
LARGE_STATE = 96 * 96


def takes(parts: Parts, conv_pool_SWC: Tensor, state_pool_SVKD: Tensor, layout: Layout) -> bool:
    """Whether `net` computes this."""
    (mixed_TC, z_TX, b_TV, a_TV, conv_weight_CW, *_), (v_heads, k_dim, v_dim) = parts, state_pool_SVKD.shape[1:]
    has_products = k_dim * v_dim >= LARGE_STATE and not all(segment.is_step for segment in layout.segments)
    return (
        k_dim % LANES == v_dim % LANES == 0
        and takes_tensors(*parts, conv_pool_SWC, state_pool_SVKD)
        and mixed_TC.stride(1) == z_TX.stride(1) == b_TV.stride(1) == a_TV.stride(1) == 1
        and conv_weight_CW.stride() == (1, mixed_TC.shape[1])
        and conv_pool_SWC.is_contiguous()
        and state_pool_SVKD.is_contiguous()
        and not is_worth_threads(
            mixed_TC.shape[0] * v_heads * k_dim * v_dim, FEW_THREADS if has_products else MANY_THREADS
        )
    )


def net(parts: Parts, eps: float, conv_pool_SWC: Tensor, state_pool_SVKD: Tensor, layout: Layout) -> Tensor:
    """As `api.gated_delta_net`."""
    out: Tensor = kernels("gated_delta.numba_net").net(*parts, eps, conv_pool_SWC, state_pool_SVKD, layout)
    return out
