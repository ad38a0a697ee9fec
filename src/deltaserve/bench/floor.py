"""The time that a step must take: the bytes that have to move over the rate at which this device copies, or the
operations over the rate at which it multiplies, whichever is longer. Knows a model's weights and pools, no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from deltaserve.model_config import ModelConfig

EXPERT_WEIGHTS = ("w13", "w2", "w13_scale", "w2_scale")


@dataclass(frozen=True)
class Rates:
    """Of one device, measured on it."""

    copy: float
    """Bytes a second, read and written together."""
    matrix: float
    """Operations a second of a large bf16 product (fp32 where there is no bf16)."""
    matrix_fp8: float
    """The same with e4m3 operands; `matrix` where the device has none."""


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights, by how often a step reads them."""

    expert: int
    """One routed expert in all layers together."""
    shared: int
    """All that every step reads once: everything but routed experts and the embedding table."""


def weights_of(model: nn.Module, config: ModelConfig) -> Weights:
    experts = shared = 0
    for name, parameter in model.named_parameters():
        if name.startswith("mtp.") or (name == "embed_tokens.weight" and not config.tied):
            continue
        size = parameter.numel() * parameter.element_size()
        if name.rsplit(".", 1)[-1] in EXPERT_WEIGHTS:
            experts += size
        else:
            shared += size
    return Weights(experts // max(config.num_experts, 1), shared)


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Experts that `tokens` tokens touch in one layer, when each draws its own uniformly."""
    if not config.num_experts:
        return 0.0
    return config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** tokens)


def decode_bytes(config: ModelConfig, weights: Weights, block: int, slot: int, rows: int, context: float) -> float:
    """Of one decode step: distinct experts, every other weight once, states read and written, KV read.

    block, slot: bytes of a KV block of 64 tokens and of a state slot. context: tokens of each row's sequence.
    """
    return distinct_experts(config, rows) * weights.expert + weights.shared + rows * (2 * slot + context * block / 64)


def prefill_seconds(config: ModelConfig, weights: Weights, is_fp8: bool, tokens: int, rates: Rates) -> float:
    """Of one prompt: the longer of reading every touched weight once, and multiplying."""
    read = (distinct_experts(config, tokens) * weights.expert + weights.shared) / rates.copy
    hidden, moe = config.hidden_size, config.mlp_kinds.count("moe")
    mlp = moe * 3 * hidden * (config.top_k * config.moe_size + config.shared_size)
    mlp += (len(config.mlp_kinds) - moe) * 3 * hidden * config.dense_size
    heads = config.num_heads * config.head_dim
    attention = config.num_full_layers * hidden * (3 * heads + 2 * config.num_kv_heads * config.head_dim)
    values = config.gdn_v_heads * config.gdn_v_dim
    gdn = config.num_gdn_layers * hidden * (config.conv_dim + 2 * values)
    linear = 2.0 * tokens * (mlp + attention + gdn)
    scores = 2.0 * tokens * tokens * heads * config.num_full_layers  # half of the square, keys and values
    return max(read, linear / (rates.matrix_fp8 if is_fp8 else rates.matrix) + scores / rates.matrix)


def measure_rates(device: torch.device) -> Rates:
    """A few large copies and products on the device. Takes about a second on a GPU."""
    if device.type == "cpu":
        return Rates(_copy_rate(device, 1 << 26), _matrix_rate(device, 1024, torch.float32), 0.0)
    fp8 = _fp8_rate(device) if torch.cuda.get_device_capability(device) >= (8, 9) else 0.0
    matrix = _matrix_rate(device, 8192, torch.bfloat16)
    return Rates(_copy_rate(device, 1 << 31), matrix, fp8 or matrix)


def _copy_rate(device: torch.device, size: int) -> float:
    source = torch.randint(1, 100, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, width: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2.0 * width**3 / seconds_of(lambda: a @ b, device)


def _fp8_rate(device: torch.device) -> float:
    width = 8192
    a, b = (torch.randn(width, width, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return (
        2.0
        * width**3
        / seconds_of(
            lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True), device
        )
    )


def seconds_of(call: object, device: torch.device, repeats: int = 10) -> float:
    """Median time of a call, in seconds, after two that do not count."""
    import statistics
    import time

    assert callable(call)
    times = []
    for number in range(repeats + 2):
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
