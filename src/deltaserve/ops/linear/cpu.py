"""Projections on a CPU that kernels compute rather than torch: of few rows, in float32. Knows no kernel's inside."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.cpu import LANES, is_worth_threads, kernels, takes_tensors

MAX_ROWS = 16
"""Rows up to which a kernel is faster than a library, whose calls cost more than they compute."""


def takes(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `linear` computes this product."""
    shape = x_TI.shape
    return (
        len(shape) == 2
        and shape[0] <= MAX_ROWS
        and takes_tensors(x_TI, weight_OI)
        and x_TI.stride(1) == 1
        and weight_OI.stride() == (1, weight_OI.shape[0])
        and not is_worth_threads(shape[0] * weight_OI.numel())
    )


def takes_norm(
    x_TI: Tensor, residual_TI: Tensor, weight_plus_one_I: Tensor, weight_OI: Tensor, beside_PI: Tensor | None
) -> bool:
    """Whether `norm_linear` computes this."""
    return (
        takes(x_TI, weight_OI)
        and x_TI.shape[1] % LANES == 0
        and residual_TI.stride(1) == 1
        and takes_tensors(residual_TI, weight_plus_one_I)
        and (beside_PI is None or takes(x_TI, beside_PI))
    )


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `api.linear`."""
    y_TO: Tensor = kernels("linear.numba_linear").linear(x_TI, weight_OI)
    return y_TO


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor,
    weight_plus_one_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    beside_PI: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As `api.norm_linear`, without what is quantised."""
    made: tuple[Tensor, Tensor | None, Tensor, Tensor] = kernels("linear.numba_linear").norm_linear(
        x_TI, residual_TI, weight_plus_one_I, eps, weight_OI, beside_PI
    )
    return made
