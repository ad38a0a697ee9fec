"""The kernels of attention and of the norms, compiled for GPUs that are not there, at the large model's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from triton.experimental.gluon import language as gl

from deltaserve.ops.attention import triton_chunk, triton_entry, triton_hopper, triton_join, triton_step
from deltaserve.ops.gpu import Properties
from tests.ops.compiled import TARGETS, Resources, compile_for, innermost_loops, instructions

DEVICES = {
    "sm_90": Properties(132, 227 << 10, True, True),
    "sm_80": Properties(108, 163 << 10, False, False),
    "gfx942": Properties(304, 64 << 10, False, False),
}
FLAGS = {"HAS_GATE": True, "UPCAST": False}
STRIDES = {"gate_stride": 9216, "plane_stride": 1 << 30}
"""Multiples of 16, as a launch finds out."""
ATTENTION = {
    **FLAGS,
    **STRIDES,
    "NUM_Q": 16,
    "NUM_KV": 2,
    "WIDTH": 256,
    "SHARING": 8,
    "BLOCK_P": 8,
    "BLOCK_D": 256,
    "BLOCK": 64,
}


def signature(kernel: Any, dtype: str, others: dict[str, str]) -> dict[str, str]:
    """Pointers are to `dtype` and numbers int32 unless `others` says so."""
    return {name: others.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}


def compile_step(target: str, queries: int, dtype: str = "bf16", has_first_key: bool = False) -> Resources:
    config = triton_step.choose(DEVICES[target], queries, 256, 4 if dtype == "fp32" else 2)
    constants = {**ATTENTION, "BLOCK_M": queries, "KEYS": config.keys, "SPAN": 128, "HAS_FIRST_KEY": has_first_key}
    constants["EARLY"] = target == "sm_90"
    others = {
        "table_ptr": "*i32", "context_ptr": "*i32", "first_key_ptr": "*i32", "acc_ptr": "*fp32", "peak_ptr": "*fp32",
        "scale": "fp32",
    }  # fmt: skip
    kernel = triton_step.step_kernel
    types = signature(kernel, dtype, others)
    return compile_for(TARGETS[target], kernel, types, constants, config.warps, config.stages)


def assert_fits(found: Resources, target: str, spilled: int = 0) -> None:
    assert found.spilled <= spilled, f"{found.spilled} spilled"
    assert found.shared <= DEVICES[target].shared_bytes, f"{found.shared} bytes of shared memory"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("queries", "has_first_key"), [(16, False), (32, False), (32, True)])
def test_step(target: str, queries: int, has_first_key: bool) -> None:
    found = compile_step(target, queries, has_first_key=has_first_key)
    assert_fits(found, target)
    if target == "sm_90":
        assert found.registers <= 255
        assert found.shared <= 113 << 10, "two programs to a multiprocessor"
        assert "cp.async.cg.shared.global" in found.assembly, "keys and values are not read ahead"


@pytest.mark.parametrize("target", TARGETS)
def test_step_of_nine_tokens(target: str) -> None:
    assert_fits(compile_step(target, 128), target, spilled=128)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("target", TARGETS)
def test_join(target: str, tokens: int) -> None:
    kernel = triton_step.join_kernel
    slice, parts = triton_step.join_tile(tokens, 256)
    constants = {
        "NUM_Q": 16, "WIDTH": 256, "SLICE": slice, "PARTS": parts, "BLOCK": 64, "SPAN": 128, "HAS_GATE": True,
        "EARLY": target == "sm_90",
    }  # fmt: skip
    others = {"context_ptr": "*i32", "acc_ptr": "*fp32", "peak_ptr": "*fp32"}
    assert_fits(compile_for(TARGETS[target], kernel, signature(kernel, "bf16", others), constants), target)


@pytest.mark.parametrize("target", TARGETS)
def test_join_of_tiles(target: str) -> None:
    kernel = triton_join.join_kernel
    constants = {
        "NUM_Q": 16, "NUM_KV": 2, "WIDTH": 256, "BLOCK_P": 8, "QUERIES": 128, "PARTS": 16, "BLOCK": 64, "SPAN": 128,
        "HAS_GATE": True, "EARLY": target == "sm_90",
    }  # fmt: skip
    others = {"cu_ptr": "*i32", "context_ptr": "*i32", "acc_ptr": "*fp32", "peak_ptr": "*fp32"}
    assert_fits(compile_for(TARGETS[target], kernel, signature(kernel, "bf16", others), constants), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "has_first_key"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_chunk(dtype: str, has_first_key: bool, target: str) -> None:
    config = triton_chunk.choose(DEVICES[target], 256, 4 if dtype == "fp32" else 2)
    constants = {**ATTENTION, "BLOCK_M": config.queries, "KEYS": config.keys, "HAS_FIRST_KEY": has_first_key}
    pointers = ("cu_ptr", "table_ptr", "context_ptr", "first_key_ptr")
    others = {"scale": "fp32", **dict.fromkeys(pointers, "*i32")}
    kernel = triton_chunk.chunk_kernel
    types = signature(kernel, dtype, others)
    found = compile_for(TARGETS[target], kernel, types, constants, config.warps, config.stages)
    # Half of the registers hold the product: addresses wait for the end of the loop in memory.
    assert_fits(found, target, spilled=(160 if has_first_key else 128) if dtype == "bf16" else 0)
    if target == "sm_90" and dtype == "bf16":
        assert "wgmma.mma_async" in found.assembly


@pytest.mark.parametrize(
    ("dtype", "has_first_key", "slack", "is_cut"),
    [("bf16", False, 0, False), ("fp16", True, 8, False), ("bf16", True, 8, True)],
)
def test_chunk_on_hopper(dtype: str, has_first_key: bool, slack: int, is_cut: bool) -> None:
    constants = {"K_STAGES": 3, "V_STAGES": 2, "KEYS": 64, "HAS_FIRST_KEY": has_first_key, "HAS_GATE": True}
    constants |= {"SLACK": slack, "HELD": 0, "IS_CUT": is_cut}
    constants |= {name: ATTENTION[name] for name in ("NUM_Q", "WIDTH", "SHARING", "BLOCK_P", "gate_stride")}
    kernel = triton_hopper.hopper_kernel
    box = f"tensordesc<{dtype}[64, 256],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    pointers = ("cu_ptr", "table_ptr", "context_ptr", "first_key_ptr")
    sums = dict.fromkeys(("acc_ptr", "peak_ptr"), "*fp32")
    others = {"scale": "fp32", "k_desc": box, "v_desc": box, **dict.fromkeys(pointers, "*i32"), **sums}
    found = compile_for(TARGETS["sm_90"], kernel, signature(kernel, dtype, others), constants)
    assert_fits(found, "sm_90", spilled=320)
    assert found.registers == 168, "three groups of 128 threads share the registers"
    code = instructions(found)
    assert code.count("HGMMA") > 4 * code.count("WARPGROUP.DEPBAR"), "products wait for each other"
    loops = [loop for loop in innermost_loops(code) if "HGMMA" in loop]
    assert len(loops) == (6 if has_first_key else 4), "of two groups, masked and not"
    for loop in loops:
        assert loop.count("HGMMA") == 20
        assert loop.count("STL") + loop.count("LDL") <= 1, "registers are spilled where it counts"


@pytest.mark.parametrize("heads", [triton_entry.HEADS, triton_entry.MANY_HEADS])
@pytest.mark.parametrize("target", TARGETS)
def test_entry(target: str, heads: int) -> None:
    kernel = triton_entry.entry_kernel
    constants = {
        "NUM_Q": 16, "NUM_KV": 2, "WIDTH": 256, "ROTARY": 64, "HEADS": heads, "BLOCK_G": 2, "BLOCK_D": 256,
        "BLOCK_R": 32, "IS_PLAIN": False, "EARLY": target == "sm_90",
    }  # fmt: skip
    others = {
        "q_weight_ptr": "*fp32", "k_weight_ptr": "*fp32", "cos_sin_ptr": "*fp32", "position_ptr": "*i64",
        "kv_index_ptr": "*i64", "eps": "fp32",
    }  # fmt: skip
    assert_fits(compile_for(TARGETS[target], kernel, signature(kernel, "bf16", others), constants, 4), target)
