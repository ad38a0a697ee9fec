"""Root-mean-square norms over the last dimension. Know nothing of layers or residual streams.

Two kinds of weight meet here. A *Gemma* norm's checkpoint stores w and means 1 + w: whoever loads it adds the one,
once, in fp32, because bf16 would lose the small w. The norm inside a gated delta net stores its weight plainly.

Shape letters: D width, V width of a value head; `...` any leading dimensions (tokens; tokens and heads).
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.cpu import LANES, kernels, takes_tensors
from deltaserve.ops.gpu import has_kernels
from deltaserve.ops.norm import reference


def gemma_rms_norm(x_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * (1 + w)`, in fp32 (fp64 for fp64 input), cast after the product.

    Name               Shape      Dtype       Meaning
    x                  [..., D]   any float   input
    weight_plus_one    [D]        float32     1 + the checkpoint's weight (float64 for float64 input is fine)
    returns            [..., D]   as x
    """
    _check(x_D, weight_plus_one_D)
    if has_kernels(x_D):
        from deltaserve.ops.norm import triton_norm

        return triton_norm.norm_rows(x_D, weight_plus_one_D, eps)
    is_whole = x_D.shape[-1] % LANES == 0 and x_D.is_contiguous() and weight_plus_one_D.is_contiguous()
    if is_whole and takes_tensors(x_D, weight_plus_one_D):
        normed_D: Tensor = kernels("norm.numba_norm").norm(x_D, weight_plus_one_D, eps)
        return normed_D
    return reference.gemma_rms_norm(x_D, weight_plus_one_D, eps)


def add_gemma_rms_norm(x_D: Tensor, residual_D: Tensor, weight_plus_one_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual + x`, and its Gemma norm.

    Name               Shape      Dtype       Meaning
    x                  [..., D]   any float   what a layer adds to the residual stream; or [..., K, D], K rows whose sum
                                              it is, added up in fp32 in their order and rounded to residual's dtype
    residual           [..., D]   any float   the stream before it
    weight_plus_one    [D]        float32     1 + the checkpoint's weight
    returns            [..., D]   residual's  the norm of the sum, rounded to that dtype first
                       [..., D]   residual's  the sum: the stream after it
    """
    is_alike = residual_D.shape in (x_D.shape, x_D.shape[:-2] + x_D.shape[-1:])
    assert is_alike, f"norm: x is {tuple(x_D.shape)}, the residual {tuple(residual_D.shape)}"
    _check(x_D, weight_plus_one_D)
    if has_kernels(x_D):
        from deltaserve.ops.norm import triton_norm

        return triton_norm.add_norm_rows(x_D, residual_D, weight_plus_one_D, eps)
    if x_D.dim() > residual_D.dim():
        x_D = reference.add_up(x_D, residual_D.dtype)
    given = x_D, residual_D, weight_plus_one_D
    is_whole = x_D.shape[-1] % LANES == 0 and all(x.is_contiguous() for x in given)
    if is_whole and takes_tensors(x_D, residual_D, weight_plus_one_D):
        both: tuple[Tensor, Tensor] = kernels("norm.numba_norm").add_norm(x_D, residual_D, weight_plus_one_D, eps)
        return both
    return reference.add_gemma_rms_norm(x_D, residual_D, weight_plus_one_D, eps)


def gated_rms_norm(x_V: Tensor, z_V: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`w * x / rms(x) * silu(z)`: norm before gate, all in fp32 (fp64 for fp64 input), cast at the end.

    Name       Shape      Dtype       Meaning
    x          [..., V]   any float   output of the recurrence, one row per token and head
    z          [..., V]   any float   gate before its activation
    weight     [V]        any float   plain weight: nothing is added to it
    returns    [..., V]   as x
    """
    assert x_V.shape == z_V.shape, f"norm: x is {tuple(x_V.shape)}, the gate {tuple(z_V.shape)}"
    _check(x_V, weight_V)
    if has_kernels(x_V):
        from deltaserve.ops.norm import triton_norm

        return triton_norm.gated_norm_rows(x_V, z_V, weight_V, eps)
    return reference.gated_rms_norm(x_V, z_V, weight_V, eps)


def _check(x_D: Tensor, weight_D: Tensor) -> None:
    assert x_D.shape[-1:] == weight_D.shape, (
        f"norm: the input is {x_D.shape[-1]} wide, the weight has shape {tuple(weight_D.shape)}"
    )
