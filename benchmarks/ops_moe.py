"""Cases of the 80B model's mixture of experts: decoding, prefill, and other cuts of the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops import Case
from deltaserve.ops.moe.api import sparse_moe

EXPERTS, TOP_K, WIDTH, INNER = 512, 10, 2048, 512
EXPERT_BYTES = 3 * WIDTH * INNER
SETS = 8

Held = tuple[Tensor, Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Held], object]


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
        scores = torch.randn(tokens, EXPERTS + 1, device=device).bfloat16()
        calls.append(partial(run, x, scores, held))
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

        return gate_up(x, held[0], held[2], route(scores, TOP_K, True, True)[1], rows, warps)

    return run


def pairs_of(rows: int, warps: int, outputs: int, down_warps: int, early: bool = False) -> Run:
    def run(x: Tensor, scores: Tensor, held: Held) -> object:
        from deltaserve.ops.moe.triton_pairs import down, gate_up
        from deltaserve.ops.moe.triton_route import route

        weights, ids, _ = route(scores, TOP_K, True, True, early)
        h = gate_up(x, held[0], held[2], ids, rows, warps, early)
        return down(h, held[1], held[3], weights, ids, outputs, down_warps, early)

    return run


def groups_of(pairs: int, inner: int, outputs: int, warps: int, stages: int, ready: bool) -> Run:
    def run(x: Tensor, scores: Tensor, held: Held) -> object:
        from deltaserve.ops.moe.triton_groups import Tiles, grouped
        from deltaserve.ops.moe.triton_route import route

        weights, ids, count = route(scores, TOP_K, True, True)
        return grouped(x, *held, weights, ids, count, Tiles(pairs, inner, outputs, warps, stages, ready))

    return run


PAIRS = ((8, 4, 4, 8), (4, 4, 4, 8), (16, 4, 4, 8), (8, 4, 2, 4), (8, 4, 4, 4), (8, 4, 8, 8), (8, 8, 4, 8))
FEW = (
    (16, 64, 64, 4, 3, False),
    (16, 64, 64, 4, 4, False),
    (16, 64, 64, 4, 5, False),
    (16, 128, 64, 4, 3, False),
    (16, 128, 128, 4, 3, False),
    (16, 128, 128, 8, 3, False),
    (16, 128, 128, 4, 3, True),
)
MANY = (
    (32, 128, 128, 4, 3, True),
    (32, 128, 128, 8, 3, True),
    (64, 128, 128, 8, 3, True),
    (64, 128, 128, 8, 2, True),
    (64, 128, 128, 8, 4, True),
    (64, 128, 128, 4, 3, True),
    (128, 128, 128, 8, 3, True),
    (128, 128, 128, 8, 2, True),
)


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
    for pairs in PAIRS[:3]:
        label = "early pairs BI={} w{} BD={} w{}".format(*pairs)
        found.append(case(label, 1, pairs_of(*pairs, early=True)))
    found.append(case("pairs", 4, pairs_of(*PAIRS[0])))
    found.append(case("pairs", 16, pairs_of(*PAIRS[0])))
    for label, cuts, sizes in (("few", FEW, (4, 8, 32, 128, 256)), ("many", MANY, (512, 1024, 8192))):
        for cut in cuts:
            name = label + " BM={} BI={} BO={} w{} s{} ready={}".format(*cut)
            found.extend(case(name, tokens, groups_of(*cut)) for tokens in sizes)
    return found
