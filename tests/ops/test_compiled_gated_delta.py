"""What the kernels of the gated delta net take of GPUs, at the 80B model's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from triton.experimental.gluon import language as gl

from deltaserve.ops.gated_delta import triton_chunk, triton_hopper, triton_ring, triton_step
from tests.ops.compiled import TARGETS, compile_for, innermost_loops, instructions

SHAPES = {"KH": 16, "VH": 32, "K": 128, "V": 128, "BK": 128}
SHARED_KIB = {"sm_90": 227, "sm_80": 163, "gfx942": 64}


def signature(kernel: Any, state: str = "fp32", **others: str) -> dict[str, str]:
    """Numbers are i32 and tensors bf16, but for those that have a kind of their own."""
    kinds = dict.fromkeys(("A_log", "dt_bias", "norm_weight", "gates"), "*fp32")
    kinds |= dict.fromkeys(("read_slot", "write_slot", "position"), "*i64")
    kinds |= dict.fromkeys(("arrivals", "cu_seqlens", "table"), "*i32")
    kinds |= dict.fromkeys(("tokens", "length", "token_start", "row_start"), "i32")
    kinds |= dict.fromkeys(("mixed_stride", "z_stride", "a_stride", "b_stride", "q_stride"), "i32")
    kinds |= {"state_pool": f"*{state}", "pool": f"*{state}", **others}
    return {name: kinds.get(name, "*bf16") for name in kernel.arg_names}


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize(("is_one", "quantizes"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("target", TARGETS)
def test_step(target: str, is_one: bool, quantizes: bool, state: str) -> None:
    """Everything in registers, of which two programs share a multiprocessor's."""
    kernel = triton_step.step_kernel
    constants: dict[str, Any] = {**SHAPES, "BV": 128, "eps": 1e-6, "ONE": is_one, "RAGGED": False}
    constants |= triton_step.tile(128, 128, 4 if state == "fp32" else 2)
    num_warps = constants.pop("num_warps")
    constants["EARLY"] = target == "sm_90"
    constants["FP8"] = way = 0 if not quantizes else 1 if target == "sm_90" else 2
    quantized = {"q_out": {0: "*bf16", 1: "*fp8e4nv", 2: "*u8"}[way], "q_scale": "*fp32" if way else "*bf16"}
    kinds = signature(kernel, state, **quantized)
    taken = compile_for(TARGETS[target], kernel, kinds, constants, num_warps=num_warps)
    assert taken.spilled <= (64 if target == "gfx942" else 8)  # Triton 3.9: none on AMD; 3.6: some
    assert taken.registers <= (512 if target == "gfx942" else 255)
    assert taken.shared <= 8 << 10
    if target != "gfx942":
        loads = 32 if state == "fp32" else 16
        assert taken.assembly.count("ld.global.v4.b32") >= loads
        assert taken.assembly.count("st.global.v4.b32") >= loads


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_ring(state: str) -> None:
    """Two programs share a multiprocessor, and states come as boxes."""
    wide = 4 if state == "fp32" else 8
    box = f"tensordesc<{state}[128, 128],{gl.NVMMASharedLayout(512 // wide, 128 // wide, 2)!r}>"
    others = {"desc": box, "rows": "i32", "beyond": "i32", "q_out": "*fp8e4nv", "q_scale": "*fp32"}
    constants = {"KH": 16, "VH": 32, "K": 128, "V": 128, "eps": 1e-6, "E": wide, "S": wide // 4, "FP8": 1}
    kinds = signature(triton_ring.ring_kernel, state, **others)
    taken = compile_for(TARGETS["sm_90"], triton_ring.ring_kernel, kinds, constants | {"EARLY": True})
    assert taken.spilled <= 64
    assert taken.registers <= 255
    assert 2 * (taken.shared + 1024) <= 228 << 10
    assert taken.assembly.count("st.global.v4.b32") >= 128 // wide
    assert taken.assembly.count("ld.shared.v4.b32") >= 128 // wide
    before, _ = taken.assembly.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor.2d" in before, "states wait for the input"
    assert "st.global" not in before, "others may still read what is written"


FAST = {"sm_90": 2, "sm_80": 2, "gfx942": 1}
"""As `fast_way` says."""


@pytest.mark.parametrize(("target", "size"), [("sm_90", 16), ("sm_80", 16), ("gfx942", 2)])
def test_prepare(target: str, size: int) -> None:
    kernel = triton_chunk.prepare_kernel
    constants = {**SHAPES, "BV": 128, "CHUNK": 64, "EXACT": False, "FAST": FAST[target], "SIZE": size}
    taken = compile_for(TARGETS[target], kernel, signature(kernel), constants, num_warps=4, num_stages=1)
    assert taken.spilled <= 64
    assert taken.shared <= SHARED_KIB[target] << 10
    if target == "sm_90":
        assert taken.assembly.count("wgmma.mma_async") == 40


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_pass(target: str, state: str) -> None:
    kernel = triton_chunk.pass_kernel
    constants = {**SHAPES, "BW": 64 if target == "sm_90" else 32, "CHUNK": 64, "EXACT": False}
    stages = {"sm_90": 3, "sm_80": 2, "gfx942": 1}[target]
    taken = compile_for(TARGETS[target], kernel, signature(kernel, state), constants, 4, stages)
    assert taken.spilled <= {"sm_90": 64, "sm_80": 0, "gfx942": 256}[target]
    assert taken.shared <= SHARED_KIB[target] << 10
    if target == "sm_90":
        assert "wgmma" in taken.assembly
        assert "cp.async" in taken.assembly


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_pass_on_hopper(state: str) -> None:
    """What carries the state on waits for nothing but its products, and loads a number only for its next turn."""
    config, kernel = triton_chunk.HopperConfig(), triton_hopper.relay_kernel

    def box(columns: int) -> str:
        return f"tensordesc<bf16[64, {columns}],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    kinds = {"mixed_desc": box(128), "u_desc": box(64), "w_desc": box(128), "p_desc": box(64), "out_ptr": "*bf16"}
    kinds |= {"gates_ptr": "*fp32", "pool_ptr": f"*{state}", "cu_ptr": "*i32"}
    kinds |= dict.fromkeys(("tokens", "row_start", "num_pieces"), "i32")
    kinds |= dict.fromkeys(("position_ptr", "read_slot_ptr", "write_slot_ptr"), "*i64")
    constants = {"KH": 16, "VH": 32, "STAGES": config.stages, "OUT_STAGES": config.out_stages}
    taken = compile_for(TARGETS["sm_90"], kernel, kinds, {**constants, "RELAYS": config.relays}, 4)
    assert taken.shared <= SHARED_KIB["sm_90"] << 10
    assert taken.registers == 168, "three groups of 128 threads share the registers"
    assert taken.spilled <= 96, "of what loops do not touch"
    loops = [loop for loop in innermost_loops(instructions(taken)) if "HGMMA" in loop]
    assert len(loops) == 2
    for loop in loops:
        assert loop.count("HGMMA") == 12
        assert loop.count("WARPGROUP.DEPBAR") <= 3, "products wait for each other"
        assert loop.count("STL") + loop.count("LDL") <= 2
        assert "R2UR" not in loop, "a number that is loaded is waited for at once"
