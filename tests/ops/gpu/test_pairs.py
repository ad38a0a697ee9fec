"""The kernels of one and two tokens of the 80B model on a GPU, each given its own operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaserve.ops.linear import reference as projection
from deltaserve.ops.linear import triton_gemv
from deltaserve.ops.moe import triton_members, triton_pairs, triton_route
from deltaserve.ops.moe.reference import route
from deltaserve.ops.norm.reference import add_gemma_rms_norm
from deltaserve.ops.norm.triton_norm import add_norm_rows_quantized
from tests.ops.guarded import guarded, relative

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def exact_product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """In float64, of the same quantised operands."""
    if scale is None:
        return x.double() @ weight.double().T
    x = projection.dequantize_rows(*projection.quantize_rows(x), torch.float64)
    return x @ projection.dequantize_weight(weight, scale, torch.float64).T


def drawn(rows: int, columns: int, quantized: bool, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(rows, columns, device=CUDA) / columns**0.5
    return projection.quantize_weight(weight) if quantized else (weight.to(dtype), None)


@pytest.mark.parametrize(
    ("quantized", "dtype"), [(True, BF16), (False, BF16), (False, torch.float16), (False, torch.float32)]
)
@pytest.mark.parametrize(("width", "inner"), [(2048, 512), (384, 160), (256, 1024)])
def test_each_product_of_a_pair(width: int, inner: int, quantized: bool, dtype: torch.dtype) -> None:
    experts, limit = 24, 1e-5 if dtype == torch.float32 else 1e-2
    parts = [
        [drawn(*shape, quantized, dtype) for shape in ((inner, width),) * 2 + ((width, inner),)] for _ in range(experts)
    ]
    w13 = torch.stack([torch.cat([one[0][0], one[1][0]]) for one in parts])
    w2 = torch.stack([one[2][0] for one in parts])
    w13_scale = w2_scale = None
    if quantized:
        w13_scale = torch.stack([torch.cat([scale for _, scale in one[:2] if scale is not None]) for one in parts])
        w2_scale = torch.stack([scale for one in parts for _, scale in one[2:] if scale is not None])
    for tokens in (1, 2):
        x = torch.randn(tokens, width, device=CUDA).to(dtype)
        scores = torch.randn(tokens, experts, device=CUDA).to(dtype)
        weights, ids, _ = triton_route.route(scores, 10, True, True)
        with guarded():
            h = triton_pairs.gate_up(x, w13, w13_scale, ids, True)
            if quantized:
                ready = triton_route.route_and_quantize(scores, x, 10, True, True)[3]
                assert torch.equal(triton_pairs.gate_up(x, w13, w13_scale, ids, True, ready=ready), h)
            y = triton_pairs.down(h, w2, w2_scale, weights, ids)
            y = y if y.dim() == 2 else triton_members.add_up(y, dtype)
        expected = torch.zeros(tokens, width, dtype=torch.float64, device=CUDA)
        for pair, expert in enumerate(ids.flatten().tolist()):
            t, (first, second, third) = pair // 11, parts[expert]
            gate, up = exact_product(x[t : t + 1], *first), exact_product(x[t : t + 1], *second)
            assert relative(h[pair], (silu(gate) * up)[0]) < limit, pair
            expected[t] += weights.flatten()[pair] * exact_product(h[pair : pair + 1], *third)[0]
        assert relative(y, expected) < limit, tokens


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(("outputs", "width"), [(12288, 2048), (513, 2048), (9216, 2048), (77, 384)])
def test_a_norm_inside_a_projection(outputs: int, width: int, quantized: bool) -> None:
    weight, scale = drawn(outputs, width, quantized)
    gain = torch.rand(width, device=CUDA) + 0.5
    for beside in (None, drawn(64, width, False)[0]):
        x, residual = (torch.randn(1, width, device=CUDA).to(BF16) for _ in range(2))
        with guarded():
            y, other, norm, total = triton_gemv.norm_gemv(x, residual, gain, 1e-6, weight, scale, beside)
        expected_norm, expected_total = add_gemma_rms_norm(x, residual, gain, 1e-6)
        assert torch.equal(total, expected_total)
        assert relative(norm, expected_norm) < 1e-3
        assert relative(y, exact_product(norm, weight, scale)) < 1e-2
        if beside is not None and other is not None:
            assert relative(other, exact_product(norm, beside, None)) < 1e-2


@pytest.mark.parametrize(("outputs", "width"), [(12288, 2048), (9216, 2048), (2048, 4096), (77, 384), (130, 200)])
def test_a_norm_that_quantises(outputs: int, width: int) -> None:
    (weight, scale), (beside, _) = drawn(outputs, width, True), drawn(64, width, False)
    gain = torch.rand(width, device=CUDA) + 0.5
    x, residual = (torch.randn(1, width, device=CUDA).to(BF16) for _ in range(2))
    with guarded():
        norm, total, ready = add_norm_rows_quantized(x, residual, gain, 1e-6)
        y, other = triton_gemv.gemv_beside(norm, weight, scale, beside, ready=ready)
        alone = triton_gemv.gemv(norm, weight, scale, BF16, ready=ready)
    expected_norm, expected_total = add_gemma_rms_norm(x, residual, gain, 1e-6)
    assert torch.equal(total, expected_total)
    assert relative(norm, expected_norm) < 1e-3
    for found, expected in zip((part[:1] for part in ready), projection.quantize_rows(norm.cpu()), strict=True):
        assert torch.equal(found.float().cpu(), expected.float())
    assert relative(y, exact_product(norm, weight, scale)) < 1e-2
    assert torch.equal(alone, y)
    assert relative(other, exact_product(norm, beside, None)) < 1e-2


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_second_weight(tokens: int) -> None:
    (weight, scale), (beside, _) = drawn(12288, 2048, True), drawn(64, 2048, False)
    x = torch.randn(tokens, 2048, device=CUDA).to(BF16)
    with guarded():
        y, other = triton_gemv.gemv_beside(x, weight, scale, beside)
    assert relative(y, exact_product(x, weight, scale)) < 1e-2
    assert relative(other, exact_product(x, beside, None)) < 1e-2


def test_routes_of_bf16_scores() -> None:
    scores = torch.randn(300, 513, device=CUDA).to(BF16)
    scores[0, :40] = 1.5
    scores[1] = -scores[1].abs()
    weights, ids, _ = triton_route.route(scores, 10, True, True)
    expected, expected_ids = route(scores[:, :-1].float(), 10, True)
    assert torch.equal(ids[:, :10].long(), expected_ids)
    torch.testing.assert_close(weights[:, :10], expected)
