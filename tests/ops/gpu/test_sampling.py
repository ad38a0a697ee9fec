"""The kernels of sampling on a GPU against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.ops.sampling import api, reference

pytestmark = pytest.mark.gpu
VOCABS = [40, 2048, 4097, 151_936]


def rough_logits(rows: int, vocab: int) -> Tensor:
    """With many equal ones."""
    return (torch.randn(rows, vocab) * 3).mul(16).round().div(16)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_checked(dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits = rough_logits(rows, vocab).to(dtype)
    on_gpu = logits.cuda()
    token, finite = api.greedy_checked(on_gpu)
    assert token.tolist() == reference.greedy(logits).tolist()
    assert bool(finite.all())
    for bad in (torch.nan, torch.inf, -torch.inf):
        on_gpu[rows // 2, vocab // 2] = bad
        assert api.greedy_checked(on_gpu)[1].tolist() == [row != rows // 2 for row in range(rows)]


def test_greedy_checked_replays() -> None:
    logits = rough_logits(7, 151_936).cuda()
    api.greedy_checked(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, finite = api.greedy_checked(logits)
    logits[:, 77] = 100.0
    logits[3, 5] = torch.nan
    graph.replay()
    assert token[[0, 1, 2, 4, 5, 6]].tolist() == [77] * 6
    assert finite.tolist() == [True, True, True, False, True, True, True]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("cuts", ["", "k", "p", "m", "kp", "kpm"])
def test_tokens_are_those_of_the_reference(vocab: int, cuts: str) -> None:
    """But where the noise lies within the last bits of an exponential from a boundary, which is rare."""
    rows = 64
    logits = rough_logits(rows, vocab)
    temperature = torch.rand(rows) * 2 + 0.1
    top_k = torch.randint(1, 40, (rows,)) if "k" in cuts else torch.full((rows,), vocab)
    top_p = torch.rand(rows).double() * 0.9 + 0.1 if "p" in cuts else torch.ones(rows).double()
    min_p = torch.rand(rows).double() * 0.3 if "m" in cuts else torch.zeros(rows).double()
    key = torch.tensor([api.stream_key(seed, 0) for seed in range(rows)])
    position = torch.randint(0, 4096, (rows,))
    widths = [int(k) if "k" in cuts else vocab if "p" in cuts else 0 for k in top_k]
    tensors = (logits, temperature, top_k, top_p, min_p, key, position)

    def tokens(device: str) -> Tensor:
        x, t, k, p, m, own_key, own_position = (values.to(device) for values in tensors)
        return api.sample(x, t, k, p, m, own_key, own_position, widths, "p" in cuts, "m" in cuts).cpu()

    differ = int((tokens("cpu") != tokens("cuda")).sum())
    assert differ <= (1 if cuts in ("", "m") else 2), f"{differ} of {rows} tokens differ"


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 33])
def test_right_guesses_and_noise(rows: int, length: int) -> None:
    token, guess = torch.randint(0, 2, (rows, length)), torch.randint(0, 2, (rows, length - 1))
    ok, key = torch.rand(rows, length) < 0.8, torch.randint(-(2**63), 2**63 - 1, (rows,))
    found = api.count_right(token.cuda(), ok.cuda(), guess.cuda())
    assert torch.equal(found.cpu(), reference.count_right(token, ok, guess))
    noise = api.uniform(key.cuda(), token[:, 0].contiguous().cuda())
    assert torch.equal(noise.cpu(), reference.uniform(key, token[:, 0]))
