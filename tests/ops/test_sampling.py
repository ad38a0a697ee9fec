"""Sampling's pieces against plain float64 numpy, written out row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from deltaserve.ops.sampling import api, reference

Floats = npt.NDArray[np.float64]
VOCABS = (512, 151936)


def naive_distribution(
    logits: Floats, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """What one token is drawn from. Equal logits are kept or dropped together."""
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k:
        weights[logits < np.sort(logits)[-top_k]] = 0
    total = weights.sum()
    if top_p < 1:
        which = np.unique(-logits, return_inverse=True)[1]
        mass = np.bincount(which, weights)
        likelier = (np.cumsum(mass) - mass)[which]
        weights[likelier >= top_p * total] = 0
    weights[weights < min_p * weights.max()] = 0
    return np.asarray(weights / weights.sum())


def naive_penalties(
    logits: Floats, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> Floats:
    changed = logits.copy()
    for token in set(prompt) | set(output):
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token in set(output):
        changed[token] -= frequency * output.count(token) + presence
    return changed


def distribution(logits_RV: Tensor, cases: list[dict[str, Any]]) -> Floats:
    """The same from the ops, for one case a row."""
    vocab = logits_RV.shape[1]

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([case.get(name, default) for case in cases], dtype=dtype)

    top_k_R = column("top_k", vocab, torch.int64)
    weight_RV = api.weigh(logits_RV, column("temperature", 1.0, logits_RV.dtype))
    weight_RV = api.cut_top(weight_RV, logits_RV, top_k_R, column("top_p", 1.0, torch.float64), int(top_k_R.max()))
    weight_RV = api.cut_min(weight_RV, column("min_p", 0.0, torch.float64))
    return np.asarray((weight_RV.double() / weight_RV.sum(1, keepdim=True)).numpy())


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1e-30},
    {"temperature": 0.01},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_the_distribution_is_the_naive_one(dtype: torch.dtype, spread: float) -> None:
    logits_RV = (torch.randn(len(CASES), 512) * spread).to(dtype)
    got = distribution(logits_RV, CASES)
    for case, row, logits in zip(CASES, got, logits_RV.double().numpy(), strict=True):
        want = naive_distribution(logits, **case)
        assert not row[want == 0].any(), f"{case}: tokens are kept that should go"
        assert row[want > 1e-9].all(), f"{case}: tokens are gone that should stay"
        # Rounding a weight down loses less than one unit; fp32 exponentials are good to a few parts in 1e7.
        atol = 2e-6 if dtype == torch.float32 else 512 / api.WEIGHT_ONE
        np.testing.assert_allclose(row, want, rtol=0, atol=atol, err_msg=str(case))


@pytest.mark.parametrize("case", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.9}, {}])
def test_equal_logits_fare_alike(case: dict[str, Any]) -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0, -3.0, 0.0]])
    np.testing.assert_allclose(
        distribution(logits_RV, [case])[0], naive_distribution(logits_RV[0].double().numpy(), **case), atol=1e-6
    )


def test_top_p_takes_no_token_more_than_it_needs() -> None:
    """Two logits apart by one float, of exactly equal weight: half of the whole is the first alone."""
    logits_RV = torch.tensor([[1.0 - 2**-24, 1.0, -1e9]]).repeat(3, 1)
    cases = [{"temperature": 100.0, "top_p": top_p} for top_p in (0.5, 0.5 + 1e-9, 1.0)]
    assert distribution(logits_RV, cases).tolist() == [[0, 1, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]]


@pytest.mark.parametrize("vocab", VOCABS)
def test_no_row_depends_on_its_mates(vocab: int) -> None:
    """Bit for bit: the weights, the cut, the noise, the token and the logprobs of a row alone and in a batch."""
    rows = 16 if vocab < 1000 else 4
    logits_RV = (torch.randn(rows, vocab) * 4).round(decimals=1)  # with many equals
    temperature_R = torch.rand(rows) + 0.3
    top_k_R = torch.randint(1, 200, (rows,))
    top_p_R = torch.rand(rows, dtype=torch.float64)
    position_R = torch.randint(0, 4096, (rows,))
    key_R = torch.tensor([api.stream_key(seed, 0) for seed in range(rows)])

    def everything(rows_N: Tensor, width: int) -> list[Tensor]:
        logits_NV = logits_RV[rows_N]
        weight_NV = api.weigh(logits_NV, temperature_R[rows_N])
        weight_NV = api.cut_top(weight_NV, logits_NV, top_k_R[rows_N], top_p_R[rows_N], width)
        token_N = api.draw(weight_NV, api.uniform(key_R[rows_N], position_R[rows_N]))
        return [weight_NV, token_N, api.greedy(logits_NV), *api.token_logprobs(logits_NV, token_N, 20)]

    whole = everything(torch.arange(rows), 200)
    for row in range(rows):
        for kind, alone in enumerate(everything(torch.tensor([row]), int(top_k_R[row]))):
            assert torch.equal(alone[0], whole[kind][row]), f"row {row}, result {kind}"
    order_R = torch.randperm(rows)
    for kind, turned in enumerate(everything(order_R, vocab)):
        assert torch.equal(turned, whole[kind][order_R]), f"result {kind} depends on the order"


def chi_square(counts: Floats, expected: Floats) -> float:
    """In standard deviations; categories with few expected draws are counted together."""
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    big = int((expected >= 10).sum())
    counts = np.append(counts[:big], counts[big:].sum())
    expected = np.append(expected[:big], expected[big:].sum())
    assert expected[-1] > 0 or counts[-1] == 0, "a token without probability was drawn"
    used = expected > 0
    freedom = int(used.sum()) - 1
    return float((((counts - expected) ** 2)[used] / expected[used]).sum() - freedom) / math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("case", [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"min_p": 0.02}])
def test_draws_follow_the_distribution(vocab: int, case: dict[str, Any]) -> None:
    num_draws = 100_000
    logits_1V = torch.randn(1, vocab) * 2
    want = naive_distribution(logits_1V[0].double().numpy(), **case)
    weight_1V = torch.from_numpy(distribution(logits_1V, [case]) * 2.0**40).long()
    key_R = torch.tensor([api.stream_key(77, 0)]).expand(num_draws)
    uniform_R = api.uniform(key_R, torch.arange(num_draws))
    token_R = torch.cat([api.draw(weight_1V, part) for part in torch.split(uniform_R[:200], 1)])
    # One row for all draws: the same search, without a hundred thousand copies of the weights.
    goal_R = (uniform_R * weight_1V.sum()).long()
    every_R = torch.searchsorted(weight_1V[0].cumsum(0), goal_R, right=True)
    assert torch.equal(token_R, every_R[:200])
    counts = torch.bincount(every_R, minlength=vocab).double().numpy()
    assert abs(chi_square(counts, want * num_draws)) < 4.5


def test_draw_reaches_both_ends() -> None:
    weight_RV = torch.tensor([[0, 3, 0, 2, 0]]).expand(4, 5)
    almost_one = 1 - 2.0**-53
    token_R = api.draw(weight_RV, torch.tensor([0.0, 0.59, 0.61, almost_one], dtype=torch.float64))
    assert token_R.tolist() == [1, 1, 3, 3]
    whole = torch.full((1, 3), api.WEIGHT_ONE)
    assert api.draw(whole, torch.tensor([almost_one], dtype=torch.float64)).tolist() == [2]
    assert api.draw(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)).item() in range(5)


def test_weights_add_up_in_the_largest_vocabulary() -> None:
    weight_1V = api.weigh(torch.zeros(1, api.MAX_VOCAB), torch.ones(1))
    assert weight_1V.sum().item() == api.MAX_VOCAB * api.WEIGHT_ONE < 2**63
    with pytest.raises(AssertionError, match="vocabulary"):
        api.weigh(torch.zeros(1, api.MAX_VOCAB + 1), torch.ones(1))


def test_noise_is_uniform_and_independent() -> None:
    """Over positions, over neighbouring seeds, and between neighbours of either kind."""
    count = 200_000
    steps = torch.arange(count)
    keys = torch.tensor([api.stream_key(seed, 0) for seed in range(count)])
    for noise in (
        api.uniform(torch.full((count,), api.stream_key(0, 0)), steps),
        api.uniform(keys, torch.full((count,), 100)),
        api.uniform(torch.tensor([api.stream_key(5, stream) for stream in range(count)]), torch.zeros_like(steps)),
    ):
        counts = np.histogram(noise.numpy(), bins=256, range=(0.0, 1.0))[0].astype(np.float64)
        assert abs(chi_square(counts, np.full(256, count / 256))) < 4.5
        correlation = np.corrcoef(noise[:-1].numpy(), noise[1:].numpy())[0, 1]
        assert abs(correlation) * math.sqrt(count) < 4.5
        assert len(torch.unique(noise)) == count


def test_noise_is_pinned() -> None:
    """SplitMix64 has published values: those of seed 1234567 (as state, without the stream's mixing)."""
    key_R = torch.full((5,), 1234567)
    raw = (api.uniform(key_R, torch.arange(5)) * 2.0**53).long()
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert raw.tolist() == [value >> 11 for value in published]
    assert api.stream_key(-1, 0) != api.stream_key(2**63 - 1, 0)
    assert len({api.stream_key(seed, stream) for seed in range(-50, 50) for stream in range(50)}) == 5000


def test_noise_on_the_host_is_that_of_tensors() -> None:
    key_R = torch.tensor([api.stream_key(seed, 3) for seed in range(-500, 500)] + [2**63 - 1, -(2**63), 0, -1])
    position_R = torch.randint(0, 2**40, key_R.shape)
    assert torch.equal(reference.uniform(key_R, position_R), reference.uniform_on_host(key_R, position_R))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_gpu_agrees(vocab: int) -> None:
    """The noise bit for bit; the tokens wherever the exponentials are not on the edge."""
    rows = 64
    logits_RV = torch.randn(rows, vocab) * 3
    key_R = torch.tensor([api.stream_key(seed, 0) for seed in range(rows)])
    position_R = torch.randint(0, 4096, (rows,))
    limits = (torch.full((rows,), 20), torch.full((rows,), 0.95, dtype=torch.float64))

    def tokens(device: str) -> tuple[Tensor, ...]:
        logits, key, position, top_k, top_p = (x.to(device) for x in (logits_RV, key_R, position_R, *limits))
        noise_R = api.uniform(key, position)
        weight_RV = api.weigh(logits, torch.ones(rows, device=device))
        token_R = api.draw(api.cut_top(weight_RV, logits, top_k, top_p, 20), noise_R)
        return noise_R.cpu(), token_R.cpu(), api.greedy(logits).cpu(), api.token_logprobs(logits, token_R, 5)[2].cpu()

    for on_cpu, on_gpu in zip(tokens("cpu"), tokens("cuda"), strict=True):
        assert torch.equal(on_cpu, on_gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_are_the_naive_ones(dtype: torch.dtype) -> None:
    vocab, cases = 64, [(1.0, 0.5, 0.0), (1.3, 0.0, 0.0), (0.5, 0.0, 1.5), (2.0, -0.7, -2.0), (1.0, 0.0, 0.0)]
    generator = np.random.default_rng(1)
    logits_RV = (torch.randn(len(cases), vocab) * 3).to(dtype)
    count_RV = torch.zeros(len(cases), vocab, dtype=torch.int32)
    prompt_RV = torch.zeros(len(cases), vocab, dtype=torch.bool)
    want = []
    for row, case in enumerate(cases):
        prompt, output = generator.integers(0, 20, 12).tolist(), generator.integers(10, 30, 25).tolist()
        prompt_RV[row, prompt] = True
        count_RV[row] = torch.bincount(torch.tensor(output), minlength=vocab)
        want.append(naive_penalties(logits_RV[row].double().numpy(), prompt, output, *case))
    before = logits_RV.clone()
    columns = (torch.tensor(column, dtype=dtype) for column in zip(*cases, strict=True))
    got = api.penalize(logits_RV, count_RV, prompt_RV, *columns)
    assert torch.equal(logits_RV, before), "the logits were written to"
    np.testing.assert_allclose(got.numpy(), np.stack(want), rtol=1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_lowest_of_equals(vocab: int) -> None:
    logits_RV = torch.randn(3, vocab)
    for row, ids in enumerate(([vocab - 1, 17], [300, 301, 302], [0, vocab - 1])):
        logits_RV[row, ids] = 9.0
    assert api.greedy(logits_RV).tolist() == [17, 300, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 511])
def test_non_finite_rows_are_seen(value: float, place: int) -> None:
    logits_RV = torch.randn(4, 512)
    logits_RV[2, place] = value
    logits_RV[3] = 1e37
    assert api.is_finite(logits_RV).tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_those_of_log_softmax(dtype: torch.dtype) -> None:
    logits_NV = (torch.randn(20, 512) * 5).round().to(dtype)  # mostly equals
    logits_NV[0, :2] = torch.tensor([-0.0, 0.0])
    token_N = torch.randint(0, 512, (20,))
    logprob_N, place_N, top_NK, top_logprob_NK = api.token_logprobs(logits_NV, token_N, 20)
    want_NV = logits_NV.double().log_softmax(1)
    torch.testing.assert_close(logprob_N.double(), want_NV.gather(1, token_N[:, None])[:, 0], rtol=0, atol=1e-5)
    for row in range(20):
        order = np.lexsort((np.arange(512), -logits_NV[row].numpy())).tolist()
        assert top_NK[row].tolist() == order[:20]
        assert place_N[row] == order.index(int(token_N[row])) + 1
    torch.testing.assert_close(top_logprob_NK.double(), want_NV.gather(1, top_NK), rtol=0, atol=1e-5)
    assert (top_logprob_NK.diff(dim=1) <= 0).all()


def test_a_token_has_one_number_in_both_lists() -> None:
    logits_NV = torch.randn(50, 151936 // 16) * 3
    for place in (0, 3, 19):
        token_N = logits_NV.argsort(1, descending=True)[:, place].contiguous()
        logprob_N, place_N, top_NK, top_logprob_NK = api.token_logprobs(logits_NV, token_N, 20)
        assert torch.equal(top_NK[:, place], token_N)
        assert torch.equal(top_logprob_NK[:, place], logprob_N)
        assert (place_N == place + 1).all()
    assert api.token_logprobs(logits_NV, token_N, 0)[2].shape == (50, 0)
