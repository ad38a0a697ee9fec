"""The products of experts by warps that have roles, on a CPU (see gluon_machine.py), against float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import deltaserve.ops.moe
from deltaserve.ops.linear import reference
from tests.ops.gluon_machine import load_kernels
from tests.ops.guarded import guarded, relative

WIDTH, INNER, TOP_K = 256, 256, 2


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    (folder,) = deltaserve.ops.moe.__path__
    return load_kernels(str(Path(folder) / "triton_roles.py"), "gate_up_kernel", "down_kernel")


def tables_of(numbers: Sequence[int], size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs in tiles, as `group` makes them, of experts with so many pairs each; and each pair's expert."""
    order = torch.randperm(sum(numbers), dtype=torch.int32)
    owner = torch.empty(len(order), dtype=torch.long)
    members: list[Tensor] = []
    experts: list[int] = []
    for expert, pairs in enumerate(torch.split(order, list(numbers))):
        owner[pairs.long()] = expert
        for tile in torch.split(pairs, size):
            members.append(torch.cat([tile, tile.new_full((size - len(tile),), -1)]))
            experts.append(expert)
    behind = torch.full((size,), 7, dtype=torch.int32)  # what no tile is may hold anything
    return torch.stack([*members, behind]), torch.tensor([*experts, 99]), torch.tensor([len(experts)]), owner


def dequantized(w: Tensor, scale: Tensor) -> Tensor:
    return reference.dequantize_weight(w, scale, torch.float64)


@pytest.mark.parametrize("numbers", [[1, 0, 63, 64, 66], [192, 130, 194, 8], [600]])
@pytest.mark.parametrize("stages", [2, 4])
def test_both_products(kernels: ModuleType, numbers: list[int], stages: int) -> None:
    pairs, experts = sum(numbers), len(numbers)
    w13, s13 = reference.quantize_weight(torch.randn(experts, 2 * INNER, WIDTH) / WIDTH**0.5)
    w2, s2 = reference.quantize_weight(torch.randn(experts, WIDTH, INNER) / INNER**0.5)
    x_q, x_scale = reference.quantize_rows(torch.randn(pairs // TOP_K, WIDTH))
    weights = torch.rand(pairs // TOP_K, TOP_K)
    members, owners, count, owner = tables_of(numbers, 192)
    with guarded():
        h = torch.empty(pairs, INNER, dtype=torch.float8_e4m3fn)
        h_scale = torch.empty(pairs, INNER // 128)
        y = torch.empty(pairs, WIDTH)
        tables = members, owners, count
        kernels.gate_up(x_q, x_scale.t().contiguous().t(), w13, s13, h, h_scale, *tables, TOP_K, torch.float16, stages)
        kernels.down(h, h_scale, w2, s2, weights, y, *tables, stages)
    x = reference.dequantize_rows(x_q, x_scale, torch.float64)[torch.arange(pairs) // TOP_K]
    made = reference.dequantize_rows(h, h_scale, torch.float64)
    expected, summed = torch.empty_like(made), torch.empty(pairs, WIDTH, dtype=torch.float64)
    for expert in range(experts):
        mine = owner == expert
        gate, up = (x[mine] @ dequantized(w13[expert], s13[expert]).T).chunk(2, 1)
        expected[mine] = silu(gate) * up
        summed[mine] = made[mine] @ dequantized(w2[expert], s2[expert]).T * weights.flatten()[mine, None]
    exact = reference.dequantize_rows(*reference.quantize_rows(expected.half().float()), torch.float64)
    assert relative(made, exact) < 4e-3
    assert relative(y, summed) < 1e-6
