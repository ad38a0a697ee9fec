"""Kernels of the projection compiled for GPUs that are not there: they fit, spill nothing, and load wide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltaserve.ops.linear.triton_fp8 import quantize_rows_kernel
from deltaserve.ops.linear.triton_gemm import BESIDE, Tiles, choose_tiles, gemm_kernel, lines_of, split_of
from deltaserve.ops.linear.triton_gemv import (
    PLAIN_BYTES,
    QUANTIZED_BYTES,
    gemv_kernel,
    norm_gemv_kernel,
    rows_per_program,
)
from tests.ops.compiled import TARGETS, Resources, compile_for

SHARED = {"sm_90": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}
TYPES = {0: "*bf16", 1: "*fp8e4nv", 2: "*u8"}
WAYS = {"sm_90": 1, "sm_80": 2, "gfx942": 2}
"""How each sees e4m3."""


def compile_gemv(
    target: str, width: int, tokens: int, rows: int, beside: int, way: int, ready: bool = False
) -> Resources:
    ready |= beside > 0 and way > 0 and tokens == 1
    weight = TYPES[way]
    signature = {
        "x_ptr": "*bf16",
        "q_ptr": weight,
        "q_scale_ptr": "*fp32" if ready else weight,
        "w_ptr": weight,
        "scale_ptr": "*fp32" if way else weight,
        "y_ptr": "*bf16",
        "beside_ptr": "*bf16",
        "y_beside_ptr": "*bf16",
        "stride": "i32",
        "tokens": "i32",
        "height": "i32",
        "height_beside": "i32",
    }
    constants = {"WIDTH": width, "T": tokens, "BO": rows, "BESIDE": beside, "BK": width, "FP8": way}
    constants["READY"] = ready
    constants["EARLY"] = target == "sm_90"
    return compile_for(TARGETS[target], gemv_kernel, signature, constants)


def compile_gemm(target: str, width: int, tiles: Tiles, way: int, beside: int = 0) -> Resources:
    weight = TYPES[way]
    ready = tiles.ready and way > 0
    signature = {
        "x_ptr": weight if ready else "*bf16",
        "x_scale_ptr": "*fp32" if ready else weight,
        "w_ptr": weight,
        "w_scale_ptr": "*fp32" if way else weight,
        "y_ptr": "*bf16",
        "part_ptr": "*fp32",
        "count_ptr": "*i32",
        "x_beside_ptr": "*bf16",
        "beside_ptr": "*bf16",
        "y_beside_ptr": "*bf16",
        "tokens": "i32",
        "height": "i32",
        "stride": "i32",
        "height_beside": "i32",
        "first": "i32",
    }
    constants: dict[str, Any] = {
        "WIDTH": width,
        "BO": tiles.outputs,
        "BT": tiles.tokens,
        "BK": 128 if way or tiles.tokens < 128 else 64,
        "SPLIT": tiles.split,
        "FP8": way,
        "READY": ready,
        "AHEAD": lines_of(tiles.split, width, 1 if way else 2) if tiles.ahead and target == "sm_90" else 0,
        "HELD": tiles.held,
        "BESIDE": beside,
        "EARLY": target == "sm_90",
    }
    return compile_for(TARGETS[target], gemm_kernel, signature, constants, tiles.warps, tiles.stages)


@pytest.mark.parametrize("target", TARGETS)
def test_gemv(target: str) -> None:
    for outputs, inputs, quantized in ((12288, 2048, True), (2048, 4096, True), (513, 2048, False)):
        for tokens in (1, 4):
            way = WAYS[target] if quantized else 0
            share = QUANTIZED_BYTES if quantized and tokens == 1 else PLAIN_BYTES
            rows = rows_per_program(outputs, inputs * (1 if quantized else 2), share, 132)
            beside = 4 if outputs == 12288 else 0
            found = compile_gemv(target, inputs, tokens, rows, beside, way)
            assert found.spilled == 0
            assert found.registers <= (128 if tokens == 1 and target == "sm_90" else 224)
            assert found.shared <= 16 << 10
            if target == "sm_90":
                row_bytes = inputs * (1 if quantized else 2)
                assert found.assembly.count("v4.b32") >= rows * row_bytes // 16 // 128
                before = found.assembly.split("griddepcontrol.wait")[0]
                assert before.count("v4.b32") >= rows * row_bytes // 16 // 128, "weights wait for the input"


@pytest.mark.parametrize("target", TARGETS)
def test_gemv_of_tokens_that_come_quantised(target: str) -> None:
    for inputs, tokens, rows, beside in ((2048, 2, 8, 4), (4096, 2, 4, 0), (2048, 4, 4, 4), (4096, 4, 2, 0)):
        found = compile_gemv(target, inputs, tokens, rows, beside, WAYS[target], True)
        assert found.spilled == 0
        assert found.registers <= (128 if target == "sm_90" else 224), "four programs share a multiprocessor"
        assert found.shared <= 16 << 10
        if target == "sm_90":
            before = found.assembly.split("griddepcontrol.wait")[0]
            assert before.count("v4.b32") >= rows * inputs // 16 // 128, "weights wait for the input"


@pytest.mark.parametrize("target", TARGETS)
def test_gemv_with_its_norm(target: str) -> None:
    for quantized, rows, beside, warps in ((True, 8, 4, 4), (True, 16, 4, 8), (False, 1, 0, 4)):
        way = WAYS[target] if quantized else 0
        weight = TYPES[way]
        kinds = {"gain_ptr": "*fp32", "eps": "fp32", "w_ptr": weight, "scale_ptr": "*fp32" if way else weight}
        names = norm_gemv_kernel.arg_names
        signature = {name: kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
        constants = {"WIDTH": 2048, "BO": rows, "BESIDE": beside, "BK": 2048, "FP8": way, "EARLY": target == "sm_90"}
        found = compile_for(TARGETS[target], norm_gemv_kernel, signature, constants, num_warps=warps)
        assert found.spilled == 0
        assert found.registers <= (128 if target == "sm_90" else 208)
        assert found.shared <= 16 << 10
        if target == "sm_90":
            before = found.assembly.split("griddepcontrol.wait")[0]
            loads = rows * 2048 * (1 if quantized else 2) // 16 // (32 * warps)
            assert before.count("v4.b32") >= loads, "weights wait for the input"


@pytest.mark.parametrize("target", TARGETS)
def test_gemm(target: str) -> None:
    for tokens in (8, 64, 128, 256, 1024):
        for quantized in (True, False):
            tiles = choose_tiles(
                tokens, 2048 if quantized or tokens > 256 else 513, 2048, quantized, 132, SHARED[target]
            )
            found = compile_gemm(target, 2048, tiles, WAYS[target] if quantized else 0)
            assert found.spilled == 0, tiles
            assert found.shared <= SHARED[target], tiles
            if target == "sm_90":
                assert "wgmma.mma_async" in found.assembly
                assert ("cp.async.cg" in found.assembly) == (tiles.held == 0)


@pytest.mark.parametrize("target", TARGETS)
def test_gemm_beside_another(target: str) -> None:
    """A second, plain weight of few rows in the launch: its programs are few, and must not cost the others."""
    for tokens in (8, 16, 32, 64):
        tiles = choose_tiles(tokens, 12288, 2048, True, 132, SHARED[target])
        found = compile_gemm(target, 2048, replace(tiles, ready=True), WAYS[target], split_of(2048, BESIDE))
        assert found.spilled == 0, tiles
        assert found.shared <= SHARED[target] // 2, tiles


@pytest.mark.parametrize(("tokens", "outputs", "width"), [(8, 12288, 2048), (32, 2048, 4096), (8, 513, 2048)])
def test_gemm_that_brings_its_weight_near(tokens: int, outputs: int, width: int) -> None:
    """Before it waits it asks for every line that it will read, and for none twice but in a last, short share."""
    tiles = choose_tiles(tokens, outputs, width, outputs != 513, 132, SHARED["sm_90"])
    found = compile_gemm("sm_90", width, tiles, 0 if outputs == 513 else 1)
    before, after = found.assembly.split("griddepcontrol.wait")
    row_bytes = width * (2 if outputs == 513 else 1) // tiles.split
    assert before.count("prefetch.global.L2") == tiles.outputs * row_bytes // 128 // (32 * tiles.warps)
    assert "prefetch" not in after
    assert found.spilled == 0


@pytest.mark.parametrize("target", TARGETS)
def test_quantize_rows(target: str) -> None:
    way = WAYS[target]
    signature = {"x_ptr": "*bf16", "q_ptr": TYPES[way], "scale_ptr": "*fp32", "tokens": "i32", "stride": "i32"}
    constants = {"WIDTH": 2048, "BK": 2048, "FP8": way, "EARLY": target == "sm_90"}
    found = compile_for(TARGETS[target], quantize_rows_kernel, signature, constants)
    assert (found.spilled, found.registers <= 64) == (0, True)


def test_more_programs_for_fewer_rows() -> None:
    sizes = (12288, 2048), (9216, 2048), (2048, 4096), (64, 4096)
    assert [rows_per_program(o, i, QUANTIZED_BYTES, 132) for o, i in sizes] == [8, 8, 4, 1]
    assert choose_tiles(8, 2048, 4096, True, 132, 227 << 10).split == 8
    assert choose_tiles(8, 12288, 2048, True, 132, 227 << 10).split == 4

    def cut(tokens: int, height: int, width: int, quantized: bool) -> tuple[int, int]:
        tiles = choose_tiles(tokens, height, width, quantized, 132, 227 << 10)
        return tiles.outputs, tiles.split

    many = (128, 200, 512, 1000)
    assert [cut(t, 2048, 4096, True) for t in many] == [(64, 4), (64, 2), (128, 2), (128, 1)]
    assert [cut(t, 513, 2048, False) for t in (*many, 8192)] == [(16, 4), (32, 4), (64, 2), (64, 2), (64, 1)]
    assert [cut(t, 513, 2048, False) for t in (32, 33, 64)] == [(64, 8), (16, 4), (16, 4)]
    assert [cut(t, 12288, 2048, True) for t in many] == [(128, 1)] * 4
    ahead = {tokens: choose_tiles(tokens, 2048, 4096, True, 132, 227 << 10).ahead for tokens in (4, 5, 64, 65)}
    assert ahead == {4: False, 5: True, 64: True, 65: False}


def test_weights_are_held_where_all_programs_are_there_at_once() -> None:
    def held(tokens: int, height: int, quantized: bool = True, target: str = "sm_90") -> int:
        return choose_tiles(tokens, height, 2048, quantized, 132, SHARED[target]).held

    assert [held(tokens, 12288) for tokens in (4, 5, 16, 17, 65)] == [0, 4, 4, 0, 0]
    assert (held(8, 513, False), held(8, 151936), held(8, 12288, target="sm_80")) == (2, 0, 0)


def test_weights_that_are_held() -> None:
    """All programs of a projection of eight tokens are there at once, each with its weights in shared memory before its
    input comes."""
    for height, width, quantized in ((12288, 2048, True), (2048, 4096, True), (513, 2048, False)):
        tiles = choose_tiles(8, height, width, quantized, 132, SHARED["sm_90"])
        assert tiles.held == width // 128 // tiles.split
        tiles = replace(tiles, ready=quantized)
        for beside in (0, 8) if quantized else (0,):
            found = compile_gemm("sm_90", width, tiles, int(quantized), beside)
            programs = min(65536 // (-(-found.registers // 8) * 8 * 128), (228 << 10) // (found.shared + 1024))
            assert found.spilled == 0
            assert 132 * programs >= -(-height // tiles.outputs) * tiles.split + beside
            assert "cp.async.cg" not in found.assembly
            if not beside:
                before, after = found.assembly.split("griddepcontrol.wait")
                stores = tiles.outputs * tiles.held * 128 * (1 if quantized else 2) // 128 // 16
                assert before.count("st.shared.v4") == stores, "weights wait for the input"
                assert after.count("ld.global.v4") < stores
