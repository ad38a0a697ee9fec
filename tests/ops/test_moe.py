"""Routing and experts against a float64 loop over tokens and experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaserve.ops.linear.api import linear, quantize_weight
from deltaserve.ops.moe import reference
from deltaserve.ops.moe.api import experts, route

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
FORMS = [experts, reference.summed_rows, reference.grouped_experts]


def naive_route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = [], []
    for logits in logits_TE.double().tolist():
        probabilities = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0).tolist()
        chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
        total = sum(probabilities[e] for e in chosen) if renormalize else 1.0
        weights.append([probabilities[e] / total for e in chosen])
        ids.append(chosen)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids)


def naive_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    x, w13, w2, weights = x.double(), w13.double(), w2.double(), weights.double()
    output = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (w13[e] @ x[t]).chunk(2)
            output[t] += weight * (w2[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return output


def random_experts(num_experts: int, width: int = 12, inner: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(num_experts, 2 * inner, width).double(), torch.randn(num_experts, width, inner).double()


def close(actual: Tensor, expected: Tensor, eps: float = 1e-12) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (3, 16, 4), (50, 7, 7), (5, 512, 10)])
def test_routing_is_a_softmax_of_which_the_most_probable_are_kept(
    tokens: int, num_experts: int, top_k: int, renormalize: bool
) -> None:
    logits = 4 * torch.randn(tokens, num_experts).double()
    expected_weights, expected_ids = naive_route(logits, top_k, renormalize)
    weights, ids = route(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    close(weights, expected_weights)


@pytest.mark.parametrize("num_experts", [16, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_id_is_chosen(dtype: torch.dtype, num_experts: int) -> None:
    logits = torch.randint(0, 3, (100, num_experts)).to(dtype)
    logits[0], logits[1, 5:] = 0, -0.0
    weights, ids = route(logits, 8, True)
    expected_weights, expected_ids = naive_route(logits, 8, True)
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    close(weights, expected_weights, 1e-6)


def test_extreme_logits_give_finite_weights() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 3e38], [-3e38, -3e38, -3e38, -3e38]])
    for renormalize in (True, False):
        weights, _ = route(logits, 2, renormalize)
        assert weights.isfinite().all()
    assert route(logits, 2, True)[1].tolist() == [[3, 0], [0, 1]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(1, 16, 4), (2, 64, 10), (16, 16, 4), (40, 8, 2), (9, 3, 3), (300, 5, 1)]
)
def test_experts_equal_the_loop(tokens: int, num_experts: int, top_k: int, form: Experts) -> None:
    w13, w2 = random_experts(num_experts)
    x = torch.randn(tokens, w2.shape[1]).double()
    weights, ids = route(torch.randn(tokens, num_experts).double(), top_k, False)
    close(form(x, w13, w2, weights, ids), naive_experts(x, w13, w2, weights, ids))


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_no_token_hits_are_left_alone(form: Experts) -> None:
    """Experts 1 and 3 overflow to infinity; no token is routed to them."""
    w13, w2 = random_experts(4)
    w13[1], w13[3] = 1e300, -1e300
    x = torch.randn(6, w2.shape[1]).double()
    weights, ids = torch.rand(6, 2).double(), torch.tensor([[0, 2], [2, 0]] * 3)
    close(form(x, w13, w2, weights, ids), naive_experts(x, w13, w2, weights, ids))


@pytest.mark.parametrize("form", FORMS)
def test_a_token_of_nan_stays_alone(form: Experts) -> None:
    w13, w2 = random_experts(4)
    x = torch.randn(6, w2.shape[1]).double()
    weights, ids = route(torch.randn(6, 4).double(), 2, True)
    expected = naive_experts(x, w13, w2, weights, ids)
    x[3] = torch.nan
    output = form(x, w13, w2, weights, ids)
    assert output[3].isnan().all()
    keep = torch.arange(6) != 3
    close(output[keep], expected[keep])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype, form: Experts) -> None:
    w13, w2 = (weight.to(dtype) / 3 for weight in random_experts(8))
    x = torch.randn(20, w2.shape[1]).to(dtype)
    weights, ids = route(torch.randn(20, 8).to(dtype), 3, True)
    output = form(x, w13, w2, weights, ids)
    assert output.dtype == dtype
    expected = naive_experts(x, w13, w2, weights, ids)
    close(output, expected, 4 * float(torch.finfo(dtype).eps) * max(1.0, float(expected.abs().max())))


def test_one_token_gathers_few_sum_rows_and_many_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("gathered_experts", "summed_rows", "grouped_experts"):
        monkeypatch.setattr(reference, name, lambda *_, name=name: taken.append(name))
    for tokens, num_experts, top_k, width, inner in (
        (1, 16, 4, 192, 32),
        (16, 16, 4, 192, 32),
        (100, 16, 4, 192, 32),
        (1, 512, 10, 2048, 512),
    ):
        w13, w2 = torch.empty(num_experts, 0, width), torch.empty(num_experts, width, 1).expand(-1, -1, inner)
        ids = torch.zeros(tokens, top_k, dtype=torch.int64)
        reference.experts(torch.zeros(tokens, width), w13, w2, ids.float(), ids)
    assert taken == ["gathered_experts", "summed_rows", "grouped_experts", "grouped_experts"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inner"), [(256, 128), (192, 48)])
def test_quantised_experts_equal_the_loop_over_quantised_products(width: int, inner: int, dtype: torch.dtype) -> None:
    (w1, s1), (w3, s3) = (quantize_weight(torch.randn(5, inner, width) / 16) for _ in range(2))
    w2, w2_scale = quantize_weight(torch.randn(5, width, inner) / 8)
    x = torch.randn(9, width).to(dtype)
    weights, ids = route(torch.randn(9, 5), 3, True)
    expected = torch.zeros(9, width)
    for t in range(9):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (linear(x[t : t + 1], w[e], s[e], torch.float32) for w, s in ((w1, s1), (w3, s3)))
            expected[t] += weight * linear((silu(gate) * up).to(dtype), w2[e], w2_scale[e], torch.float32)[0]
    output = experts(x, torch.cat([w1, w3], 1), w2, weights, ids, torch.cat([s1, s3], 1), w2_scale)
    assert output.dtype == dtype
    close(output, expected.double(), 1e-5 if dtype == torch.float32 else 1e-2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    w13, w2 = random_experts(4)
    x, weights, ids = torch.zeros(2, 12), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="5 experts per token of 4"):
        route(torch.zeros(1, 4), 5, True)
    with pytest.raises(AssertionError, match="experts expect 12"):
        experts(x[:, :5], w13, w2, weights, ids)
    with pytest.raises(AssertionError, match="do not belong together"):
        experts(x, w13, w2[:3], weights, ids)
    with pytest.raises(AssertionError, match="2 tokens are routed, 1 given"):
        experts(x[:1], w13, w2, weights, ids)
