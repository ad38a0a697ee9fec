"""Makes random tiny checkpoints on disk, in the names and layouts of the published ones. Needs no transformers.

All weights are random, those that usually start at a constant too (norms, A_log, dt_bias): constants hide faults.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import deltaserve

BUILTIN = Path(deltaserve.__file__).parent / "builtin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

Json = dict[str, Any]

WIDE: Json = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_theta": 10_000_000,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Changes to `tiny_config` that give it the widths of the 80B model, with fewer experts and tokens."""


def tiny_config(**changes: Any) -> Json:
    """A config.json of a four-layer model (three GDN, one attention); `changes` replace or add keys, None removes."""
    config: Json = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "float32",
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "max_position_embeddings": 1024,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def fp8_config(**changes: Any) -> Json:
    """Heads and experts of 128, so that no scale's block reaches over two parts; the hidden width is 192."""
    sizes = {
        "hidden_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    return tiny_config(**(sizes | changes))


def random_config(seed: int) -> Json:
    """A legal config drawn at random: odd widths, head ratios 1 to 4, every way to place layers, MLPs and rope."""
    draw = random.Random(seed)
    num_layers = draw.choice([1, 2, 3, 4, 5, 6])
    num_kv_heads = draw.choice([1, 2, 3])
    num_k_heads = draw.choice([1, 2, 3])
    num_experts = draw.choice([1, 4, 7, 8, 16])
    config = tiny_config(
        vocab_size=draw.choice([97, 160, 211]),
        hidden_size=draw.choice([64, 80, 96, 320]),
        intermediate_size=draw.choice([40, 80, 96]),
        num_hidden_layers=num_layers,
        num_attention_heads=num_kv_heads * draw.choice([1, 2, 3, 4]),
        num_key_value_heads=num_kv_heads,
        head_dim=draw.choice([16, 24, 32]),
        linear_conv_kernel_dim=draw.choice([2, 3, 4, 4, 4]),
        linear_num_key_heads=num_k_heads,
        linear_num_value_heads=num_k_heads * draw.choice([1, 2, 3, 4]),
        # Narrower keys let float32 itself, transformers' too, stray more than 1e-4 from float64.
        linear_key_head_dim=draw.choice([16, 20, 24]),
        linear_value_head_dim=draw.choice([8, 16, 24]),
        num_experts=num_experts,
        num_experts_per_tok=draw.randint(1, min(4, num_experts)),
        moe_intermediate_size=draw.choice([8, 24, 40]),
        shared_expert_intermediate_size=draw.choice([16, 40]),
        norm_topk_prob=draw.random() < 0.5,
        decoder_sparse_step=draw.choice([1, 1, 2, 3]),
        mlp_only_layers=[layer for layer in range(num_layers) if draw.random() < 0.2],
        tie_word_embeddings=draw.random() < 0.3,
        rms_norm_eps=draw.choice([1e-6, 1e-5]),
    )
    _draw_layers(config, draw)
    _draw_rope(config, draw)
    return config


def _draw_layers(config: Json, draw: random.Random) -> None:
    if draw.random() < 0.5:
        config["full_attention_interval"] = draw.choice([1, 2, 3, 4])
        return
    del config["full_attention_interval"]
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(config["num_hidden_layers"])]
    config["layer_types"] = kinds


def _draw_rope(config: Json, draw: random.Random) -> None:
    theta, factor = draw.choice([10000, 1e6]), draw.choice([0.25, 0.5, 1.0])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} if draw.random() < 0.4 else None
    if draw.random() < 0.5:
        config.update(rope_theta=theta, partial_rotary_factor=factor)
        if yarn is not None:
            config["rope_scaling"] = yarn
        return
    del config["rope_theta"], config["partial_rotary_factor"]
    rope = yarn if yarn is not None else {"rope_type": "default"}
    config["rope_parameters"] = rope | {"rope_theta": theta, "partial_rotary_factor": factor}


def write_checkpoint(
    folder: Path,
    config: Json | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
    mtp: bool = False,
    stacked_experts: bool = False,
    split_in_proj: bool = False,
    prefix: str = "model.",
    fp8: bool = False,
) -> Path:
    """Write config.json and random weights to `folder`, and return it.

    `tokenizer` copies the built-in tokenizer, chat template and generation defaults (2,048 tokens: without a
    `config` the vocabulary follows). `mtp` adds the tensors of the MTP layer. The next three choose other names that
    exist in the field for the same weights. `fp8` quantises what published block FP8 checkpoints do.
    """
    if config is None:
        config = tiny_config(vocab_size=2048, bos_token_id=2032, eos_token_id=2034) if tokenizer else tiny_config()
    assert not tokenizer or config["vocab_size"] >= 2048, "the built-in tokenizer has ids up to 2047"
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": str(dtype).removeprefix("torch.")}
    if fp8:
        config["quantization_config"] = FP8_CONFIG
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = random_tensors(config, seed=seed, mtp=mtp)
    if split_in_proj:
        tensors = dict(_split_in_proj(tensors, config))
    if stacked_experts:
        tensors = _stack_experts(tensors, config)
    tensors = {_prefixed(name, prefix): tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if fp8:
        tensors = quantize_tensors(tensors)
    write_shards(folder, tensors, shards)
    for name in TOKENIZER_FILES if tokenizer else ():
        shutil.copy(BUILTIN / name, folder / name)
    return folder


FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "mtp.fc"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QUANTIZED = re.compile(
    r".*(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_(qkvz|qkv|z)|out_proj)|(gate|up|down)_proj)\.weight"
    r"|.*experts\.(gate_up|down)_proj"
)


def quantize_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Projections and experts in e4m3, one scale for each block of 128 x 128, as published."""
    result = {}
    for name, tensor in tensors.items():
        if not QUANTIZED.fullmatch(name):
            result[name] = tensor
            continue
        height, width = tensor.shape[-2:]
        high, wide = -(-height // 128), -(-width // 128)
        scale = torch.zeros(*tensor.shape[:-2], high, wide)
        quantized = torch.zeros(tensor.shape).to(torch.float8_e4m3fn)
        for row in range(high):
            for column in range(wide):
                at = (..., slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                block = tensor[at].float()
                scale[..., row, column] = block.abs().amax((-2, -1)) / 448
                quantized[at] = (block / scale[..., row, column, None, None]).to(torch.float8_e4m3fn)
        result[name], result[f"{name}_scale_inv"] = quantized, scale
    return result


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """One model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensors(config: Json, *, seed: int = 0, mtp: bool = False) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its published name, in float32."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random_tensor(name, shape, generator) for name, shape in tensor_shapes(config, mtp=mtp)}


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        low, high = math.log(0.005), math.log(8.0)
        return torch.rand(shape, generator=generator) * (high - low) + low
    noise = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.3 * noise
    if len(shape) == 1:
        return (1.0 if name.endswith("dt_bias") else 0.3) * noise
    # Small enough that rounding in float32 stays below 1e-4 in the logits, large enough that experts and gates differ.
    gain = 2.0 if name.endswith("mlp.gate.weight") else 0.7
    return gain * noise / math.sqrt(shape[-1])


def tensor_shapes(config: Json, *, mtp: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a published checkpoint, experts one by one, fused and interleaved projections."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer, kind in enumerate(layer_kinds(config)):
        is_moe = layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
        yield from _block_shapes(f"model.layers.{layer}.", config, kind, is_moe and config["num_experts"] > 0)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    if mtp:
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{norm}.weight", (hidden,)
        yield from _block_shapes("mtp.layers.0.", config, "full_attention", config["num_experts"] > 0)


def layer_kinds(config: Json) -> list[str]:
    """`layer_types` of the config, or what `full_attention_interval` says."""
    if "layer_types" in config:
        return list(config["layer_types"])
    interval = config["full_attention_interval"]
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(config["num_hidden_layers"])]


def _block_shapes(prefix: str, config: Json, kind: str, is_moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    if kind == "full_attention":
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        mixer = prefix + "self_attn."
        yield f"{mixer}q_proj.weight", (2 * heads * width, hidden)
        yield f"{mixer}k_proj.weight", (kv_heads * width, hidden)
        yield f"{mixer}v_proj.weight", (kv_heads * width, hidden)
        yield f"{mixer}o_proj.weight", (hidden, heads * width)
        yield f"{mixer}q_norm.weight", (width,)
        yield f"{mixer}k_norm.weight", (width,)
    else:
        num_v_heads, v_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = num_v_heads * v_dim
        mixer = prefix + "linear_attn."
        yield f"{mixer}in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield f"{mixer}in_proj_ba.weight", (2 * num_v_heads, hidden)
        yield f"{mixer}conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
        yield f"{mixer}A_log", (num_v_heads,)
        yield f"{mixer}dt_bias", (num_v_heads,)
        yield f"{mixer}norm.weight", (v_dim,)
        yield f"{mixer}out_proj.weight", (hidden, values)
    if not is_moe:
        yield from _swiglu_shapes(f"{prefix}mlp.", hidden, config["intermediate_size"])
        return
    yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
    yield f"{prefix}mlp.shared_expert_gate.weight", (1, hidden)
    yield from _swiglu_shapes(f"{prefix}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
    for expert in range(config["num_experts"]):
        yield from _swiglu_shapes(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def _swiglu_shapes(prefix: str, hidden: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (size, hidden)
    yield f"{prefix}up_proj.weight", (size, hidden)
    yield f"{prefix}down_proj.weight", (hidden, size)


def _split_in_proj(tensors: dict[str, Tensor], config: Json) -> Iterator[tuple[str, Tensor]]:
    """Replace in_proj_qkvz and in_proj_ba by the siblings' in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    num_k_heads = config["linear_num_key_heads"]
    ratio = config["linear_num_value_heads"] // num_k_heads
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    for name, tensor in tensors.items():
        if not name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight")):
            yield name, tensor
            continue
        start = name[: name.index("in_proj_")] + "in_proj_"
        groups = tensor.reshape(num_k_heads, -1, tensor.shape[1])
        if name.endswith("in_proj_ba.weight"):
            b, a = torch.split(groups, [ratio, ratio], 1)
            yield f"{start}b.weight", b.flatten(0, 1)
            yield f"{start}a.weight", a.flatten(0, 1)
        else:
            q, k, v, z = torch.split(groups, [k_dim, k_dim, ratio * v_dim, ratio * v_dim], 1)
            yield f"{start}qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            yield f"{start}z.weight", z.flatten(0, 1)


def _stack_experts(tensors: dict[str, Tensor], config: Json) -> dict[str, Tensor]:
    """Replace the experts' tensors by one gate_up_proj and one down_proj a layer."""
    rest = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for start in sorted({name.partition(".mlp.experts.")[0] for name in tensors if name not in rest}):
        experts = [f"{start}.mlp.experts.{expert}." for expert in range(config["num_experts"])]
        pairs = [torch.cat([tensors[f"{e}gate_proj.weight"], tensors[f"{e}up_proj.weight"]]) for e in experts]
        rest[f"{start}.mlp.experts.gate_up_proj"] = torch.stack(pairs)
        rest[f"{start}.mlp.experts.down_proj"] = torch.stack([tensors[f"{e}down_proj.weight"] for e in experts])
    return rest


def _prefixed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name
