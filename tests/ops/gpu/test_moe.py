"""The mixture of experts on a GPU against the reference, at the shapes of the 80B model and at odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.layers.moe import SparseMoe
from deltaserve.ops.linear.reference import quantize_weight
from deltaserve.ops.moe import reference
from deltaserve.ops.moe.api import sparse_moe
from deltaserve.ops.norm.reference import add_up
from tests.ops.guarded import guarded, relative

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
TOKENS = [1, 2, 8, 9, 63, 64, 65, 127, 128, 1000]
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def weights_of(num_experts: int, width: int, inner: int, dtype: torch.dtype | None) -> Weights:
    """w13, w2 and, without a dtype, their scales."""
    w1, w3 = (torch.randn(num_experts, inner, width, device=CUDA) / width**0.5 for _ in range(2))
    w2 = torch.randn(num_experts, width, inner, device=CUDA) / inner**0.5
    if dtype is not None:
        return torch.cat([w1, w3], 1).to(dtype), w2.to(dtype), None, None
    (w1, s1), (w3, s3), (w2, s2) = (quantize_weight(w) for w in (w1, w3, w2))
    return torch.cat([w1, w3], 1), w2, torch.cat([s1, s3], 1), s2


def expected_of(x: Tensor, scores: Tensor, top_k: int, weights: Weights) -> Tensor:
    """Expert by expert."""
    w13, w2, w13_scale, w2_scale = weights
    chosen, ids = reference.route(scores[:, :-1], top_k, True)
    if w13.shape[0] == scores.shape[1]:
        chosen = torch.cat([chosen, scores[:, -1:].float().sigmoid()], 1)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], w13.shape[0] - 1)], 1)
    if w13_scale is None:
        wide = x.double(), w13.double(), w2.double()
        return reference.grouped_experts(*wide, chosen.double(), ids)
    return reference.experts(x, w13, w2, chosen, ids, w13_scale, w2_scale)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "inner"), [(512, 10, 2048, 512), (16, 4, 192, 32), (7, 3, 384, 160)]
)
def test_quantised(num_experts: int, top_k: int, width: int, inner: int) -> None:
    weights = weights_of(num_experts + 1, width, inner, None)
    for tokens in TOKENS if num_experts < 512 else [1, 8, 9, 128, 1000, 4000]:
        x = torch.randn(tokens, width, device=CUDA).bfloat16()
        scores = torch.randn(tokens, num_experts + 1, device=CUDA).bfloat16()
        with guarded():
            output = sparse_moe(x, scores, weights[0], weights[1], top_k, True, *weights[2:])
        # Between the products numbers are rounded to bf16, then e4m3: some to the other of two steps than here.
        assert relative(output, expected_of(x, scores, top_k, weights)) < 3e-2, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "width", "inner"), [(32, 10, 2048, 512), (16, 4, 192, 32), (7, 3, 200, 40)]
)
def test_plain(num_experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype) -> None:
    for shared in (True, False):
        weights = weights_of(num_experts + shared, width, inner, dtype)
        for tokens in TOKENS:
            x = torch.randn(tokens, width, device=CUDA).to(dtype)
            scores = torch.randn(tokens, num_experts + 1, device=CUDA)
            with guarded():
                output = sparse_moe(x, scores, weights[0], weights[1], top_k, True)
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            assert relative(output, expected_of(x, scores, top_k, weights)) < limit, (tokens, shared)


@pytest.mark.parametrize("tokens", [1, 8, 9, 128, 1000])
def test_the_same_again_and_in_a_graph(tokens: int) -> None:
    weights = weights_of(129, 2048, 512, None)
    x = torch.randn(tokens, 2048, device=CUDA).bfloat16()
    scores = torch.randn(tokens, 129, device=CUDA).bfloat16()

    def run() -> Tensor:
        return sparse_moe(x, scores, weights[0], weights[1], 10, True, *weights[2:])

    first = run()
    for _ in range(3):
        assert torch.equal(run(), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    x.normal_()
    scores.normal_()
    for _ in range(2):
        graph.replay()
    assert torch.equal(output, run())


@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_holds_the_shared_expert_with_the_others(quantized: bool) -> None:
    with torch.inference_mode():
        for shared_size in (128, 256):
            layer = SparseMoe(
                hidden_size=256,
                num_experts=8,
                top_k=2,
                inner_size=128,
                shared_size=shared_size,
                renormalize=True,
                dtype=torch.bfloat16,
                device=CUDA,
                quantized=quantized,
            )
            for parameter in layer.parameters():
                drawn = torch.randn(parameter.shape, device=CUDA) / 8
                parameter.copy_(drawn.abs() if parameter.dtype == torch.float32 else drawn)
            assert layer.holds_shared == (shared_size == 128)
            names = {name for name, _ in layer.named_parameters()}
            assert {"w13", "w2", "shared_expert.gate_up_proj.weight", "shared_expert.down_proj.weight"} <= names
            for tokens in (1, 20):
                x = torch.randn(tokens, 256, device=CUDA).bfloat16()
                output = layer(x)
                if output.dim() == 3:
                    assert layer.holds_shared, "rows for the next norm are those of all experts"
                    output = add_up(output, x.dtype)
                scores = layer.router(x)
                held = {name: tensor[:8] for name, tensor in layer.held.items()}
                weights = held["w13"], held["w2"], held.get("w13_scale"), held.get("w2_scale")
                expected = expected_of(x, scores, 2, weights) + layer.shared_expert(x) * scores[:, -1:].sigmoid()
                assert relative(output, expected) < 1.5e-2
