"""The norm of the residual stream as an input not yet computed: the first projection of it may do so in its own launch.

Shape letters: T tokens of the step, D hidden width, O and P widths of projections.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.linear.api import Ready, linear, linear_beside, norm_linear
from deltaserve.ops.norm.api import add_gemma_rms_norm


class Normed:
    """The norm of `x + residual`, and that sum, [T, D] both; computed once, by whoever asks first.

    x may be [T, K, D], rows yet to be added up (see `add_gemma_rms_norm`). `quantizes`: a product with quantised
    weights takes the norm that is not made by `project`.
    """

    def __init__(
        self, x_TD: Tensor, residual_TD: Tensor, weight_plus_one_D: Tensor, eps: float, quantizes: bool = False
    ) -> None:
        self._input = x_TD, residual_TD, weight_plus_one_D, eps
        self._quantizes = quantizes
        self._made: tuple[Tensor, Tensor] | None = None
        self.ready: Ready | None = None
        """The norm quantised, if it was made and that was worth it."""

    def project(
        self, weight_OD: Tensor, scale_od: Tensor | None, beside_PD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Its products with a weight, [T, O], and with a second, plain one, [T, P]."""
        if self._made is None:
            y_TO, y_TP, norm_TD, total_TD, self.ready = norm_linear(
                *self._input, weight_OD, scale_od, beside_PD, self._quantizes
            )
            self._made = norm_TD, total_TD
            return y_TO, y_TP
        if beside_PD is None:
            return linear(self.norm, weight_OD, scale_od), None
        return linear_beside(self.norm, weight_OD, scale_od, beside_PD)

    @property
    def norm(self) -> Tensor:
        """[T, D]"""
        return self._both()[0]

    @property
    def total(self) -> Tensor:
        """[T, D]: the residual stream for the next norm."""
        return self._both()[1]

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._made is None:
            self._made = add_gemma_rms_norm(*self._input)
        return self._made
