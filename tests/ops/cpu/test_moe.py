"""A mixture of experts by its kernel on a CPU, against a float64 loop over tokens and experts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltaserve.ops.linear import api as linear_api
from deltaserve.ops.moe import api, cpu, numba_moe
from tests.ops.guarded import guarded, relative
from tests.ops.test_moe import naive_experts, naive_route

CPU, F32 = torch.device("cpu"), torch.float32


@dataclass
class Mixture:
    x: Tensor
    scores: Tensor
    w13: Tensor
    w2: Tensor
    top_k: int
    renormalize: bool
    shared: tuple[Tensor, Tensor]

    @classmethod
    def random(
        cls,
        tokens: int,
        num_experts: int = 8,
        top_k: int = 3,
        renormalize: bool = True,
        width: int = 24,
        inner: int = 16,
        shared: int = 40,
    ) -> Mixture:
        w13, w2 = api.allocate(num_experts, inner, width, F32, CPU)
        shared13, shared2 = (
            linear_api.allocate(2 * shared, width, F32, CPU),
            linear_api.allocate(width, shared, F32, CPU),
        )
        for weight in (w13, w2, shared13, shared2):
            weight.copy_(torch.randn(weight.shape) / weight.shape[-1] ** 0.5)
        # Extra columns: rows have a stride of their own.
        x, scores = torch.randn(tokens, width + 3)[:, :width], 2 * torch.randn(tokens, num_experts + 4)
        return cls(x, scores[:, : num_experts + 1], w13, w2, top_k, renormalize, (shared13, shared2))

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, bool, tuple[Tensor, Tensor]]:
        return self.x, self.scores, self.w13, self.w2, self.top_k, self.renormalize, self.shared

    def run(self) -> Tensor:
        assert cpu.takes(self.x, self.scores, self.w13, self.w2, self.top_k, self.shared)
        with guarded():
            out: Tensor = numba_moe.sparse_moe(*self.arguments())
        return out

    def expected(self) -> Tensor:
        weights, ids = naive_route(self.scores[:, :-1], self.top_k, self.renormalize)
        routed = naive_experts(self.x, self.w13, self.w2, weights, ids)
        one, zero = torch.ones(len(self.x), 1, dtype=torch.float64), torch.zeros(len(self.x), 1, dtype=torch.int64)
        shared = naive_experts(self.x, self.shared[0][None], self.shared[1][None], one, zero)
        return routed + self.scores[:, -1:].double().sigmoid() * shared


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"),
    [(1, 16, 4), (2, 64, 10), (16, 16, 4), (40, 8, 2), (9, 3, 3), (300, 5, 1), (1, 1, 1)],
)
def test_mixtures_equal_the_loop(tokens: int, num_experts: int, top_k: int, renormalize: bool) -> None:
    mixture = Mixture.random(tokens, num_experts, top_k, renormalize)
    assert relative(mixture.run(), mixture.expected()) < 1e-6


@pytest.mark.parametrize(("width", "inner", "shared"), [(8, 8, 8), (192, 32, 64), (40, 72, 24), (64, 128, 16)])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_any_width_of_whole_vectors(width: int, inner: int, shared: int, tokens: int) -> None:
    mixture = Mixture.random(tokens, width=width, inner=inner, shared=shared)
    assert relative(mixture.run(), mixture.expected()) < 1e-6


def test_of_equal_scores_the_lowest_expert_is_taken() -> None:
    mixture = Mixture.random(100, num_experts=16, top_k=5)
    mixture.scores.copy_(torch.randint(0, 3, mixture.scores.shape).float())
    mixture.scores[0], mixture.scores[1, 5:] = 0, -0.0
    assert relative(mixture.run(), mixture.expected()) < 1e-6


@pytest.mark.parametrize("renormalize", [True, False])
def test_scores_far_apart(renormalize: bool) -> None:
    mixture = Mixture.random(2, num_experts=4, top_k=2, renormalize=renormalize)
    mixture.scores[:, :4] = torch.tensor([[1e4, -1e4, 0.0, 3e38], [-3e38, -3e38, -3e38, -3e38]])
    mixture.scores[:, 4] = torch.tensor([-1e4, 1e4])
    assert relative(mixture.run(), mixture.expected()) < 1e-6


def test_experts_that_no_token_takes_are_left_alone() -> None:
    mixture = Mixture.random(6, num_experts=4, top_k=2)
    mixture.scores[:, [1, 3]] = -1e30
    expected = mixture.expected()
    mixture.w13[[1, 3]] = torch.nan
    mixture.w2[[1, 3]] = torch.nan
    assert relative(mixture.run(), expected) < 1e-6


def test_a_token_of_nan_stays_alone() -> None:
    mixture = Mixture.random(6)
    expected = mixture.run()
    mixture.x[3], mixture.scores[3] = torch.nan, torch.nan
    out = mixture.run()
    assert out[3].isnan().all()
    keep = torch.arange(6) != 3
    assert torch.equal(out[keep], expected[keep])


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_score_of_nan_is_told_wherever_it_stands(renormalize: bool) -> None:
    for expert in range(6):
        mixture = Mixture.random(2, num_experts=6, top_k=3, renormalize=renormalize)
        mixture.scores[1, expert] = torch.nan
        out = mixture.run()
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


@pytest.mark.parametrize("tokens", [2, 7, 100])
def test_a_tokens_bits_do_not_depend_on_its_mates(tokens: int) -> None:
    mixture = Mixture.random(tokens, num_experts=4, top_k=2)
    out, x, scores = mixture.run(), mixture.x, mixture.scores
    for token in range(tokens):
        mixture.x, mixture.scores = x[token : token + 1], scores[token : token + 1]
        assert torch.equal(mixture.run(), out[token : token + 1])


def test_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, scores, w13, w2, top_k, _, shared = Mixture.random(3).arguments()
    assert cpu.takes(x, scores, w13, w2, top_k, shared)
    assert not cpu.takes(x, scores[:, :-1], w13, w2, top_k, shared), "the last expert is the shared one"
    assert not cpu.takes(x, scores, w13.contiguous(), w2, top_k, shared)
    assert not cpu.takes(x, scores, w13, w2.contiguous(), top_k, shared)
    assert not cpu.takes(x, scores, w13, w2, top_k, (shared[0].contiguous(), shared[1]))
    assert not cpu.takes(x, scores, w13, w2, top_k, (shared[0], shared[1].contiguous()))
    assert not cpu.takes(x.bfloat16(), scores, w13, w2, top_k, shared)
    for odd in (Mixture.random(3, width=20), Mixture.random(3, inner=12), Mixture.random(3, shared=4)):
        assert not cpu.takes(odd.x, odd.scores, odd.w13, odd.w2, odd.top_k, odd.shared)
    monkeypatch.setattr(cpu, "is_worth_threads", lambda work: work == 3 * (3 * 16 + 40) * 3 * 24)
    assert not cpu.takes(x, scores, w13, w2, top_k, shared), "threads are faster"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", [16, 12])
def test_the_facade(inner: int, dtype: torch.dtype) -> None:
    mixture = Mixture.random(5, inner=inner)
    x, scores, w13, w2, top_k, renormalize, shared = mixture.arguments()
    shared = (shared[0].to(dtype), shared[1].to(dtype))
    y = api.sparse_moe(x.to(dtype), scores.to(dtype), w13.to(dtype), w2.to(dtype), top_k, renormalize, shared=shared)
    assert y.dtype == dtype
    assert relative(y, mixture.expected()) < (1e-6 if dtype != torch.bfloat16 else 2e-2)
