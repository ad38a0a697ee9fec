"""Checkpoints in the Hugging Face layout: ``python -m training.export WEIGHTS TOKENIZER FOLDER`` puts one together."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.network import AttentionLayer, Config, GdnLayer, Layer, Network

HERE = Path(__file__).parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GDN_NAMES = {
    "in_proj_qkvz.weight": "qkvz", "in_proj_ba.weight": "ba", "conv1d.weight": "conv", "A_log": "a_log",
    "dt_bias": "dt_bias", "norm.weight": "norm", "out_proj.weight": "out",
}  # fmt: skip
ATTENTION_NAMES = {
    "q_proj.weight": "q", "k_proj.weight": "k", "v_proj.weight": "v", "o_proj.weight": "o",
    "q_norm.weight": "q_norm", "k_norm.weight": "k_norm",
}  # fmt: skip
COMMON_NAMES = {
    "input_layernorm.weight": "ln1", "post_attention_layernorm.weight": "ln2", "mlp.gate.weight": "router",
    "mlp.shared_expert.gate_proj.weight": "shared_gate", "mlp.shared_expert.up_proj.weight": "shared_up",
    "mlp.shared_expert.down_proj.weight": "shared_down", "mlp.shared_expert_gate.weight": "shared_mix",
}  # fmt: skip
TOP_NAMES = {
    "model.embed_tokens.weight": "embed", "lm_head.weight": "head", "model.norm.weight": "norm",
    "mtp.fc.weight": "mtp_fc",
    "mtp.pre_fc_norm_embedding.weight": "mtp_norm_embedding", "mtp.pre_fc_norm_hidden.weight": "mtp_norm_hidden",
    "mtp.norm.weight": "mtp_norm",
}  # fmt: skip


def layer_tensors(prefix: str, layer: Layer) -> dict[str, Tensor]:
    weights = layer.weights()
    out = {prefix + name: weights[ours] for name, ours in COMMON_NAMES.items()}
    if isinstance(layer, GdnLayer):
        out |= {f"{prefix}linear_attn.{name}": weights[ours] for name, ours in GDN_NAMES.items()}
    else:
        assert isinstance(layer, AttentionLayer), "a layer is either kind"
        out |= {f"{prefix}self_attn.{name}": weights[ours] for name, ours in ATTENTION_NAMES.items()}
    gate_up, down = weights["gate_up"], weights["down"]
    wide = gate_up.shape[1] // 2
    for e in range(gate_up.shape[0]):
        expert = f"{prefix}mlp.experts.{e}."
        out[expert + "gate_proj.weight"], out[expert + "up_proj.weight"] = gate_up[e, :wide], gate_up[e, wide:]
        out[expert + "down_proj.weight"] = down[e]
    return out


def tensors(net: Network) -> dict[str, Tensor]:
    """Views of the parameters under the names of the published checkpoints."""
    out = {name: getattr(net, ours) for name, ours in TOP_NAMES.items()}
    for i, layer in enumerate(net.layers):
        assert isinstance(layer, Layer), "the network holds its own layers"
        out |= layer_tensors(f"model.layers.{i}.", layer)
    out |= layer_tensors("mtp.layers.0.", net.mtp_layer)
    return {name: tensor.detach() for name, tensor in out.items()}


def save_weights(net: Network, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    save_file({k: v.to(dtype).contiguous().cpu() for k, v in tensors(net).items()}, path, metadata={"format": "pt"})


def load_weights(net: Network, path: Path) -> None:
    """Raises ValueError when the file's tensors are not the network's."""
    mine, theirs = tensors(net), load_file(path)
    if mine.keys() != theirs.keys():
        raise ValueError(f"{path} does not fit: {sorted(mine.keys() ^ theirs.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(theirs[name].to(tensor))


def read(folder: Path) -> Network:
    """The network of a checkpoint folder, in fp32."""
    net = Network(Config.read(folder / "config.json"))
    load_weights(net, folder / "model.safetensors")
    return net.eval()


def assemble(weights: Path, tokenizer: Path, folder: Path) -> None:
    """Copies weights, tokenizer and configuration into a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    shutil.copyfile(HERE / "config.json", folder / "config.json")
    shutil.copyfile(weights, folder / "model.safetensors")
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    generation = {
        "bos_token_id": config["bos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("weights", "tokenizer", "folder"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    assemble(args.weights, args.tokenizer, args.folder)


if __name__ == "__main__":
    main()
