"""Pairs in tiles, and each of the two grouped products by itself, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear import reference
from deltaserve.ops.linear.triton_fp8 import quantize_rows
from deltaserve.ops.moe.triton_groups import Tiles, choose_tiles, down, gate_up, has_roles
from deltaserve.ops.moe.triton_members import add_up, group
from tests.ops.guarded import guarded, relative

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
EXPERTS, TOP_K, WIDTH, INNER = 33, 4, 512, 256


def ids_of(tokens: int, num_experts: int, top_k: int, shared: bool) -> Tensor:
    """Each token's experts, no id twice, the last of all as each token's last if it is shared."""
    routed = num_experts - shared
    ids = torch.rand(tokens, routed, device=CUDA).argsort(1)[:, : top_k - shared]
    if shared:
        ids = torch.cat([ids, torch.full_like(ids[:, :1], routed)], 1)
    return ids.int()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 46, 47, 128, 1000, 8192])
def test_every_pair_is_in_one_tile_of_its_expert(tokens: int, shared: bool) -> None:
    for size in (16, 64, 192):
        ids = ids_of(tokens, 513, 11, shared)
        for _ in range(2):
            count = torch.zeros(1, dtype=torch.int32, device=CUDA)
            with guarded():
                members, experts = group(ids, count, 513, size, shared)
            tiles = int(count)
            numbers = torch.bincount(ids.flatten(), minlength=513)
            assert tiles == int(((numbers + size - 1) // size).sum()) <= len(experts)
            members, experts = members[:tiles], experts[:tiles]
            held = members >= 0
            assert torch.equal(members[held].sort().values, torch.arange(ids.numel(), device=CUDA, dtype=torch.int32))
            assert torch.equal(
                ids.flatten()[members.clamp(min=0).long()][held], experts[:, None].expand_as(members)[held]
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (65, 2048), (1000, 300)])
def test_inputs_are_quantised_as_by_the_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, width) * torch.rand(tokens, 1)).to(dtype)
    x[0, :128] = 0
    x_q, scale = quantize_rows(x.to(CUDA))
    expected, expected_scale = reference.quantize_rows(x)
    assert torch.equal(scale[:tokens].cpu(), expected_scale)
    assert torch.equal(x_q[:tokens].cpu().float(), expected.float())


def dequantized(w: Tensor, scale: Tensor) -> Tensor:
    return reference.dequantize_weight(w, scale, torch.float64)


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1000])
def test_each_product(tokens: int) -> None:
    w13, s13 = reference.quantize_weight(torch.randn(EXPERTS, 2 * INNER, WIDTH, device=CUDA) / WIDTH**0.5)
    w2, s2 = reference.quantize_weight(torch.randn(EXPERTS, WIDTH, INNER, device=CUDA) / INNER**0.5)
    x = torch.randn(tokens, WIDTH, device=CUDA).bfloat16()
    ids, weights = ids_of(tokens, EXPERTS, TOP_K, True), torch.rand(tokens, TOP_K, device=CUDA)
    chosen = choose_tiles(ids.numel(), EXPERTS, True, properties(CUDA).shared_bytes, has_roles(x, ids.numel(), INNER))
    steps = Tiles(64, 128, 128, stages=5, ready=True, down_warps=8, down_stages=3, step=64)
    cuts = [chosen, Tiles(16, 128, 128, ready=True), Tiles(16, 128, 128, stages=4, ready=True, step=64), steps]
    if properties(CUDA).is_hopper:
        cuts.append(Tiles(192, 128, 128, stages=4, ready=True, roles=True))
    for tiles in cuts:
        count = torch.zeros(1, dtype=torch.int32, device=CUDA)
        tables = *group(ids, count, EXPERTS, tiles.pairs, True), count
        with guarded():
            h, h_scale = gate_up(x, w13, s13, tables, ids.numel(), tiles)
            y = down(h, h_scale, w2, s2, weights, tables, tiles, torch.float32)
        flat, place = ids.flatten().long(), torch.arange(tokens, device=CUDA).repeat_interleave(TOP_K)
        x_wide = reference.dequantize_rows(*reference.quantize_rows(x), torch.float64)[place]
        expected = torch.empty(ids.numel(), INNER, dtype=torch.float64, device=CUDA)
        made = torch.empty_like(expected)
        if h_scale is None:
            made.copy_(reference.dequantize_rows(*reference.quantize_rows(h), torch.float64))
        else:
            made.copy_(reference.dequantize_rows(h.view(torch.float8_e4m3fn), h_scale, torch.float64))
        summed = torch.empty(ids.numel(), WIDTH, dtype=torch.float64, device=CUDA)
        for expert in sorted(set(flat.tolist())):
            mine = flat == expert
            gate, up = (x_wide[mine] @ dequantized(w13[expert], s13[expert]).T).chunk(2, 1)
            expected[mine] = silu(gate) * up
            summed[mine] = made[mine] @ dequantized(w2[expert], s2[expert]).T * weights.flatten()[mine, None]
        # Of gate and up a step of e4m3 is left to either side, of the second product nothing.
        assert relative(made, expected) < 4e-2, tiles
        assert relative(y, summed) < 1e-3, tiles
        assert relative(add_up(y.view(tokens, TOP_K, -1), torch.float32), summed.view(tokens, TOP_K, -1).sum(1)) < 1e-3
