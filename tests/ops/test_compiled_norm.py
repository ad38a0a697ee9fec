"""The norm of the residual stream compiled for GPUs that are not there, at the 80B model's shapes."""

from __future__ import annotations

import pytest

from deltaserve.ops.norm.triton_norm import gated_norm_kernel, norm_kernel, tile
from tests.ops.compiled import TARGETS, compile_for

WAYS = {"sm_90": 1, "sm_80": 2, "gfx942": 2}
"""How each sees e4m3."""


@pytest.mark.parametrize("quantizes", [True, False])
@pytest.mark.parametrize("addends", [0, 11])
@pytest.mark.parametrize("target", TARGETS)
def test_norm(target: str, addends: int, quantizes: bool) -> None:
    """Spills nothing, and asks for all rows that it adds up before the first of them is there."""
    rows, block, warps = tile(2048)
    way = WAYS[target] if quantizes else 0
    kinds = {"weight_ptr": "*fp32", "eps": "fp32", "q_ptr": {0: "*bf16", 1: "*fp8e4nv", 2: "*u8"}[way]}
    kinds |= {"scale_ptr": "*fp32" if way else "*bf16"}
    signature = {name: kinds.get(name, "*bf16" if name.endswith("ptr") else "i32") for name in norm_kernel.arg_names}
    constants = {"HEADS": 1, "WIDTH": 2048, "ROWS": rows, "BLOCK_D": block, "ADDENDS": addends}
    constants["HAS_RESIDUAL"] = quantizes or addends > 0
    found = compile_for(
        TARGETS[target],
        norm_kernel,
        signature,
        {**constants, "FP8": way, "BY_ROW": addends == 0, "EARLY": target == "sm_90"},
        warps,
    )
    assert found.spilled == 0
    assert found.registers <= 128
    assert found.shared <= 8 << 10
    if target == "sm_90":
        assert found.assembly.count("ld.global.v4.b32") >= max(1, addends)


@pytest.mark.parametrize(("is_plain", "quantizes"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("target", TARGETS)
def test_gated_norm(target: str, is_plain: bool, quantizes: bool) -> None:
    rows, block, warps = tile(128)
    way = WAYS[target] if quantizes else 0
    kernel = gated_norm_kernel
    kinds = {"eps": "fp32", "q_ptr": {0: "*bf16", 1: "*fp8e4nv", 2: "*u8"}[way]}
    kinds |= {"scale_ptr": "*fp32" if way else "*bf16"}
    signature = {name: kinds.get(name, "*bf16" if name.endswith("ptr") else "i32") for name in kernel.arg_names}
    constants = {"HEADS": 32, "WIDTH": 128, "ROWS": rows, "BLOCK_D": block, "PLAIN": is_plain, "FP8": way}
    found = compile_for(TARGETS[target], kernel, signature, constants, warps)
    assert found.spilled == 0
    assert found.registers <= 128
    if target == "sm_90":
        assert found.assembly.count("st.global.v4.b32") == is_plain
