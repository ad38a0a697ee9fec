"""Dense projection. Knows nothing of what is projected or why.

Shape letters: T tokens, I input width, O output width.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.linear import reference


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight.T`, without bias.

    Name        Shape    Dtype       Meaning
    x           [T, I]   any float   input
    weight      [O, I]   as x        one row per output, as checkpoints store it
    returns     [T, O]   as x
    """
    assert x_TI.shape[-1] == weight_OI.shape[1], (
        f"linear: the input is {x_TI.shape[-1]} wide, the weight expects {weight_OI.shape[1]}"
    )
    return reference.linear(x_TI, weight_OI)
