"""Bytes counted by hand, and a solver that keeps what was chosen and shrinks the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.config import EngineConfig
from deltaserve.model_config import ModelConfig
from deltaserve.runner.memory import (
    CPU_CACHE_BYTES,
    GIB,
    Footprint,
    MemoryPlan,
    allocate,
    blocks_of,
    footprint,
    size,
    solve,
    weight_bytes,
)
from tests.models.factory import Json, tiny_config

BIG: Json = tiny_config(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=262144,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
"""The shapes of the published 80B model."""


def test_bytes_of_the_80b_shapes() -> None:
    model = ModelConfig.from_hf(BIG)
    sizes = footprint(model, torch.bfloat16, torch.float32, weights=0)
    # 12 layers, keys and values, 2 heads of 256, 2 bytes: 24 KiB a token.
    assert sizes.block == 64 * 24 * 1024
    # 36 layers of 32 matrices 128 x 128 in fp32, and 3 inputs of 8192 channels in bf16.
    assert sizes.slot == 75_497_472 + 1_769_472
    half = footprint(model, torch.bfloat16, torch.bfloat16, weights=0)
    assert half == replace(sizes, slot=37_748_736 + 1_769_472)
    assert footprint(model, torch.bfloat16, torch.float32, weights=0, with_mtp=True) == replace(
        sizes, block=64 * 26 * 1024, slot=sizes.slot + 2048 * 2
    )


def test_bytes_of_the_tiny_shapes() -> None:
    sizes = footprint(ModelConfig.from_hf(tiny_config()), torch.float32, torch.float64, weights=7)
    # One layer, keys and values, 64 tokens, 2 heads of 32, 4 bytes.
    block = 1 * 2 * 64 * 2 * 32 * 4
    # Three layers of 4 matrices 16 x 24 in fp64, and 3 inputs of 2*2*16 + 4*24 channels in fp32.
    slot = 3 * (4 * 16 * 24 * 8 + 3 * 160 * 4)
    assert sizes == Footprint(weights=7, block=block, slot=slot)


@pytest.mark.parametrize("interval", [1, 3, 4])
def test_pools_take_the_bytes_of_the_plan(interval: int) -> None:
    model = ModelConfig.from_hf(tiny_config(full_attention_interval=interval, num_hidden_layers=6))
    sizes = footprint(model, torch.bfloat16, torch.float32, weights=0)
    plan = solve(EngineConfig(num_blocks=5, max_num_seqs=3), 1024, sizes, "cpu", free=GIB)
    pools = allocate(model, plan, torch.bfloat16, torch.float32, fill=2.5)
    tensors = [*pools.kv, *pools.conv, *pools.state]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == plan.cache_bytes
    assert all(bool((tensor == 2.5).all()) for tensor in tensors)
    pools.fill_block(1, -1.0)
    pools.fill_slot(2, -2.0)
    assert all(bool((kv[:, 1] == -1).all() and (kv[:, 0] == 2.5).all() and (kv[:, 2:] == 2.5).all()) for kv in pools.kv)
    for pool in (*pools.conv, *pools.state):
        assert (pool[2] == -2).all()
        assert (pool[:2] == 2.5).all()


def test_weights_are_counted_once_and_without_allocating() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(10, 20, bias=False), torch.nn.Linear(10, 20, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("table", torch.empty(5, dtype=torch.float64, device="meta"))
    assert weight_bytes(module) == 10 * 20 * 4 + 5 * 8


# ---- the solver ----------------------------------------------------------------------------------------------------

SIZES = Footprint(weights=1000 << 20, block=1 << 20, slot=4 << 20)


def plan_of(
    free: int,
    chosen: Mapping[str, float] = {},
    sizes: Footprint = SIZES,
    max_keep: int = 1,
    device: str = "cpu",
) -> MemoryPlan:
    config = EngineConfig(max_num_batched_tokens=1 << 20, **chosen)  # type: ignore[arg-type]
    return solve(config, 4096, sizes, device, free, max_keep)


def test_default_is_all_that_64_requests_of_full_length_could_use() -> None:
    plan = plan_of(100 * GIB, sizes=replace(SIZES, block=1 << 16))
    assert (plan.num_blocks, plan.num_slots, plan.max_num_seqs, plan.max_model_len) == (64 * 64, 64, 64, 4096)
    assert not plan.notes


def test_default_takes_at_most_4_gib_on_a_cpu_and_most_of_a_gpu() -> None:
    sizes = replace(SIZES, block=8 << 20)
    assert 0.99 * CPU_CACHE_BYTES < plan_of(100 * GIB, sizes=sizes).cache_bytes <= CPU_CACHE_BYTES
    left = 10 * GIB - sizes.weights
    assert 0.99 * left / 2 < plan_of(left // 2 + sizes.weights, sizes=sizes).cache_bytes * 2 <= left
    assert 0.89 * left < plan_of(10 * GIB, sizes=sizes, device="cuda").cache_bytes <= 0.9 * left


@given(
    room=st.integers(0, 8 * GIB),
    block=st.integers(0, 64 << 20),
    slot=st.integers(0, 128 << 20),
    keep=st.integers(1, 5),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_default_starts_wherever_one_request_fits(room: int, block: int, slot: int, keep: int, device: str) -> None:
    sizes = Footprint(weights=3 * GIB, block=block, slot=slot)
    free = sizes.weights + block + keep * slot + room
    plan = plan_of(free, {}, sizes, keep, device)
    assert sizes.weights + plan.cache_bytes <= free
    usual = 64 if device == "cpu" else 128
    assert 1 <= plan.max_num_seqs <= usual
    assert 0 <= plan.num_slots - plan.max_num_seqs * keep < keep
    assert plan.num_blocks >= plan.max_num_seqs
    assert 1 <= plan.max_model_len <= min(4096, plan.num_blocks * 64)
    assert bool(plan.notes) == (plan.max_num_seqs < usual or plan.max_model_len < 4096)


def plan_or_refusal(free: int, chosen: Mapping[str, float], keep: int) -> MemoryPlan | str:
    try:
        return plan_of(free, chosen, max_keep=keep)
    except ValueError as error:
        return str(error)


def assert_kept(plan: MemoryPlan, chosen: Mapping[str, float], room: int, keep: int) -> None:
    for name, value in chosen.items():
        if name == "cache_memory_gib":
            assert plan.cache_bytes <= value * GIB
        else:
            assert getattr(plan, name) == value
    assert plan.cache_bytes <= room
    assert plan.max_model_len <= plan.num_blocks * 64
    assert plan.max_num_seqs * keep <= plan.num_slots


@given(
    room=st.integers(0, 6 * GIB),
    max_num_seqs=st.none() | st.integers(1, 300),
    max_model_len=st.none() | st.integers(1, 4096),
    num_blocks=st.none() | st.integers(1, 3000),
    num_slots=st.none() | st.integers(1, 300),
    cache_memory_gib=st.none() | st.floats(0.01, 7),
    keep=st.integers(1, 3),
)
def test_what_was_chosen_is_kept_or_refused_with_a_way_out(room: int, keep: int, **choices: float | None) -> None:
    chosen = {name: value for name, value in choices.items() if value is not None}
    free = SIZES.weights + room
    for _ in range(8):
        answer = plan_or_refusal(free, chosen, keep)
        if isinstance(answer, MemoryPlan):
            assert_kept(answer, chosen, room, keep)
            return
        name = re.match(r"(\w+) is ", answer)
        legal = re.search(r"largest legal value is ([\d.]+)|(\d+)(?: tokens| requests)?, which is the largest", answer)
        if name is None or legal is None:
            assert re.search("not one request fits|leave some of them out", answer), answer
            return
        largest = float(legal[1] or legal[2])
        if largest == 0:
            return
        assert largest < (chosen.get(name[1]) or 5000)
        chosen[name[1]] = largest if name[1] == "cache_memory_gib" else int(largest)
    pytest.fail(f"the ways out lead nowhere: {chosen}")


@pytest.mark.parametrize(
    ("chosen", "name", "value", "largest"),
    [
        ({"max_num_seqs": 300}, "max_num_seqs", 300, 200),
        ({"max_model_len": 4097}, "max_model_len", 4097, 4096),
        ({"max_model_len": 4096, "cache_memory_gib": 20 / 1024}, "max_model_len", 4096, 1024),
        ({"max_model_len": 4096, "num_blocks": 63}, "max_model_len", 4096, 4032),
        ({"num_blocks": 2000}, "num_blocks", 2000, 996),
        ({"num_slots": 1000}, "num_slots", 1000, 249),
        ({"num_slots": 100, "max_num_seqs": 101}, "max_num_seqs", 101, 100),
        ({"cache_memory_gib": 2}, "cache_memory_gib", 2, 0.97),
    ],
)
def test_refusal_names_value_and_largest_legal(chosen: dict[str, float], name: str, value: int, largest: float) -> None:
    free = SIZES.weights + (1000 << 20)
    with pytest.raises(ValueError, match=f"{name} is {value}") as refused:
        plan_of(free, chosen)
    assert re.search(rf"(?<![\d.]){largest}(?![\d.])", str(refused.value)), refused.value
    assert "largest legal value" in str(refused.value)
    plan_of(free, {**chosen, name: largest})
    with pytest.raises(ValueError, match=name):
        plan_of(free, {**chosen, name: largest + (0.01 if name == "cache_memory_gib" else 1)})


def test_weights_or_one_request_that_do_not_fit_say_so() -> None:
    with pytest.raises(ValueError, match=r"weights take 1000 MiB|weights take 0\.98 GiB"):
        plan_of(SIZES.weights - 1)
    with pytest.raises(ValueError, match=r"not one request fits: 1 KV blocks of 1 MiB and 1 state slots of 4 MiB"):
        plan_of(SIZES.weights + (5 << 20) - 1)
    assert plan_of(SIZES.weights + (5 << 20)).max_num_seqs == 1


def test_slots_of_a_request_that_guesses_are_told() -> None:
    with pytest.raises(ValueError, match=r"num_slots 3 serves at most 0 requests.*a request takes 4"):
        plan_of(GIB, {"num_slots": 3}, max_keep=4)


def test_what_is_reduced_is_told() -> None:
    plan = plan_of(SIZES.weights + (200 << 20))
    assert plan.max_num_seqs < 64
    assert f"max_num_seqs is {plan.max_num_seqs}, not 64" in plan.notes[0]
    short = plan_of(SIZES.weights + (64 << 20))
    assert any(re.search(r"max_model_len is [\d,]+, not the model's 4,096", note) for note in short.notes)


def test_the_table_tells_each_pool_and_what_it_allows() -> None:
    plan = plan_of(100 * GIB, {"num_blocks": 640, "max_num_seqs": 10})
    text = "\n".join(plan.lines())
    assert re.search(r"weights +1000 MiB|weights +0\.98 GiB", text)
    assert re.search(r"KV blocks +640 x 1 MiB +640 MiB +40,960 tokens: 10 requests of 4,096 tokens", text)
    assert re.search(r"state slots +10 x 4 MiB +40 MiB +10 requests", text)
    assert "of 100.00 GiB free on the cpu" in text


def test_blocks_and_sizes_in_words() -> None:
    assert [blocks_of(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert [size(n) for n in (999, 1000, 1 << 20, 1000 << 20)] == ["999 B", "0.9766 KiB", "1 MiB", "0.98 GiB"]
