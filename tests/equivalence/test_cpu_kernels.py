"""On a CPU kernels compute what torch would: the same tokens, and each row's bits whoever is beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve import LLM, SamplingParams
from deltaserve.core.request import Request
from deltaserve.models.hub import BUILTIN
from deltaserve.ops import cpu
from deltaserve.ops.attention import reference as attention
from deltaserve.ops.conv import reference as conv
from deltaserve.ops.gated_delta import reference as gated_delta
from deltaserve.ops.linear import reference as linear
from deltaserve.ops.moe import reference as moe
from deltaserve.ops.norm import reference as norm
from deltaserve.ops.sampling import reference as sampling
from tests.driver import Driver, Row
from tests.models.equality import ours

SUMS = Path(__file__).resolve().parents[1] / "clients" / "data" / "sums.jsonl"
NUM_LAYERS, NUM_NETS = 8, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompts(count: int) -> list[str]:
    rows = [json.loads(line) for line in SUMS.read_text().splitlines()[:count]]
    return [f"Question: {row['question']}\nAnswer:" for row in rows]


def tokens(llm: LLM, texts: list[str]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(texts, GREEDY)]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(prefix_cache="off", num_blocks=64) as made:
        yield made


KERNELS = {
    "linear.numba_linear": ("norm_linear", "linear"),
    "gated_delta.numba_net": ("net",),
    "attention.numba_attention": ("enter", "step"),
    "moe.numba_moe": ("sparse_moe",),
    "norm.numba_norm": ("add_norm",),
    "sampling.numba_greedy": ("greedy_checked",),
}
BY_TORCH: dict[Any, str] = {
    linear: "linear",
    norm: "gemma_rms_norm add_gemma_rms_norm gated_rms_norm",
    conv: "step chunk",
    gated_delta: "prepare step chunk",
    attention: "store step chunk",
    moe: "route experts",
    sampling: "greedy is_finite",
}


def test_kernels_alone_compute_a_step_of_the_builtin_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as often as there are layers for it, and nothing falls back to torch."""
    assert llm.tokenizer is not None
    for number, text in enumerate(prompts(3)):
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        llm.engine.add(Request(request_id=f"r{number}", prompt_token_ids=ids, params=GREEDY, arrival=0.0))
    llm.engine.step()  # the prompts
    calls: Counter[str] = Counter()

    def counted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any) -> Any:
            calls[name] += 1
            return compute(*args)

        return computed

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(cpu.kernels(module), name, counted(name, getattr(cpu.kernels(module), name)))
    for reference, functions in BY_TORCH.items():
        for name in functions.split():
            monkeypatch.setattr(reference, name, lambda *_, name=name: pytest.fail(f"torch computes {name}"))
    assert len(llm.engine.step()) == 3
    assert calls == {
        "norm_linear": 2 * NUM_LAYERS,
        "linear": NUM_LAYERS + 1,
        "net": NUM_NETS,
        "enter": NUM_LAYERS - NUM_NETS,
        "step": NUM_LAYERS - NUM_NETS,
        "sparse_moe": NUM_LAYERS,
        "add_norm": 1,
        "greedy_checked": 1,
    }


@pytest.mark.parametrize("drafts", ["0", "3"])
def test_torch_says_the_same(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, said = prompts(12), []
    for is_available in (True, False):
        monkeypatch.setattr(cpu, "is_available", lambda is_available=is_available: is_available)
        with LLM(prefix_cache="off", num_blocks=128, speculative_tokens=drafts) as llm:
            said.append(tokens(llm, texts))
    assert said[0] == said[1]


def test_bits_do_not_depend_on_batch_mates() -> None:
    model = ours(BUILTIN)
    draw = torch.Generator().manual_seed(5)
    lengths = (3, 64, 100, 17, 1)
    ids = [torch.randint(0, 2000, (length + 6,), generator=draw).tolist() for length in lengths]

    def logits(together: bool) -> list[torch.Tensor]:
        """Of each row's last tokens, one by one; its prompt is computed alone."""
        driver, rows = Driver(model), [Row(token_ids) for token_ids in ids]
        for row, length in zip(rows, lengths, strict=True):
            driver.step([row], [length])
        groups = [rows] if together else [[row] for row in rows]
        steps = [driver.step(group, [1] * len(group), len(group)) for group in groups for _ in range(6)]
        if together:
            return [torch.cat([step[row] for step in steps]) for row in range(len(rows))]
        return [torch.cat([step[0] for step in steps[6 * row : 6 * row + 6]]) for row in range(len(rows))]

    for mates, alone in zip(logits(True), logits(False), strict=True):
        assert torch.equal(mates, alone)
