"""What a checkpoint's config.json says of the model, read with types, ranges and names. Knows no tensor and no weight.

Every key that changes what the model computes is either read here or refused by name. Nothing is assumed that the
published configs state: a missing width is an error and not a class default of some library.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["gdn", "full"]
MlpKind = Literal["moe", "dense"]
CheckpointDType = Literal["float32", "bfloat16", "float16"]

MODEL_TYPES = ("qwen3_next",)
ARCHITECTURES = ("Qwen3NextForCausalLM",)
LAYER_TYPES: dict[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "full"}
DTYPES: tuple[CheckpointDType, ...] = ("float32", "bfloat16", "float16")

MUST_BE: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "no other activation is implemented"),
    "attention_bias": (False, "biased attention projections are not implemented"),
    "mlp_bias": (False, "biased MLP projections are not implemented"),
    "attn_output_gate": (True, "attention without the output gate is not implemented"),
    "use_sliding_window": (False, "sliding-window attention is not implemented"),
    "layer_scale": (None, "scaled layer outputs are not implemented"),
    "compression_config": (None, "compressed checkpoints are not supported; take the bfloat16 or the FP8 one"),
}
"""Keys of which one value (or their absence) is supported, and why no other."""

BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""The one quantization_config that is supported."""

WITHOUT_EFFECT = """
_attn_implementation _name_or_path architectures attention_dropout chunk_size_feed_forward id2label initializer_range
intermediate_size is_encoder_decoder label2id max_window_layers model_type moe_intermediate_size norm_topk_prob
num_experts_per_tok output_attentions output_hidden_states output_router_logits pad_token_id problem_type return_dict
router_aux_loss_coef shared_expert_intermediate_size sliding_window tokenizer_class transformers_version use_cache
"""
"""Keys for training, for other libraries or for layers the model has none of: where unread they change nothing."""

MAX_SIZE = 2**24
"""Above any width or count of a real model; a larger value is a slip."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's numbers. `from_hf` is the only way in that checks them."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    max_position: int
    """Tokens of prompt and output the model was made for, YaRN included."""
    eps: float
    tied: bool
    """The output embedding is the input embedding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """YaRN's numbers under the checkpoint's names, checked; None without scaling."""

    conv_width: int
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_k_dim: int
    gdn_v_dim: int

    mlp_kinds: tuple[MlpKind, ...]
    num_experts: int
    top_k: int
    moe_size: int
    shared_size: int
    dense_size: int
    """Width of the layers without experts; 0 where there are none."""
    renormalize: bool
    """The chosen experts' weights are divided by their sum."""

    checkpoint_dtype: CheckpointDType
    quantized: bool  # in block FP8, says config.json; which weights are, the files themselves say
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dict of a config.json, its `eos_token_id` completed as `load_config_json` does.

        Raises ValueError naming the key, its value, what is expected and the way out.
        """
        _check_family(config)
        reader = _Reader(config)
        for key, (only, reason) in MUST_BE.items():
            value = reader.take(key)
            if value is not None and value != only:
                raise ValueError(f"config.json: {key} is {_short(value)}; {reason}")
        vocab_size, num_layers = reader.size("vocab_size"), reader.size("num_hidden_layers", high=4096)
        result = cls(
            vocab_size=vocab_size,
            hidden_size=reader.size("hidden_size"),
            num_layers=num_layers,
            layer_kinds=_read_layer_kinds(reader, num_layers),
            eps=reader.real("rms_norm_eps", low=0.0, high=1.0),
            tied=reader.flag("tie_word_embeddings", default=False),
            **_read_rope(reader),
            **_read_mixers(reader),
            **_read_mlp(reader, num_layers),
            checkpoint_dtype=_read_dtype(reader),
            quantized=_read_quantization(reader),
            eos_token_ids=_read_ids(reader, "eos_token_id", vocab_size),
            bos_token_id=next(iter(_read_ids(reader, "bos_token_id", vocab_size)), None),
        )
        reader.warn_of_unread()
        return result

    @property
    def num_gdn_layers(self) -> int:
        return self.layer_kinds.count("gdn")

    @property
    def num_full_layers(self) -> int:
        return self.layer_kinds.count("full")

    @property
    def conv_dim(self) -> int:
        """Channels of a GDN layer's convolution: q, k and v of all heads."""
        return 2 * self.gdn_k_heads * self.gdn_k_dim + self.gdn_v_heads * self.gdn_v_dim


def load_config_json(folder: Path) -> dict[str, Any]:
    """The dict of `folder`/config.json; its `eos_token_id` is the union with that of generation_config.json.

    Raises ValueError naming the file and the fault: missing, not readable, not JSON, not an object.
    """
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        more = _read_json(generation).get("eos_token_id")
        if more is not None:
            config["eos_token_id"] = _as_list(config.get("eos_token_id")) + _as_list(more)
    return config


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; give the folder of a checkpoint")
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}; give the folder of a Hugging Face checkpoint")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a JSON {type(content).__name__}, not an object; download it again")
    return content


class _Reader:
    """Typed reads of one JSON object that remember which keys were read."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def take(self, key: str) -> Any:
        """The value as it stands; None for a missing key as for null."""
        self._read.add(key)
        return self._values.get(key)

    def name(self, key: str) -> str:
        return f"config.json: {self._where}{key}"

    def need(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise ValueError(f"{self.name(key)} is missing; add it as the model's publisher states it")
        return value

    def size(self, key: str, *, low: int = 1, high: int = MAX_SIZE, default: int | None = None) -> int:
        value = self.take(key) if default is not None else self.need(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.name(key)} is {_short(value)}; it must be a whole number")
        if not low <= value <= high:
            raise ValueError(f"{self.name(key)} is {value}; it must lie in [{low}, {high}]")
        return value

    def real(self, key: str, *, low: float, high: float = 1e12) -> float:
        """A number in (low, high]."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.name(key)} is {_short(value)}; it must be a number")
        if not low < value <= high:
            raise ValueError(f"{self.name(key)} is {value}; it must lie in ({low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self.need(key) if default is None else self.take(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.name(key)} is {_short(value)}; it must be true or false")
        return value

    def unread(self) -> list[str]:
        return sorted(key for key, value in self._values.items() if key not in self._read and value is not None)

    def warn_of_unread(self) -> None:
        unknown = [key for key in self.unread() if key not in WITHOUT_EFFECT.split()]
        if unknown:
            logging.getLogger(__name__).warning("config.json: keys not known and ignored: %s", ", ".join(unknown))


def _check_family(config: Mapping[str, Any]) -> None:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"config.json: model_type is {_short(model_type)}; supported: {', '.join(MODEL_TYPES)}")
    if architectures is not None and (
        not isinstance(architectures, list) or not architectures or any(a not in ARCHITECTURES for a in architectures)
    ):
        raise ValueError(f"config.json: architectures is {_short(architectures)}; supported: {list(ARCHITECTURES)}")


def _read_layer_kinds(reader: _Reader, num_layers: int) -> tuple[LayerKind, ...]:
    names, interval = reader.take("layer_types"), reader.take("full_attention_interval")
    if names is None and interval is None:
        raise ValueError("config.json: both layer_types and full_attention_interval are missing; add one of them")
    interval_kinds: tuple[LayerKind, ...] = ()
    if interval is not None:
        step = reader.size("full_attention_interval")
        interval_kinds = tuple("full" if (layer + 1) % step == 0 else "gdn" for layer in range(num_layers))
    if names is None:
        return interval_kinds
    if not isinstance(names, list) or len(names) != num_layers:
        count = len(names) if isinstance(names, list) else _short(names)
        raise ValueError(f"config.json: layer_types must list {num_layers} layers (num_hidden_layers), not {count}")
    for layer, name in enumerate(names):
        if not isinstance(name, str) or name not in LAYER_TYPES:
            supported = ", ".join(LAYER_TYPES)
            raise ValueError(f"config.json: layer_types[{layer}] is {_short(name)}; supported: {supported}")
    kinds = tuple(LAYER_TYPES[name] for name in names)
    if interval_kinds and kinds != interval_kinds:
        raise ValueError(f"config.json: layer_types contradicts full_attention_interval {interval}; remove one of them")
    return kinds


def _read_mixers(reader: _Reader) -> dict[str, Any]:
    num_heads, num_kv_heads = reader.size("num_attention_heads"), reader.size("num_key_value_heads")
    _check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    k_heads, v_heads = reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads")
    _check_multiple("linear_num_value_heads", v_heads, "linear_num_key_heads", k_heads)
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "conv_width": reader.size("linear_conv_kernel_dim", low=2, high=64),
        "gdn_k_heads": k_heads,
        "gdn_v_heads": v_heads,
        "gdn_k_dim": reader.size("linear_key_head_dim"),
        "gdn_v_dim": reader.size("linear_value_head_dim"),
    }


def _read_mlp(reader: _Reader, num_layers: int) -> dict[str, Any]:
    num_experts = reader.size("num_experts", low=0)
    step = reader.size("decoder_sparse_step", default=1)
    only_dense = reader.take("mlp_only_layers") or []
    if not isinstance(only_dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in only_dense):
        raise ValueError(f"config.json: mlp_only_layers is {_short(only_dense)}; it must be a list of layer numbers")
    for layer in only_dense:
        if not 0 <= layer < num_layers:
            raise ValueError(f"config.json: mlp_only_layers names layer {layer}; layers are 0 to {num_layers - 1}")
    kinds: tuple[MlpKind, ...] = tuple(
        "moe" if num_experts and layer not in only_dense and (layer + 1) % step == 0 else "dense"
        for layer in range(num_layers)
    )
    sizes: dict[str, Any] = {"top_k": 0, "moe_size": 0, "shared_size": 0, "renormalize": False}
    if num_experts:
        sizes = {
            "top_k": reader.size("num_experts_per_tok", high=num_experts),
            "moe_size": reader.size("moe_intermediate_size"),
            "shared_size": reader.size("shared_expert_intermediate_size"),
            "renormalize": reader.flag("norm_topk_prob"),
        }
    dense_size = reader.size("intermediate_size") if "dense" in kinds else 0
    return {"mlp_kinds": kinds, "num_experts": num_experts, "dense_size": dense_size, **sizes}


def _read_rope(reader: _Reader) -> dict[str, Any]:
    """Rope at top level (`rope_theta`, `partial_rotary_factor`, `rope_scaling`) or in one `rope_parameters`."""
    nested, older = reader.take("rope_parameters"), reader.take("rope_scaling")
    for key, value in (("rope_parameters", nested), ("rope_scaling", older)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"config.json: {key} is {_short(value)}; it must be an object or null")
    if nested and older and nested != older:
        raise ValueError("config.json: rope_parameters and rope_scaling differ; remove one of them")
    rope: dict[str, Any] = dict(nested or older or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        outer = reader.take(key)
        if outer is not None and rope.setdefault(key, outer) != outer:
            raise ValueError(f"config.json: {key} is {outer} at top level and {rope[key]} below; remove one of them")
    inner = _Reader(rope, "rope_parameters." if nested else "")
    older_type, newer_type = inner.take("type"), inner.take("rope_type")
    rope_type = newer_type or older_type or "default"
    max_position, head_dim = reader.size("max_position_embeddings"), reader.size("head_dim")
    factor = inner.real("partial_rotary_factor", low=0.0, high=1.0)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"config.json: head_dim {head_dim} with partial_rotary_factor {factor} rotates {rotary_dim} dimensions; "
            "that must be an even number, at least 2"
        )
    theta = inner.real("rope_theta", low=1.0)
    scaling: dict[str, Any] | None = None
    if rope_type == "yarn":
        scaling = _read_yarn(inner, max_position)
        max_position = max(max_position, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    elif rope_type != "default":
        raise ValueError(f"config.json: rope_type is {_short(rope_type)}; supported: default, yarn")
    if inner.unread():
        unknown = ", ".join(inner.unread())
        raise ValueError(f"config.json: rope of type {rope_type} does not know {unknown}; remove what has no effect")
    return {
        "max_position": max_position,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _read_yarn(rope: _Reader, max_position: int) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071): what is absent or null stays absent, and the formula has its default."""
    original = rope.size("original_max_position_embeddings", default=max_position)
    scaling: dict[str, Any] = {"rope_type": "yarn", "original_max_position_embeddings": original}
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if key == "factor" or rope.take(key) is not None:
            scaling[key] = rope.real(key, low=0.0, high=4096.0)
    scaling["truncate"] = rope.flag("truncate", default=True)
    if scaling["factor"] < 1.0:
        raise ValueError(f"config.json: rope factor is {scaling['factor']}; YaRN stretches: it must be at least 1")
    fast, slow = scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0)
    if fast < slow:
        raise ValueError(f"config.json: rope beta_fast is {fast}, below beta_slow {slow}; exchange them")
    return scaling


def _read_dtype(reader: _Reader) -> CheckpointDType:
    """The dtype the checkpoint names; without one float32, as transformers has it."""
    older, newer = reader.take("torch_dtype"), reader.take("dtype")
    name = newer if newer is not None else older
    if name is not None and name not in DTYPES:
        raise ValueError(f"config.json: dtype is {_short(name)}; supported: {', '.join(DTYPES)}")
    dtype: CheckpointDType = name or "float32"
    return dtype


def _read_quantization(reader: _Reader) -> bool:
    found = reader.take("quantization_config")
    if found is None:
        return False
    stated = {"fmt": "e4m3", **found} if isinstance(found, dict) else {}
    for key in sorted({*BLOCK_FP8, *stated} - {"modules_to_not_convert", "ignored_layers"}):
        if (value := stated.get(key)) != (only := BLOCK_FP8.get(key)):
            way_out = f"supported is {_short(only)}: take a checkpoint in block FP8, or the bfloat16 one"
            raise ValueError(f"config.json: quantization_config.{key} is {_short(value)}; {way_out}")
    return True


def _read_ids(reader: _Reader, key: str, vocab_size: int) -> tuple[int, ...]:
    ids = _as_list(reader.take(key))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{key} has {_short(token)} (in config.json or generation_config.json); "
                f"token ids are 0 to {vocab_size - 1}"
            )
    return tuple(sorted(set(ids)))


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"config.json: {name} is {value}; it must be a multiple of {of} {divisor}")


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
