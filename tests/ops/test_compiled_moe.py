"""Kernels of the mixture of experts compiled for GPUs that are not there: they fit, spill nothing, and load wide."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.experimental.gluon import language as gl

from deltaserve.ops.moe import triton_groups, triton_pairs, triton_roles
from deltaserve.ops.moe.triton_groups import Tiles, choose_tiles
from deltaserve.ops.moe.triton_members import count_kernel, group_kernel, place_kernel, sum_kernel
from deltaserve.ops.moe.triton_route import route_kernel
from tests.ops.compiled import TARGETS, Resources, compile_for

SHARED = {"sm_90": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}
TYPES = {0: "*bf16", 1: "*fp8e4nv", 2: "*u8"}
WAYS = {"sm_90": 1, "sm_80": 2, "gfx942": 2}
"""How each sees e4m3."""
CHOSEN = choose_tiles(11 * 8192, 513, True, SHARED["sm_90"], roles=True)
SHAPE: dict[str, Any] = {"WIDTH": 2048, "INNER": 512}


def signature_of(way: int, ready: bool, out: str, **others: str) -> dict[str, str]:
    weight, inner = TYPES[way], TYPES[way] if ready else "*bf16"
    scale = "*fp32" if way else weight
    inputs = {"x_ptr": inner, "x_scale_ptr": "*fp32" if ready else weight}
    inside = {"h_ptr": inner, "h_scale_ptr": "*fp32" if ready else weight}
    tables = {"members_ptr": "*i32", "experts_ptr": "*i32", "count_ptr": "*i32", "ids_ptr": "*i32"}
    weights = {"w_ptr": weight, "w_scale_ptr": scale, "scale_ptr": scale, "weights_ptr": "*fp32", "y_ptr": out}
    return inputs | inside | tables | weights | others


def compile_groups(target: str, tiles: Tiles, way: int, direct: int = 0) -> tuple[Resources, Resources]:
    ready = tiles.ready and way > 0
    makes_ready = ready and tiles.inner == 128
    constants = SHAPE | {"BM": tiles.pairs, "BK": 128 if way else 64, "FP8": way, "READY": ready}
    constants |= {"EARLY": target == "sm_90", "DIRECT": direct, "K": 11}
    gate_up = compile_for(
        TARGETS[target],
        triton_groups.gate_up_kernel,
        signature_of(way, makes_ready, "*fp32", stride="i32", pairs="i32")
        | {"x_ptr": TYPES[way] if ready else "*bf16", "x_scale_ptr": "*fp32" if ready else TYPES[way]},
        constants | {"BI": tiles.inner, "BK": tiles.step if ready else constants["BK"], "TYPE": tl.bfloat16},
        tiles.warps,
        tiles.stages,
    )
    down = compile_for(
        TARGETS[target],
        triton_groups.down_kernel,
        signature_of(way, makes_ready, "*bf16" if ready else "*fp32", pairs="i32"),
        constants | {"READY": makes_ready} | {"BO": tiles.outputs},
        tiles.down_warps or tiles.warps,
        tiles.down_stages or tiles.stages,
    )
    return gate_up, down


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_groups(target: str, quantized: bool) -> None:
    for tokens in (8, 32, 512, 8192):
        tiles = choose_tiles(11 * tokens, 513, quantized, SHARED[target])
        kernels = compile_groups(target, tiles, WAYS[target] if quantized else 0, 16 if tokens == 8 else 0)
        for found, warps in zip(kernels, (tiles.warps, tiles.down_warps or tiles.warps), strict=True):
            full = target == "sm_90" and tiles.pairs == 64  # two programs of 4 warps share all registers
            assert found.spilled <= (128 if full else 0), tiles
            assert found.shared <= SHARED[target], tiles
            if target == "sm_90":
                assert "wgmma.mma_async" in found.assembly
                assert "cp.async.cg" in found.assembly
                # As many share a multiprocessor as shared memory lets, or two.
                by_memory = (228 << 10) // (found.shared + 1024)
                assert programs_of(found, warps) >= min(2, by_memory)
                assert found.registers <= (255 if full else 200)


def test_warps_have_roles_where_experts_have_many_pairs() -> None:
    sizes = [choose_tiles(11 * t, 513, True, SHARED["sm_90"], True).pairs for t in (256, 1024, 1490, 1500, 2048, 8192)]
    assert sizes == [16, 32, 32, 192, 192, 192]
    assert not choose_tiles(11 * 8192, 513, False, SHARED["sm_90"], True).roles, "weights that are not quantised"


def programs_of(found: Resources, warps: int = 4) -> int:
    """That share a multiprocessor of an H200."""
    return min(65536 // (-(-found.registers // 8) * 8 * 32 * warps), (228 << 10) // (found.shared + 1024))


def test_experts_of_eight_tokens_are_computed_all_at_once() -> None:
    """Of 88 pairs at most 84 have a tile: 7 share the last expert's. Those of a second turn would run alone."""
    tiles = choose_tiles(88, 513, True, SHARED["sm_90"])
    gate_up, _ = compile_groups("sm_90", tiles, 1, 16)
    assert 132 * programs_of(gate_up) >= 88 * SHAPE["INNER"] // tiles.inner


def test_warps_with_roles() -> None:
    boxes = "tensordesc<fp8e4nv[{}, 128],{!r}>"
    signature = signature_of(1, True, "*bf16")
    gate_up = compile_for(
        TARGETS["sm_90"],
        triton_roles.gate_up_kernel,
        signature | {"w_desc": boxes.format(64, triton_roles.STAGES.value)},
        SHAPE | {"K": 11, "TYPE": gl.bfloat16, "S": CHOSEN.stages},
    )
    down = compile_for(
        TARGETS["sm_90"],
        triton_roles.down_kernel,
        signature | {"w_desc": boxes.format(128, triton_roles.STAGES.value)},
        SHAPE | {"S": CHOSEN.down_stages},
    )
    for found, num_boxes in ((gate_up, 2), (down, 1)):
        assert (found.spilled <= 128, found.shared <= SHARED["sm_90"]) == (True, True), found
        assert found.registers == 128, "16 warps share all registers, and hand them on"
        assert found.assembly.count("setmaxnreg.inc.sync.aligned.u32 \t160") == 2
        assert found.assembly.count("wgmma.mma_async") == 3 * 4, "three groups, each of a block in four"
        assert found.assembly.count("wgmma.wait_group") == 3
        assert found.assembly.count("cp.async.bulk.tensor.2d") == num_boxes
        assert found.assembly.count("cp.async.cg.shared.global") == 12, "16 bytes a thread"


@pytest.mark.parametrize("target", TARGETS)
def test_pairs(target: str) -> None:
    way = WAYS[target]
    gate_up = compile_for(
        TARGETS[target],
        triton_pairs.gate_up_kernel,
        signature_of(way, True, "*bf16", h_ptr="*bf16", token_stride="i32", block_stride="i32"),
        SHAPE | {"K": 11, "BI": 4, "BK": 2048, "FP8": way, "READY": True, "SHARED": 512, "EARLY": target == "sm_90"},
    )
    down = compile_for(
        TARGETS[target],
        triton_pairs.down_kernel,
        signature_of(way, False, "*fp32"),
        SHAPE | {"K": 11, "BD": 8, "J": 4, "IP": 512, "FP8": way, "EARLY": target == "sm_90"},
    )
    for found, loads in ((gate_up, 8), (down, 8)):
        assert found.spilled == 0
        assert found.shared <= 32 << 10
        if target == "sm_90":
            assert found.assembly.count("v4.b32") >= loads
    if target == "sm_90":
        assert 132 * programs_of(down) >= 2048 // 8 * 3, "programs of a second turn ask for their weights late"
        before, _ = gate_up.assembly.split("griddepcontrol.launch_dependents")
        assert "griddepcontrol.wait" in before, "`down` reads at once what is known when this kernel has waited"


@pytest.mark.parametrize("target", TARGETS)
def test_routing(target: str) -> None:
    way = WAYS[target]
    sizes = {"scores_ptr": "*bf16", "stride": "i32", "pairs": "i32", "out_ptr": "*bf16", "q_ptr": TYPES[way]}
    sizes |= {"scale_ptr": "*fp32", "place_ptr": "*i64"}
    tables = dict.fromkeys(("sorted_ptr", "expert_ptr", "turn_ptr", "first_ptr", "number_ptr", "given_ptr"), "*i32")
    signature = signature_of(0, False, "*fp32", **sizes, **tables)
    early = {"EARLY": target == "sm_90"}
    many = {"E": 513, "BM": 192, "BP": 512} | early
    route = {"E": 512, "K": 10, "EP": 512, "KP": 16, "RENORMALIZE": True, "SHARED": True} | early
    route |= {"INPUTS": 2048, "FP8": way, "IS_PADDED": True}
    for kernel, constants, warps in (
        (route_kernel, route, 1),
        (group_kernel, {"BM": 16, "BP": 512} | early, 4),
        (count_kernel, {"K": 11, "EP": 1024, "SHARED": True} | many, 4),
        (place_kernel, {"BE": 16} | many, 4),
        (sum_kernel, {"K": 11, "WIDTH": 2048, "BD": 1024} | early, 4),
    ):
        found = compile_for(TARGETS[target], kernel, signature, constants, num_warps=warps)
        assert found.spilled == 0, kernel
        assert found.shared <= 32 << 10, kernel
