"""What the kernels of the convolution take of GPUs, at the 80B model's shapes."""

from __future__ import annotations

import pytest

from deltaserve.ops.conv import triton_conv
from tests.ops.compiled import TARGETS, compile_for


@pytest.mark.parametrize("heads", [16, 0])
@pytest.mark.parametrize("target", TARGETS)
def test_conv(target: str, heads: int) -> None:
    kernel = triton_conv.conv_kernel
    signature = dict.fromkeys(kernel.arg_names, "*bf16") | {"write_slot": "*i64", "table": "*i32"}
    signature |= dict.fromkeys(("x_stride", "channel_stride", "tap_stride"), "i32")
    constants = {
        "C": 8192,
        "TAPS": 4,
        "HEADS": heads,
        "WIDTH": 128,
        "REST": 128,
        "CHUNK": 64,
        "BC": 128,
        "GROUPS": 8,
        "FAST": 1 if target == "gfx942" else 2,
    }
    constants |= {"channel_stride": 1, "tap_stride": 8192}
    taken = compile_for(TARGETS[target], kernel, signature, constants, num_warps=4)
    assert taken.spilled == 0
    assert taken.shared <= 32 << 10


@pytest.mark.parametrize("target", TARGETS)
def test_windows(target: str) -> None:
    kernel = triton_conv.window_kernel
    signature = {"pool": "*bf16", "read_slot": "*i64", "windows": "*bf16", "row_start": "i32"}
    taken = compile_for(TARGETS[target], kernel, signature, {"SIZE": 3 * 8192, "BLOCK": 2048})
    assert taken.spilled == 0
    assert taken.shared == 0
