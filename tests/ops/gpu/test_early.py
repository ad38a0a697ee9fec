"""Kernels that start before the one before them has ended: whole steps give the same bits with them and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.layers.context import ForwardContext
from deltaserve.model_config import ModelConfig
from deltaserve.models.dummy import fill_at_random
from deltaserve.models.qwen3_next import Qwen3Next
from deltaserve.ops.layout import BLOCK, Layout
from deltaserve.ops.linear import gpu, triton_early, triton_gemm
from deltaserve.ops.moe import triton_pairs
from tests.models.factory import WIDE, tiny_config

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LAYERS, REPLAYS = 8, 20
MOST = triton_early.MAX_TOKENS
"""As it is while no test has changed it."""
WIDTHS = WIDE | {"num_hidden_layers": LAYERS, "num_experts": 64}


def make_model() -> Qwen3Next:
    units = [f"layers.{layer}.{unit}" for layer in range(LAYERS) for unit in ("mixer", "mlp")]
    model = Qwen3Next(ModelConfig.from_hf(tiny_config(**WIDTHS)), torch.bfloat16, CUDA, quantized=units)
    fill_at_random(model, 1)
    return model


def hidden_states(model: Qwen3Next, rows: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of the replays of one graph of a step, each from the states that the one before it left."""
    monkeypatch.setattr(triton_early, "MAX_TOKENS", MOST if early else -1)
    config, generator = model.config, torch.Generator(CUDA).manual_seed(2)

    def pools(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device=CUDA).to(dtype) / 4 for _ in range(count)]

    layout = Layout.from_rows(
        [1] * rows,
        num_step=rows,
        starts=[70 + 3 * row for row in range(rows)],
        read_slots=list(range(rows)),
        write_slots=[[row] for row in range(rows)],
        blocks=[[3 * row, 3 * row + 1, 3 * row + 2] for row in range(rows)],
        device=CUDA,
    )
    context = ForwardContext(
        layout=layout,
        kv=pools(config.num_full_layers, 2, 3 * rows, BLOCK, config.num_kv_heads, config.head_dim),
        conv=pools(config.num_gdn_layers, rows, config.conv_width - 1, config.conv_dim),
        state=pools(
            config.num_gdn_layers, rows, config.gdn_v_heads, config.gdn_k_dim, config.gdn_v_dim, dtype=torch.float32
        ),
    )
    ids = torch.arange(rows, device=CUDA) * 17
    with torch.inference_mode():
        model(ids, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = model(ids, context)
        outputs = []
        for _ in range(REPLAYS):
            graph.replay()
            outputs.append(hidden.clone())
    return outputs


def test_steps_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    for rows in (1, 2, 4, 8, 40):
        expected = hidden_states(model, rows, False, monkeypatch)
        assert all(output.isfinite().all() for output in expected)
        assert not torch.equal(expected[0], expected[1])
        found = hidden_states(model, rows, True, monkeypatch)
        for number, (output, exact) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(output, exact), f"{rows} rows, replay {number}"


def test_so_do_steps_of_few_tokens_that_go_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights brought near, experts in groups from 2 tokens on, and quantised inputs multiplied one by one."""
    monkeypatch.setattr(triton_gemm, "AHEAD", range(257))
    monkeypatch.setattr(triton_pairs, "MAX_TOKENS", 1)
    monkeypatch.setattr(gpu, "READY_GEMV", 4)
    model = make_model()
    for rows in (2, 3, 4, 8, 40):
        expected = hidden_states(model, rows, False, monkeypatch)
        found = hidden_states(model, rows, True, monkeypatch)
        for number, (output, exact) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(output, exact), f"{rows} rows, replay {number}"
