"""The kernels of sampling, compiled for GPUs that are not there, at a vocabulary of 151,936."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.ops.sampling import triton_draw, triton_greedy, triton_right
from tests.ops.compiled import TARGETS, compile_for

VOCAB, SLICE = 151_936, triton_greedy.SLICE
NUM_SLICES = -(-VOCAB // SLICE)
SIZES = {"NUM_SLICES": NUM_SLICES, "BLOCK_N": 64}
WHOLE = {**SIZES, "VOCAB": VOCAB, "SLICE": SLICE, "ONE": triton_draw.ONE, "row_stride": VOCAB}
POINTERS = {
    "logits_ptr": "*fp32", "largest_ptr": "*fp32", "smallest_ptr": "*fp32", "temperature_ptr": "*fp32",
    "token_ptr": "*i64", "part_token_ptr": "*i32", "finite_ptr": "*u8", "row_largest_ptr": "*fp32",
    "uniform_ptr": "*fp64",
}  # fmt: skip


def assert_fits(target: str, kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None) -> str:
    known = {**POINTERS, **(types or {})}
    signature = {name: known.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    found = compile_for(TARGETS[target], kernel, signature, constants, num_warps=4)
    assert found.spilled == 0, f"{found.spilled} spilled"
    assert found.registers <= 255
    assert found.shared <= 48 << 10, f"{found.shared} bytes of shared memory"
    return found.assembly


@pytest.mark.parametrize("target", TARGETS)
def test_greedy(target: str) -> None:
    assembly = assert_fits(target, triton_greedy.slice_kernel, WHOLE, {"token_ptr": "*i32"})
    assert target == "gfx942" or "ld.global.v4.b32" in assembly
    assert_fits(target, triton_greedy.join_kernel, SIZES)


@pytest.mark.parametrize("target", TARGETS)
def test_guesses_and_noise(target: str) -> None:
    types = {"ok_ptr": "*u8", "share_ptr": "*fp64", "out_ptr": "*fp64"}
    for kernel in (triton_right.right_kernel, triton_right.uniform_kernel, triton_right.pretend_kernel):
        assert_fits(target, kernel, {"ROWS": triton_right.ROWS}, types)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("weighs", [False, True])
def test_search(target: str, weighs: bool) -> None:
    limit = {"limit_ptr": "*fp64" if weighs else "*i64"}
    for is_first in (False, True):
        flags = {"BITS": 3, "WEIGHS": weighs, "IS_FIRST": is_first, "HAS_FLOOR": weighs}
        assert_fits(target, triton_draw.search_kernel, {**WHOLE, **flags}, limit)
    assert_fits(target, triton_draw.settle_kernel, {**SIZES, "WEIGHS": weighs}, limit)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", [False, True])
def test_draw(target: str, cuts: bool) -> None:
    constants = {**WHOLE, "HAS_FLOOR": cuts, "HAS_LEAST": cuts}
    assert_fits(target, triton_draw.sum_kernel, constants)
    assert_fits(target, triton_draw.draw_kernel, constants)
