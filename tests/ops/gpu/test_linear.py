"""Projections on a GPU against float64, at the shapes of the 80B model and at odd ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear import gpu, reference
from deltaserve.ops.linear.api import allocate, linear
from tests.ops.guarded import guarded, relative

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
TOKENS = [1, 2, 3, 4, 5, 17, 63, 64, 65, 127, 128, 200, 1000]


def expected_of(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return x.double() @ weight.double().T
    x_q, x_scale = reference.quantize_rows(x)
    x = reference.dequantize_rows(x_q, x_scale, torch.float64)
    return x @ reference.dequantize_weight(weight, scale, torch.float64).T


@pytest.mark.parametrize(("outputs", "inputs"), [(12288, 2048), (2048, 4096), (9216, 2048), (200, 300), (96, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, scale = reference.quantize_weight(torch.randn(outputs, inputs, device=CUDA) / inputs**0.5)
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs, device=CUDA).to(dtype)
        with guarded():
            output = linear(x, weight, scale)
        assert output.shape == (tokens, outputs)
        # Now and then a number is rounded to the other of two steps of e4m3.
        assert relative(output, expected_of(x, weight, scale)) < 1e-2, tokens


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("outputs", "inputs"), [(513, 2048), (64, 2048), (2049, 192), (77, 300)])
def test_plain(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(outputs, inputs, device=CUDA) / inputs**0.5).to(dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs, device=CUDA).to(dtype)
        expected = expected_of(x, weight, None)
        for out in (dtype, torch.float32):
            if tokens <= gpu.SMALL:
                with guarded():
                    output = linear(x, weight, dtype=out)
            else:
                output = linear(x, weight, dtype=out)
            assert output.dtype == out
            assert relative(output, expected) < (LIMITS[dtype] if out == dtype else 1e-4), (tokens, out)


def test_an_uneven_weight_of_many_tokens() -> None:
    """What lies behind it does not matter."""
    weight = allocate(513, 2048, torch.bfloat16, CUDA)
    weight.copy_(torch.randn(513, 2048, device=CUDA) / 45)
    whole = gpu.with_rows_behind(weight)
    assert whole is not None
    whole[513:] = torch.nan
    for tokens in (gpu.MANY - 1, gpu.MANY, gpu.MANY + 1):
        x = torch.randn(tokens, 2048, device=CUDA).bfloat16()
        assert relative(linear(x, weight), expected_of(x, weight, None)) < 1e-2, tokens


def test_logits() -> None:
    weight = (torch.randn(151936, 2048, device=CUDA) / 45).bfloat16()
    for tokens in (1, 4, 8, 33, 128):
        x = torch.randn(tokens, 2048, device=CUDA).bfloat16()
        output = linear(x, weight, dtype=torch.float32)
        rows = torch.randint(0, 151936, (1000,), device=CUDA)
        assert relative(output[:, rows], expected_of(x, weight[rows], None)) < 1e-4, tokens


def test_the_vendors_blockwise_product_and_ours_agree() -> None:
    from deltaserve.ops.linear.triton_gemm import gemm

    weight, scale = reference.quantize_weight(torch.randn(2048, 4096, device=CUDA) / 64)
    for tokens in (65, 128, 1001):
        x = torch.randn(tokens, 4096, device=CUDA).bfloat16()
        expected = expected_of(x, weight, scale)
        assert relative(gemm(x, weight, scale, torch.bfloat16), expected) < 1e-2
        if properties(CUDA).is_hopper:
            assert gpu.has_blockwise(x, weight, torch.bfloat16) == (tokens > 500)  # few tiles are split by ours
            assert relative(gpu.blockwise(x, weight, scale), expected) < 1e-2


@pytest.mark.parametrize("tokens", [1, 4, 8, 40, 100, 200])
def test_the_same_again_and_beside_others(tokens: int) -> None:
    weight, scale = reference.quantize_weight(torch.randn(2048, 4096, device=CUDA))
    x = torch.randn(tokens, 4096, device=CUDA).bfloat16()
    first = linear(x, weight, scale)
    for _ in range(5):
        assert torch.equal(linear(x, weight, scale), first)
    other = x.clone()
    other[1:] = torch.nan
    assert torch.equal(linear(other, weight, scale)[0], first[0])


@pytest.mark.parametrize("tokens", [5, 8, 16, 17, 33, 64])
def test_a_plain_weight_beside_a_quantised_one(tokens: int) -> None:
    """One launch says what two say, whatever it holds of the weights."""
    from deltaserve.ops.linear.triton_gemm import choose_tiles, gemm_beside

    found = properties(CUDA)
    weight, scale = reference.quantize_weight(torch.randn(12288, 2048, device=CUDA) / 45)
    beside = (torch.randn(64, 2048, device=CUDA) / 45).bfloat16()
    x = torch.randn(tokens, 2048, device=CUDA).bfloat16()
    expected, other = linear(x, weight, scale), linear(x, beside)
    tiles = choose_tiles(tokens, 12288, 2048, True, found.num_sms, found.shared_bytes)
    for held in (0, 2, 4):
        with guarded():
            outputs = gemm_beside(x, weight, scale, beside, replace(tiles, held=held))
        assert torch.equal(outputs[0], expected), held
        assert torch.equal(outputs[1], other), held


def test_in_a_graph() -> None:
    weight, scale = reference.quantize_weight(torch.randn(2048, 4096, device=CUDA))
    for tokens in (1, 8, 128):
        x = torch.randn(tokens, 4096, device=CUDA).bfloat16()
        linear(x, weight, scale)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = linear(x, weight, scale)
        x.normal_()
        graph.replay()
        assert torch.equal(output, linear(x, weight, scale))
