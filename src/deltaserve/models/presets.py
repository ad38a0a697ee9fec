"""The numbers of published models, for runs without their files. Knows no weight.

A preset has no tokenizer of its own: it borrows the built-in model's, whose ids every larger vocabulary has.
"""

from __future__ import annotations

from typing import Any

from deltaserve.model_config import BLOCK_FP8

_QWEN3_NEXT_80B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-next-80b-a3b": _QWEN3_NEXT_80B_A3B,
    "qwen3-next-80b-a3b-fp8": _QWEN3_NEXT_80B_A3B | {"quantization_config": BLOCK_FP8},
}
"""Name -> what config.json says. All have an MTP layer."""


def preset_config(name: str) -> dict[str, Any]:
    """Raises ValueError with the names that there are."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; there are {', '.join(PRESETS)}")
    return dict(PRESETS[name])
