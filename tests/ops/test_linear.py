"""The projection against float64."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.linear.api import linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_linear(tokens: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 48).to(dtype), torch.randn(10, 48).to(dtype)
    output = linear(x, weight)
    assert output.dtype == dtype
    eps = max(1e-12, 16 * float(torch.finfo(dtype).eps))
    expected = torch.einsum("ti,oi->to", x.double(), weight.double())
    torch.testing.assert_close(output.double(), expected, rtol=eps, atol=eps)


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(AssertionError, match="48 wide, the weight expects 47"):
        linear(torch.zeros(1, 48), torch.zeros(3, 47))
