"""Cases of the 80B model's mixture of experts: decoding, prefill, and other cuts of the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaserve.bench.ops import Case
from deltaserve.ops.moe.api import sparse_moe

EXPERTS, TOP_K, WIDTH, INNER = 512, 10, 2048, 512
EXPERT_BYTES = 3 * WIDTH * INNER
SETS = 8
UNEVEN = 0.2
"""How far experts' scores lie apart, where tokens' lie 1 apart, in the deeper layers of a model of random weights. Its
prompts of 8,192 tokens give an expert 160 pairs, give or take 80, and take a quarter more tiles than even ones."""

Held = tuple[Tensor, Tensor, Tensor, Tensor]
Cut = dict[str, Any]
Run = Callable[[Tensor, Tensor, Held], object]


def scores_of(tokens: int, device: torch.device) -> Tensor:
    """Of prompts, as uneven as a model's; fewer tokens choose evenly, as their floor assumes."""
    scores = torch.randn(tokens, EXPERTS + 1, device=device)
    if tokens >= 1000:
        scores += UNEVEN * torch.randn(EXPERTS + 1, device=device)
    return scores.bfloat16()


def make(tokens: int, run: Run) -> Sequence[Callable[[], object]]:
    """Input sets routed at random over the same weights, which are far larger than a cache."""
    device = torch.device("cuda", 0)
    shapes = (EXPERTS + 1, 2 * INNER, WIDTH), (EXPERTS + 1, WIDTH, INNER)
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn) for shape in shapes]
    scales = [torch.rand(e, rows // 128, columns // 128, device=device) / 32 for e, rows, columns in shapes]
    held = weights[0], weights[1], scales[0], scales[1]
    calls: list[Callable[[], object]] = []
    for _ in range(SETS if tokens < 1000 else 2):
        x = torch.randn(tokens, WIDTH, device=device).bfloat16()
        calls.append(partial(run, x, scores_of(tokens, device), held))
    return calls


def case(name: str, tokens: int, run: Run, share: float = 1.0) -> Case:
    """`share` of the layer's bytes and operations belong to this kernel."""
    touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens) + 1
    num_bytes = touched * EXPERT_BYTES + tokens * 4 * WIDTH
    flops = 2.0 * tokens * (TOP_K + 1) * EXPERT_BYTES
    return Case(f"moe {name} T={tokens}", partial(make, tokens, run), share * num_bytes, share * flops, True)


def layer(x: Tensor, scores: Tensor, held: Held) -> Tensor:
    return sparse_moe(x, scores, held[0], held[1], TOP_K, True, held[2], held[3])


def routing(x: Tensor, scores: Tensor, held: Held) -> object:
    from deltaserve.ops.moe.triton_route import route

    return route(scores, TOP_K, True, True)


def gathering(x: Tensor, scores: Tensor, held: Held) -> object:
    from deltaserve.ops.moe.triton_members import group
    from deltaserve.ops.moe.triton_route import route

    _, ids, count = route(scores, TOP_K, True, True)
    return group(ids, count, EXPERTS + 1, 16, shared=True)


def gate_up_of(rows: int, warps: int) -> Run:
    def run(x: Tensor, scores: Tensor, held: Held) -> object:
        from deltaserve.ops.moe.triton_pairs import gate_up
        from deltaserve.ops.moe.triton_route import route

        return gate_up(x, held[0], held[2], route(scores, TOP_K, True, True)[1], True, rows, warps)

    return run


def pairs_of(rows: int, warps: int, outputs: int, down_warps: int, early: bool = False, quantizes: bool = True) -> Run:
    """`quantizes`: the routing launch does so, once; else every program of the experts."""

    def run(x: Tensor, scores: Tensor, held: Held) -> object:
        from deltaserve.ops.moe.triton_pairs import down, gate_up
        from deltaserve.ops.moe.triton_route import route, route_and_quantize

        ready = None
        if quantizes:
            weights, ids, _, ready = route_and_quantize(scores, x, TOP_K, True, True, early)
        else:
            weights, ids, _ = route(scores, TOP_K, True, True, early)
        h = gate_up(x, held[0], held[2], ids, True, rows, warps, early, ready)
        return down(h, held[1], held[3], weights, ids, outputs, down_warps, early)

    return run


def groups_of(early: bool, **cut: Any) -> Run:
    def run(x: Tensor, scores: Tensor, held: Held) -> object:
        from deltaserve.ops.moe.triton_groups import Tiles, grouped
        from deltaserve.ops.moe.triton_route import route

        weights, ids, count = route(scores, TOP_K, True, True, early)
        tiles = Tiles(**READY | cut)
        return grouped(x, *held, weights, ids, count, tiles, True, early)

    return run


def make_product(name: str, tokens: int, cut: Cut) -> Sequence[Callable[[], object]]:
    """One of the two grouped products, of pairs that lie in tiles already."""
    from deltaserve.ops.moe.triton_groups import Tiles, down, gate_up
    from deltaserve.ops.moe.triton_members import group
    from deltaserve.ops.moe.triton_route import route

    tiles = Tiles(**READY | cut)

    def prepare(x: Tensor, scores: Tensor, held: Held) -> Callable[[], object]:
        weights, ids, count = route(scores, TOP_K, True, True)
        tables = *group(ids, count, EXPERTS + 1, tiles.pairs, True), count
        if name == "gate_up":
            return partial(gate_up, x, held[0], held[2], tables, ids.numel(), tiles)
        h, h_scale = gate_up(x, held[0], held[2], tables, ids.numel(), tiles)
        return partial(down, h, h_scale, held[1], held[3], weights, tables, tiles, x.dtype)

    found: list[Callable[[], object]] = []
    for call in make(tokens, prepare):
        prepared = call()
        assert callable(prepared)
        found.append(prepared)
    return found


def product_case(name: str, tokens: int, cut: Cut) -> Case:
    whole = case(name, tokens, layer, 2 / 3 if name == "gate_up" else 1 / 3)
    label = " ".join(f"{key}={value}" for key, value in cut.items())
    run = partial(make_product, name, tokens, cut)
    return Case(f"moe {name} {label} T={tokens}", run, whole.num_bytes, whole.flops, True)


PAIRS = ((8, 4, 8, 4), (4, 4, 8, 4), (16, 4, 8, 4), (8, 4, 4, 4), (8, 4, 16, 4), (8, 4, 16, 8), (8, 8, 8, 4))
EARLY_PAIRS = (
    (4, 4, 8, 4),
    (8, 4, 8, 4),
    (8, 8, 8, 4),
    (2, 4, 8, 4),
    (2, 2, 8, 4),
    (4, 2, 8, 4),
    (4, 4, 16, 8),
    (4, 4, 8, 8),
)
READY: Cut = {"pairs": 64, "inner": 128, "outputs": 128, "ready": True}
FEW: tuple[Cut, ...] = ({}, {"stages": 2}, {"stages": 4}, {"outputs": 64})
ROLES: Cut = {"pairs": 192, "roles": True, "stages": 4, "down_stages": 6}
PLAIN: Cut = {"warps": 8, "down_warps": 4, "down_stages": 3, "down_registers": 168}
MANY: dict[int, tuple[Cut, ...]] = {
    1024: ({"pairs": 32}, ROLES),
    2048: (PLAIN, ROLES),
    4096: (PLAIN, ROLES),
    8192: (PLAIN, ROLES),
    16384: (PLAIN, ROLES),
}
"""Cuts of the two products, by tokens."""


def cases() -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192):
        found.append(case("layer", tokens, layer))
    for tokens in (1, 128, 8192):
        found.append(case("route", tokens, routing, 0.0))
    for tokens in (16, 128, 8192):
        found.append(case("route + group", tokens, gathering, 0.0))
    for rows, warps in ((4, 4), (8, 4), (16, 4), (8, 8)):
        found.append(case(f"route + gate_up BI={rows} w{warps}", 1, gate_up_of(rows, warps), 2 / 3))
    for pairs in PAIRS:
        label = "pairs BI={} w{} BD={} w{}".format(*pairs)
        found.extend(case(label, tokens, pairs_of(*pairs)) for tokens in ((1, 8) if pairs == PAIRS[0] else (1,)))
    found.append(case("pairs, quantising in each", 1, pairs_of(*PAIRS[1], quantizes=False)))
    for pairs in EARLY_PAIRS:
        label = "early pairs BI={} w{} BD={} w{}".format(*pairs)
        found.append(case(label, 1, pairs_of(*pairs, early=True)))
        if pairs[0] == 4 and pairs[1] == 4:
            found.append(case(f"{label}, quantising in each", 1, pairs_of(*pairs, early=True, quantizes=False)))
    found.append(case("pairs", 4, pairs_of(*PAIRS[0])))
    found.append(case("pairs", 16, pairs_of(*PAIRS[0])))
    for few in FEW:
        name = "few" + "".join(f" {key}={value}" for key, value in few.items())
        found.extend(case(name, tokens, groups_of(False, pairs=16, **few)) for tokens in (32, 128, 256))
    found.extend(case("early few", tokens, groups_of(True, pairs=16)) for tokens in (8, 32, 128))
    for tokens, cuts in MANY.items():
        for cut in cuts:
            found.extend(product_case(name, tokens, cut) for name in ("gate_up", "down"))
    return found
