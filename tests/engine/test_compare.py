"""`compare` finds no difference where there is none, and the layer where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.config import EngineConfig
from deltaserve.engine.compare import Comparison, compare
from deltaserve.models.load import load_model
from deltaserve.models.qwen3_next import Qwen3Next
from tests.models.factory import fp8_config, tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("compare"), tiny_config(mlp_only_layers=[1]), mtp=True)


def run(folder: Path, **changes: Any) -> Comparison:
    return compare(EngineConfig(model=str(folder), **changes), num_decode=4, chunk=24)


def test_equal_models_are_equal_layer_by_layer(folder: Path) -> None:
    comparison = run(folder)
    assert [row.layer for row in comparison.rows] == [
        "layer 0 (gated delta net, moe)",
        "layer 1 (gated delta net, dense)",
        "layer 2 (gated delta net, moe)",
        "layer 3 (attention, moe)",
        "final norm",
        "logits",
    ]
    for row in comparison.rows:
        assert row.scale > 0.1
        assert 0 < max(row.whole, row.chunked, row.decode) < 1e-4
    assert (comparison.num_equal, comparison.num_decode, comparison.num_prompt) == (4, 4, 200)
    lines = comparison.lines()
    assert lines[0] == "largest difference from transformers: 200 prompt tokens (whole, and 24 a step), 4 generated"
    assert [line.split("  ")[0] for line in lines[2:-1]] == [row.layer for row in comparison.rows]
    assert lines[-1] == "greedy tokens equal: 4 of 4"


def test_the_limits_of_the_config_do_not_matter(folder: Path) -> None:
    comparison = run(folder, max_model_len=7, num_blocks=1, num_slots=1, max_num_seqs=8, max_num_batched_tokens=9)
    assert comparison.num_equal == 4


def test_a_prompt_may_be_given(folder: Path) -> None:
    comparison = compare(EngineConfig(model=str(folder)), [5, 6, 7], num_decode=2, chunk=2)
    assert (comparison.num_prompt, comparison.num_equal) == (3, 2)


def test_fp8_is_compared_with_what_was_multiplied_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, fp8_config(hidden_size=256), fp8=True)
    rounded, same = run(folder, device="cpu"), run(folder, device="cpu", quantization="none")
    assert rounded.lines()[-1].endswith("--quantization none compares the same sums")
    assert same.lines()[-1] == "greedy tokens equal: 4 of 4"
    for row in same.rows:
        assert max(row.whole, row.chunked, row.decode) < 1e-4


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """The engine's model is loaded with one weight changed."""

    def load_wrong(*args: Any, **kwargs: Any) -> Qwen3Next:
        model = load_model(*args, **kwargs)
        with torch.no_grad():
            change(dict(model.named_parameters())[name])
        return model

    monkeypatch.setattr("deltaserve.engine.workers.load_model", load_wrong)


def test_the_layer_that_differs_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "layers.2.mlp.shared_expert.down_proj.weight", lambda weight: weight[0, 0].add_(0.5))
    differences = [max(row.whole, row.chunked, row.decode) for row in run(folder).rows]
    assert max(differences[:2]) < 1e-5
    assert min(differences[2:]) > 1e-3


def test_each_column_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the logits are wrong, in every column, and no greedy token is transformers' any more."""
    spoil(monkeypatch, "lm_head.weight", lambda weight: weight.neg_())
    comparison = run(folder)
    *rest, logits = comparison.rows
    assert max(max(row.whole, row.chunked, row.decode) for row in rest) < 1e-4
    assert min(logits.whole, logits.chunked, logits.decode) > 1
    assert comparison.num_equal == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "at least one"),
        ({"prompt": [160]}, "token ids from 0 to 159"),
        ({"num_decode": 0}, "num_decode is 0"),
        ({"chunk": 0}, "chunk 0; both must be at least 1"),
        ({"prompt": [1] * 2000}, "max_model_len"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(EngineConfig(model=str(folder)), **arguments)
