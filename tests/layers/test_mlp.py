"""Gate rows first, then up rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from deltaserve.layers.mlp import SwiGLU
from tests.layers.filled import CPU, F64, filled


def test_swiglu() -> None:
    layer = filled(SwiGLU(6, 4, F64, CPU))
    x_TD = torch.randn(3, 6, dtype=F64)
    gate, up = layer.gate_up_proj.weight[:4], layer.gate_up_proj.weight[4:]
    expected = (functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ layer.down_proj.weight.T
    torch.testing.assert_close(layer(x_TD), expected)
