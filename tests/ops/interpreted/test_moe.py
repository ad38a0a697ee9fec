"""Kernels of the mixture of experts, interpreted: against the reference, between margins, over fresh NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear.reference import quantize_weight
from deltaserve.ops.linear.triton_fp8 import quantize_rows
from deltaserve.ops.moe import reference, triton_groups, triton_members, triton_pairs, triton_route
from deltaserve.ops.moe.gpu import sparse_moe
from deltaserve.ops.moe.triton_groups import Tiles
from deltaserve.ops.moe.triton_members import add_up
from tests.ops.guarded import guarded, relative

FLIPS = 2e-3
"""Now and then a number is rounded to the other of two steps of e4m3."""
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def weights_of(num_experts: int, width: int, inner: int, dtype: torch.dtype | None) -> Weights:
    """w13, w2 and, without a dtype, their scales."""
    w1, w3 = (torch.randn(num_experts, inner, width) / width**0.5 for _ in range(2))
    w2 = torch.randn(num_experts, width, inner) / inner**0.5
    if dtype is not None:
        return torch.cat([w1, w3], 1).to(dtype), w2.to(dtype), None, None
    (w1, s1), (w3, s3), (w2, s2) = (quantize_weight(w) for w in (w1, w3, w2))
    return torch.cat([w1, w3], 1), w2, torch.cat([s1, s3], 1), s2


def expected_of(x: Tensor, weights: Weights, chosen: Tensor, ids: Tensor) -> Tensor:
    w13, w2, w13_scale, w2_scale = weights
    if w13_scale is None:
        return reference.experts(x.double(), w13.double(), w2.double(), chosen.double(), ids.long())
    return reference.experts(x, w13, w2, chosen, ids.long(), w13_scale, w2_scale)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (3, 16, 4), (2, 512, 10)])
def test_route(tokens: int, num_experts: int, top_k: int, renormalize: bool, shared: bool) -> None:
    scores = (4 * torch.randn(tokens, num_experts + 9))[:, : num_experts + 1]
    with guarded():
        weights, ids, count = triton_route.route(scores, top_k, renormalize, shared)
    expected, expected_ids = reference.route(scores[:, :-1].double(), top_k, renormalize)
    assert torch.equal(ids[:, :top_k].long(), expected_ids)
    torch.testing.assert_close(weights[:, :top_k].double(), expected, rtol=1e-5, atol=1e-6)
    assert int(count) == 0
    if shared:
        assert (ids[:, top_k] == num_experts).all()
        torch.testing.assert_close(weights[:, top_k], scores[:, -1].sigmoid())


@pytest.mark.parametrize("shared", [True, False])
def test_padding_goes_where_the_first_tokens_go(shared: bool) -> None:
    scores = torch.randn(40, 33)
    x = torch.randn(40, 256)
    place = torch.where(torch.rand(40) < 0.5, -1, torch.arange(40))
    place[0], place[[5, 16, 21]] = 7, -1
    mate = torch.arange(40) % 16
    source = torch.where(place >= 0, torch.arange(40), torch.where(place[mate] >= 0, mate, 0))
    weights, ids, _ = triton_route.route(scores, 4, True, shared)
    found = triton_route.route(scores, 4, True, shared, place_T=place)
    both = triton_route.route_and_quantize(scores, x, 4, True, shared, place_T=place)
    for some in (found, both):
        assert torch.equal(some[0], weights[source])
        assert torch.equal(some[1], ids[source])
    plain = triton_route.route_and_quantize(scores, x, 4, True, shared)
    assert torch.equal(both[3][0].view(torch.int8), plain[3][0].view(torch.int8)), "inputs are each token's own"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_routes_of_bf16_scores() -> None:
    scores = torch.randn(3, 513).bfloat16()
    scores[0, :40] = 1.5  # equal ones
    scores[1] = -scores[1].abs()
    weights, ids, _ = triton_route.route(scores, 10, True, True)
    expected, expected_ids = reference.route(scores[:, :-1].float(), 10, True)
    assert torch.equal(ids[:, :10].long(), expected_ids)
    torch.testing.assert_close(weights[:, :10], expected)
    scores[2] = torch.nan
    ids = triton_route.route(scores, 10, True, True)[1]
    assert sorted(set(ids[2].tolist())) == sorted(ids[2].tolist())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_of_equal_scores_the_lowest_expert_is_chosen_and_nan_gives_valid_ids() -> None:
    scores = torch.randint(0, 3, (8, 65)).float()
    scores[0], scores[1, 5:] = 0, -0.0
    weights, ids, _ = triton_route.route(scores, 8, True, False)
    expected, expected_ids = reference.route(scores[:, :-1], 8, True)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)
    scores[2] = torch.nan
    ids = triton_route.route(scores, 8, True, True)[1]
    assert ((ids >= 0) & (ids <= 64)).all()
    assert len(set(ids[2].tolist())) == 9


@pytest.mark.parametrize("size", [16, 64, 192])
@pytest.mark.parametrize(
    ("pairs", "num_experts", "shared"), [(1, 4, False), (40, 4, False), (700, 9, False), (1100, 40, True)]
)
def test_every_pair_is_in_one_tile_of_its_expert(pairs: int, num_experts: int, shared: bool, size: int) -> None:
    ids = torch.randint(0, num_experts, (pairs, 1), dtype=torch.int32)
    if shared:
        ids = torch.cat([ids % (num_experts - 1), torch.full_like(ids, num_experts - 1)], 1)
    count = torch.zeros(1, dtype=torch.int32)
    with guarded():
        members, experts = triton_members.group(ids, count, num_experts, size, shared)
    tiles = int(count)
    assert tiles == sum(-(-int(n) // size) for n in torch.bincount(ids.flatten())) <= len(experts)
    for tile in range(tiles):
        held = members[tile][members[tile] >= 0]
        assert (ids.flatten()[held.long()] == experts[tile]).all()
    held = members[:tiles].flatten()
    assert sorted(held[held >= 0].tolist()) == list(range(ids.numel()))


@pytest.mark.parametrize("size", [16, 192])
@pytest.mark.parametrize("tokens", [40, 700])
def test_places_that_no_pair_takes_are_written(tokens: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, count = torch.randint(0, 4, (tokens, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def sevens(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, 7, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", sevens)
    members, _ = triton_members.group(ids, count, 4, size)
    held = members[: int(count)]
    assert (held >= 0).sum() == tokens
    assert (held[held < 0] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "width", "inner"),
    [(1, 16, 10, 192, 32), (2, 5, 3, 256, 128), (3, 3, 2, 40, 200)],
)
def test_pairs(tokens: int, num_experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype | None) -> None:
    weights = weights_of(num_experts + 1, width, inner, dtype)
    x = torch.randn(tokens, width).to(dtype or torch.float32)
    chosen, ids, _ = triton_route.route(torch.randn(tokens, num_experts + 1), top_k, True, True)
    with guarded():
        h = triton_pairs.gate_up(x, weights[0], weights[2], ids, rows=32)
        same = triton_pairs.gate_up(x, weights[0], weights[2], ids, True, rows=32)
        if dtype is None:
            ready = triton_route.route_and_quantize(torch.randn(tokens, num_experts + 1), x, top_k, True, True)[3]
            same = triton_pairs.gate_up(x, weights[0], weights[2], ids, True, rows=32, ready=ready)
            by_columns = triton_pairs.gate_up(x, weights[0], weights[2], ids, True, rows=32, ready=quantize_rows(x))
            assert torch.equal(by_columns, h)
        output = triton_pairs.down(h, weights[1], weights[3], chosen, ids, rows=32)
        other = triton_pairs.down(h, weights[1], weights[3], chosen, ids, rows=64)
        assert output.dim() == (3 if dtype is None and top_k >= triton_pairs.TOGETHER else 2)
        output, other = (y if y.dim() == 2 else triton_members.add_up(y, x.dtype) for y in (output, other))
    limit = 2e-3 if dtype == torch.float16 else 2e-6 if dtype else FLIPS
    assert relative(output, expected_of(x, weights, chosen, ids)) < limit
    assert torch.equal(same, h)
    assert relative(other, output) < (2e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(16, 64, 64),
        Tiles(32, 128, 64, ready=True),
        Tiles(64, 128, 128, ready=True, step=64),
        Tiles(16, 64, 32, ready=True),
        Tiles(16, 128, 64, ready=True, step=64),
    ],
)
@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 256, 128), (65, 136, 160), (3, 40, 24)])
def test_groups(tokens: int, width: int, inner: int, tiles: Tiles, dtype: torch.dtype | None) -> None:
    weights = weights_of(6, width, inner, dtype)
    x = torch.randn(tokens, width).to(dtype or torch.float32)
    chosen, ids, count = triton_route.route(torch.randn(tokens, 6), 2, False, True)
    with guarded():
        rows = triton_groups.grouped(x, *weights, chosen, ids, count, tiles)
        output = add_up(rows, x.dtype)
        if dtype is None:
            count.zero_()
            x_q, x_scale = quantize_rows(x)
            same = triton_groups.grouped(x, *weights, chosen, ids, count, tiles, ready=(x_q, x_scale))
            count.zero_()
            by_row = x_q, x_scale.contiguous()
            assert torch.equal(triton_groups.grouped(x, *weights, chosen, ids, count, tiles, ready=by_row), same)
            assert torch.equal(same, rows)
    limit = 2e-3 if dtype == torch.float16 else 2e-6 if dtype else FLIPS
    assert relative(output, expected_of(x, weights, chosen, ids)) < limit


@pytest.mark.parametrize("tokens", [3, 16])
def test_tiles_that_are_found_among_the_ids(tokens: int) -> None:
    """They give what gathered ones give, bit for bit; most pairs share an expert here."""
    (w13, w2, s13, s2), tiles = weights_of(4, 128, 128, None), Tiles(16, 128, 128, ready=True)
    chosen, ids, count = triton_route.route(torch.randn(tokens, 4), 2, True, True)
    x, found = torch.randn(tokens, 128), []
    for tables in (triton_members.same(ids, count), (*triton_members.group(ids, count, 4, 16, True), count)):
        with guarded():
            h, h_scale = triton_groups.gate_up(x, w13, s13, tables, ids.numel(), tiles)
            y = triton_groups.down(h, h_scale, w2, s2, chosen, tables, tiles, torch.float32)
        assert h_scale is not None
        found.append((h.float(), h_scale, y))
    for direct, gathered in zip(*found, strict=True):
        assert torch.equal(direct, gathered)


@pytest.mark.parametrize(
    ("tokens", "shared"), [(0, True), (1, False), (2, True), (9, True), (63, False), (64, True), (65, False)]
)
def test_a_layer(tokens: int, shared: bool) -> None:
    weights = weights_of(3 + shared, 128, 128, None)
    x, scores = torch.randn(tokens, 128), torch.randn(tokens, 4)
    output = sparse_moe(x, scores, weights[0], weights[1], 2, True, *weights[2:])
    rows = sparse_moe(x, scores, weights[0], weights[1], 2, True, *weights[2:], quantize_rows(x), False)
    assert output.shape == x.shape
    assert torch.equal(add_up(rows, x.dtype) if rows.dim() == 3 else rows, output)
    if tokens:
        chosen, ids, _ = triton_route.route(scores, 2, True, shared)
        assert relative(output, expected_of(x, weights, chosen, ids)) < FLIPS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokens", [4, 9])
def test_a_token_of_nan_stays_alone_and_so_does_an_expert(tokens: int) -> None:
    w13, w2, w13_scale, w2_scale = weights_of(6, 128, 128, None)
    assert w2_scale is not None
    x, scores = torch.randn(tokens, 128), torch.randn(tokens, 6)
    scores[:, 4] = -100
    whole = sparse_moe(x, scores, w13, w2, 2, True, w13_scale, w2_scale)
    x[3], w13[4], w2_scale[4] = torch.nan, torch.nan, torch.nan
    output = sparse_moe(x, scores, w13, w2, 2, True, w13_scale, w2_scale)
    keep = torch.arange(tokens) != 3
    assert torch.equal(output[keep], whole[keep])
    assert output[3].isnan().all()
