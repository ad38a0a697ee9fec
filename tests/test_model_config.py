"""config.json is read with types and ranges; what is not supported is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deltaserve.model_config import ModelConfig, load_config_json
from tests.models.factory import BUILTIN, random_config, tiny_config


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(**changes))


def test_every_field_of_a_plain_config() -> None:
    assert read(
        num_hidden_layers=5,
        full_attention_interval=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        tie_word_embeddings=True,
    ) == ModelConfig(
        vocab_size=160,
        hidden_size=64,
        num_layers=5,
        layer_kinds=("gdn", "full", "gdn", "full", "gdn"),
        max_position=1024,
        eps=1e-6,
        tied=True,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=8,
        rope_theta=10000.0,
        rope_scaling=None,
        conv_width=4,
        gdn_k_heads=2,
        gdn_v_heads=4,
        gdn_k_dim=16,
        gdn_v_dim=24,
        mlp_kinds=("dense", "moe", "dense", "dense", "dense"),
        num_experts=8,
        top_k=3,
        moe_size=24,
        shared_size=40,
        dense_size=96,
        renormalize=True,
        checkpoint_dtype="float32",
        quantized=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def quantized(**changes: Any) -> dict[str, Any]:
    """A change of the config: block FP8 as the published checkpoints state it, but for these keys."""
    stated = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"quantization_config": stated | {"modules_to_not_convert": ["lm_head"]} | changes}


def test_block_fp8_is_read() -> None:
    assert read(**quantized()).quantized
    stated = quantized()["quantization_config"]
    del stated["fmt"]
    assert read(quantization_config=stated).quantized
    assert not read(quantization_config=None).quantized


def test_derived_numbers() -> None:
    config = read()
    assert (config.num_gdn_layers, config.num_full_layers) == (3, 1)
    assert config.conv_dim == 2 * 2 * 16 + 4 * 24


def test_the_official_config() -> None:
    """The 80B model's file, as published (newer transformers writes it with layer_types and rope_parameters)."""
    official: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    config = ModelConfig.from_hf(official)
    assert config.layer_kinds == ("gdn", "gdn", "gdn", "full") * 12
    assert config.mlp_kinds == ("moe",) * 48
    assert (config.rotary_dim, config.rope_theta, config.max_position) == (64, 1e7, 262144)
    assert (config.checkpoint_dtype, config.conv_dim) == ("bfloat16", 8192)
    newer = {key: value for key, value in official.items() if not key.startswith(("rope", "partial", "full", "torch"))}
    newer["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 12
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    newer["dtype"] = "bfloat16"
    assert ModelConfig.from_hf(newer) == config


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, "partial_rotary_factor": 0.25, **YARN},
            "rope_theta": None,
            "partial_rotary_factor": None,
        },
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
    ],
)
def test_yarn_in_every_place(rope: dict[str, Any]) -> None:
    config = read(max_position_embeddings=256, **rope)
    assert config.rope_scaling == {"rope_type": "yarn", "truncate": True, **YARN}
    assert (config.max_position, config.rotary_dim, config.rope_theta) == (1024, 8, 10000.0)


def test_yarn_keeps_every_number() -> None:
    numbers = {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0}
    config = read(rope_scaling={"type": "yarn", "truncate": False, **YARN, **numbers})
    assert config.rope_scaling == {"rope_type": "yarn", "truncate": False, **YARN, **numbers}
    assert config.max_position == 1024


def test_layer_types_and_interval_may_agree() -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    assert read(layer_types=kinds, full_attention_interval=2).layer_kinds == ("gdn", "full", "gdn", "full")
    assert read(layer_types=["full_attention"] * 4, full_attention_interval=None).num_gdn_layers == 0


def test_a_model_without_experts_needs_none_of_their_keys() -> None:
    config = read(
        num_experts=0,
        num_experts_per_tok=None,
        moe_intermediate_size=None,
        shared_expert_intermediate_size=None,
        norm_topk_prob=None,
    )
    assert set(config.mlp_kinds) == {"dense"}
    assert (config.top_k, config.moe_size, config.shared_size, config.dense_size) == (0, 0, 0, 96)


def test_a_model_without_dense_layers_needs_no_width_of_them() -> None:
    assert read(intermediate_size=None).dense_size == 0


@pytest.mark.parametrize("seed", range(100))
def test_random_configs_are_legal(seed: int) -> None:
    config = ModelConfig.from_hf(random_config(seed))
    assert len(config.layer_kinds) == len(config.mlp_kinds) == config.num_layers


NEEDED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "partial_rotary_factor",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {key} is missing; add it"):
        read(**{key: None})


NUMBERS = [
    key for key in NEEDED if key not in ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "norm_topk_prob")
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["64", 64.0, True, [64], -1, 10**9])
def test_a_wrong_number_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"config.json: {key} is .*; it must"):
        read(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is \"llama\"; supported: qwen3_next"),
        ({"model_type": None}, "model_type is null; supported: qwen3_next"),
        ({"model_type": ["qwen3_next"]}, "model_type is "),
        ({"architectures": ["Qwen3NextForSequenceClassification"]}, "architectures is .*Qwen3NextForCausalLM"),
        ({"architectures": []}, "architectures is"),
        ({"architectures": "Qwen3NextForCausalLM"}, "architectures is"),
        ({"attention_bias": True}, "attention_bias is true; biased attention projections are not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act is \"gelu\"; no other activation is implemented"),
        ({"use_sliding_window": True}, "use_sliding_window is true; sliding-window attention"),
        ({"layer_scale": 0.5}, "layer_scale is 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.activation_scheme is null; supported"),
        ({"quantization_config": "fp8"}, "quantization_config.activation_scheme is null; supported is .dynamic"),
        (quantized(quant_method="gptq"), 'quantization_config.quant_method is "gptq"; supported is "fp8": take a'),
        (quantized(activation_scheme="static"), 'scheme is "static"; supported is "dynamic": .*the bfloat16 one'),
        (quantized(weight_block_size=[64, 128]), "weight_block_size is .64, 128.; supported is .128, 128."),
        (quantized(weight_block_size=None), "weight_block_size is null; supported is .128, 128."),
        (quantized(fmt="e5m2"), 'quantization_config.fmt is "e5m2"; supported is "e4m3"'),
        (quantized(scale_fmt="ue8m0"), 'quantization_config.scale_fmt is "ue8m0"; supported is null'),
        ({"num_attention_heads": 3}, "num_attention_heads is 3; it must be a multiple of num_key_value_heads 2"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must lie in .1, 8."),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must lie in .2, 64."),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must lie in"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is \"1e-6\"; it must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must lie in"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must lie in"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must lie in"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must lie in"),
        ({"partial_rotary_factor": 0.01}, "rotates 0 dimensions; that must be an even number, at least 2"),
        ({"partial_rotary_factor": 0.1}, "rotates 3 dimensions; that must be an even number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is \"no\"; it must be true or false"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers names layer 4; layers are 0 to 3"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers is .*; it must be a list of layer numbers"),
        ({"mlp_only_layers": 2}, "mlp_only_layers is 2; it must be a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must lie in"),
        ({"decoder_sparse_step": 2, "intermediate_size": None}, "intermediate_size is missing"),
        ({"full_attention_interval": None}, "both layer_types and full_attention_interval are missing"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0; it must lie in"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must list 4 layers .num_hidden_layers., not 3"),
        ({"layer_types": "full"}, "layer_types must list 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types.3. is \"mamba\"; supported: linear_"),
        ({"layer_types": ["full_attention"] * 3 + [[]]}, "layer_types.3. is "),
        ({"layer_types": ["full_attention"] * 4}, "layer_types contradicts full_attention_interval 4"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is \"linear\"; supported: default, yarn"),
        ({"rope_scaling": "yarn"}, "rope_scaling is \"yarn\"; it must be an object or null"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": 0.5}}, "factor is 0.5; .*at least 1"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}}, "beta_fast is 0.5, below beta_slow 1"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta": 1}}, "rope of type yarn does not know beta"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "truncate is 1; it must be true or false"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope of type default does not know factor"),
        ({"rope_parameters": {"mrope_section": [1]}}, "rope of type default does not know mrope_section"),
        ({"rope_parameters": {"rope_theta": 500}}, "rope_theta is 10000 at top level and 500 below"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", **YARN}},
            "rope_parameters and rope_scaling differ",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype is \"float8_e4m3fn\"; supported: float32, bfloat16, float16"),
        ({"eos_token_id": 160}, "eos_token_id has 160 .in config.json or generation_config.json.; token ids are 0"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id has \"3\" .*; token ids are 0 to 159"),
        ({"bos_token_id": -1}, "bos_token_id has -1 .*; token ids are 0 to 159"),
    ],
)  # fmt: skip
def test_refusal_names_key_value_and_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_every_refusal_of_one_value_lets_it_pass() -> None:
    read(attention_bias=False, hidden_act="silu", use_sliding_window=False, attn_output_gate=True, mlp_bias=False)


def test_unknown_keys_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(router_aux_loss_coef=0.1, b_new_key=1, a_new_key=2)
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: keys not known and ignored: a_new_key, b_new_key"
    ]


def test_the_builtin_config_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = ModelConfig.from_hf(load_config_json(BUILTIN))
    assert not caplog.records
    assert config.eos_token_ids == (2032, 2034)


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "union"),
    [(2, None, (2,)), (2, 5, (2, 5)), ([3, 2], [5, 2], (2, 3, 5)), (None, [7], (7,)), (None, None, ())],
)
def test_eos_ids_are_the_union_of_both_files(
    tmp_path: Path, config_ids: Any, generation_ids: Any, union: tuple[int, ...]
) -> None:
    folder = write(tmp_path, tiny_config(eos_token_id=config_ids), {"eos_token_id": generation_ids, "top_k": 20})
    assert ModelConfig.from_hf(load_config_json(folder)).eos_token_ids == union


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not readable JSON"),
        (b"\xff\xfe", "config.json is not readable JSON"),
        (b"[1]", "config.json holds a JSON list, not an object"),
        (None, "has no config.json; give the folder of a Hugging Face checkpoint"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config_json(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load_config_json(tmp_path / "nowhere")


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    write(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(ValueError, match=r"generation_config\.json is not readable JSON"):
        load_config_json(tmp_path)
