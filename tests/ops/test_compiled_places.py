"""The kernels of places, compiled for GPUs that are not there: small, and none holds more than a warp can."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.ops.places import triton_places as places
from tests.ops.compiled import TARGETS, compile_for

SIZES: dict[str, Any] = {
    "BLOCK": 64, "SPAN": places.SPAN, "TOKENS": places.TOKENS, "ROWS": places.ROWS, "WIDTH": 2048,
    "COLUMNS": places.COLUMNS,
}  # fmt: skip
INTS = "block_table_ptr", "table_ptr", "context_ptr", "entry_context_ptr"
STATES = "pool_ptr", "hidden_ptr", "before_ptr"
KERNELS = [
    places.begin_kernel, places.entries_kernel, places.next_kernel, places.remember_kernel, places.note_kernel,
    places.carry_kernel,
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_places(kernel: Any, target: str) -> None:
    kinds = {name: "*i64" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    kinds |= dict.fromkeys(INTS, "*i32") | (dict.fromkeys(STATES, "*bf16") if kernel is places.carry_kernel else {})
    constants = {name: size for name, size in SIZES.items() if name in kernel.arg_names}
    warps = 4 if kernel is places.carry_kernel else 1
    found = compile_for(TARGETS[target], kernel, kinds, constants, num_warps=warps)
    assert found.spilled == 0
    assert found.registers <= 255
