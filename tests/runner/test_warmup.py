"""The warm-up goes through steps of all sizes, and through the MTP layer's; on a CPU nothing is compiled by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from deltaserve.config import DType, EngineConfig
from deltaserve.engine.engine import Engine
from deltaserve.layers.context import ForwardContext
from deltaserve.ops.layout import Layout
from deltaserve.runner import setup
from deltaserve.runner.runner import Runner
from deltaserve.runner.warmup import WarmUp
from tests.models.factory import tiny_config, write_checkpoint

MOST = 40


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_the_mtp_layer_sees_every_size_and_one_more(max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        device="cpu", speculative_tokens="2", max_num_seqs=max_num_seqs, max_num_batched_tokens=MOST, num_blocks=4
    )
    engine = Engine(config, fill=0.0)
    runner = engine.workers.runner
    assert runner is not None
    sizes, inner = set(), runner.model.look_ahead

    def look_ahead(token_ids_T: Tensor, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        assert context.layout.first_key is not None
        sizes.add((len(token_ids_T), context.layout.segments[0].is_step, context.layout.segments[0].max_len))
        return inner(token_ids_T, hidden_TD, context)

    monkeypatch.setattr(runner.model, "look_ahead", look_ahead)
    WarmUp(runner, MOST)._all_sizes()
    assert {size for size, is_step, _ in sizes if not is_step} >= {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, MOST, MOST + 1}
    rows = {(size // length, length) for size, is_step, length in sizes if is_step}
    assert rows == {(row, length) for row in range(1, max_num_seqs + 1) for length in (1, 2, 3)}


def watch(runner: Runner, see: Callable[[int, Layout], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the tokens of every forward pass, and how they are laid out."""
    inner = runner.model.forward  # type: ignore[attr-defined]

    def forward(token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        see(len(token_ids_T), context.layout)
        found: Tensor = inner(token_ids_T, context)
        return found

    monkeypatch.setattr(runner.model, "forward", forward)


def test_short_contexts_fill_a_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts of the longest context make the largest step, where one cannot."""
    config = EngineConfig(
        device="cpu", max_model_len=16, max_num_seqs=3, max_num_batched_tokens=MOST, speculative_tokens="0"
    )
    engine = Engine(config, fill=0.0)
    runner = engine.workers.runner
    assert runner is not None
    seen = set()

    def see(tokens: int, layout: Layout) -> None:
        assert int(layout.position.max()) < 16
        seen.add(tokens)

    watch(runner, see, monkeypatch)
    WarmUp(runner, MOST)._all_sizes()
    assert seen >= {1, 2, 16, 17, 32, 33, MOST}
    WarmUp(runner, 1000)._all_sizes()
    assert max(seen) == 3 * 16


@pytest.mark.parametrize("mixes", [False, True])
def test_steps_of_both_kinds_are_run_where_there_will_be_some(mixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        device="cpu", max_model_len=64, max_num_seqs=5, max_num_batched_tokens=MOST, speculative_tokens="1"
    )
    engine = Engine(config, fill=0.0)
    runner = engine.workers.runner
    assert runner is not None
    seen = set()

    def see(tokens: int, layout: Layout) -> None:
        kinds = [(segment.is_step, segment.row_end - segment.row_start) for segment in layout.segments]
        if len(kinds) > 1:
            assert kinds[1] == (False, 1)
            seen.add((kinds[0], layout.segments[0].max_len))

    watch(runner, see, monkeypatch)
    WarmUp(runner, MOST, mixes)._all_sizes()
    assert seen == ({((True, rows), length) for rows in (1, 2, 3, 4) for length in (1, 2)} if mixes else set())


@pytest.mark.parametrize(
    ("eager", "dtype", "mixes"), [(0, "float32", False), (1, "float32", True), (0, "float64", True)]
)
def test_steps_are_mixed_where_nothing_is_recorded(
    eager: int, dtype: DType, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        pass

    def warm_up(_runner: Runner, _max_tokens: int, mixes: bool = False) -> None:
        raise AskedError(mixes)

    monkeypatch.setattr(setup, "WarmUp", warm_up)
    config = EngineConfig(device="cpu", dtype=dtype, enforce_eager=bool(eager), num_blocks=4, max_num_seqs=2)
    engine = Engine(config, fill=0.0)
    assert engine.workers.runner is not None
    with pytest.raises(AskedError) as asked:
        setup._measure(config, engine.blueprint, engine.workers.runner.model)
    assert asked.value.args == (mixes,)
    engine.close()


def test_few_layers_run_what_all_run(tmp_path: Path) -> None:
    """Shapes of layers, and of what they get from the one before: eight of 48 have all of the 80B's."""
    folder = write_checkpoint(tmp_path, tiny_config(num_hidden_layers=12), seed=0)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", max_num_batched_tokens=MOST, num_blocks=4))
    runner = engine.workers.runner
    assert runner is not None
    ran: list[int] = []
    for index, layer in enumerate(runner.model.layers):  # type: ignore[attr-defined]
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    with runner.model.shortened():
        WarmUp(runner, MOST)._prefill(np.array([3]))
    assert ran == list(range(8))
    ran.clear()
    WarmUp(runner, MOST)._prefill(np.array([3]))
    assert ran == list(range(12))
    engine.close()
