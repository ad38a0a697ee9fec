"""The table of names: every tensor a checkpoint may hold, its shape there, and the weight rows it becomes here.

Knows no file. Where the field has two namings for the same weights (one tensor per expert, or all in one; fused and
interleaved projections, or the siblings' separate ones) the table has both *forms*; a checkpoint uses one of them.
The rows of fused projections are put in this order once, at load: q|k|v|z|b|a in a gated delta net, q|gate|k|v in
attention, all heads of one part together.

Projections and experts may be quantised: e4m3 with one scale per 128 x 128 block, held in a tensor that is named as the
weight with `_scale_inv` behind. Scales take the way of their weight. What is quantised is decided for a whole *unit*, a
layer's mixer or MLP.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.model_config import ModelConfig
from deltaserve.ops.linear.api import scale_shape
from deltaserve.ops.linear.reference import BLOCK as SCALE_BLOCK

SCALE = "_scale_inv"
"""Ends the name of the tensor that holds a weight's scales."""


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor: `parameter[index] = tensor[order]`, plus one where a Gemma norm wants it."""

    shape: tuple[int, ...]
    """In the file."""
    parameter: str
    """The model's own name of the weight."""
    index: tuple[int | slice, ...] = ()
    order: Tensor | None = None
    """int64: the file's row for each row of the destination; None keeps the file's order."""
    plus_one: bool = False
    unit: str = ""
    """The mixer or MLP whose weights are quantised together with this one; none for what never is."""
    part: int = 0
    """Rows of one of several weights that the tensor holds one after the other; 0 for a single one."""


Form = dict[str, Piece]
"""Checkpoint name -> where it goes."""
Choice = tuple[Form, ...]
"""Forms of the same weights; the first is the published one."""


def is_scale(parameter: str) -> bool:
    """Whether the model's weight of this name is the scales of another."""
    return parameter.endswith((SCALE, "_scale"))


def scales_of(piece: Piece) -> Piece | None:
    """Where the scales of a quantised weight go; None where parts of the weight would have to share one."""
    if piece.part % SCALE_BLOCK:
        return None
    index: list[int | slice] = []
    for at in piece.index:
        if isinstance(at, slice):  # of rows
            if at.start % SCALE_BLOCK:
                return None
            first = at.start // SCALE_BLOCK
            at = slice(first, first + scale_shape((at.stop - at.start, 1))[0])
        index.append(at)
    order = None
    if piece.order is not None:
        if len(piece.order) % SCALE_BLOCK:
            return None
        blocks = piece.order.view(-1, SCALE_BLOCK)
        order = blocks[:, 0] // SCALE_BLOCK
        if not torch.equal(blocks, SCALE_BLOCK * order[:, None] + torch.arange(SCALE_BLOCK)):
            return None
    plain = piece.parameter.removesuffix(".weight")
    parameter = f"{plain}.weight{SCALE}" if plain != piece.parameter else f"{plain}_scale"
    return Piece(scale_shape(piece.shape), parameter, tuple(index), order)


def model_choices(config: ModelConfig) -> Iterator[Choice]:
    """All that a checkpoint of this config must hold, beside scales: of each choice exactly one form."""
    vocab = (config.vocab_size, config.hidden_size)
    yield ({"model.embed_tokens.weight": Piece(vocab, "embed_tokens.weight")},)
    for layer in range(config.num_layers):
        mlp_kind = config.mlp_kinds[layer]
        kinds = config.layer_kinds[layer], mlp_kind
        yield from _block(f"model.layers.{layer}.", f"layers.{layer}.", config, kinds)
    yield ({"model.norm.weight": _norm(config.hidden_size, "norm")},)
    if not config.tied:
        yield ({"lm_head.weight": Piece(vocab, "lm_head.weight")},)


def quantized_choices(config: ModelConfig, quantized: Container[str]) -> Iterator[Choice]:
    """What has another place where these units are held quantised: the projections of gated delta nets."""
    for layer in range(config.num_layers):
        if config.layer_kinds[layer] == "gdn" and f"layers.{layer}.mixer" in quantized:
            yield from _gated_delta_net(f"model.layers.{layer}.linear_attn.", f"layers.{layer}.mixer.", config, True)


def mtp_choices(config: ModelConfig) -> Iterator[Choice]:
    """The tensors of the MTP layer, which a checkpoint may hold beside the model's."""
    hidden = config.hidden_size
    yield ({"mtp.fc.weight": Piece((hidden, 2 * hidden), "mtp.fc.weight")},)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield ({f"mtp.{name}.weight": _norm(hidden, f"mtp.{name}")},)
    yield from _block("mtp.layers.0.", "mtp.layer.", config, ("full", "moe" if config.num_experts else "dense"))


def _block(prefix: str, to: str, config: ModelConfig, kinds: tuple[str, str]) -> Iterator[Choice]:
    kind, mlp_kind = kinds
    yield ({f"{prefix}input_layernorm.weight": _norm(config.hidden_size, f"{to}input_norm")},)
    yield ({f"{prefix}post_attention_layernorm.weight": _norm(config.hidden_size, f"{to}post_norm")},)
    if kind == "full":
        yield (_attention(f"{prefix}self_attn.", f"{to}mixer.", config),)
    else:
        yield from _gated_delta_net(f"{prefix}linear_attn.", f"{to}mixer.", config)
    if mlp_kind == "moe":
        yield from _moe(f"{prefix}mlp.", f"{to}mlp.", config)
    else:
        yield (_of_unit(f"{to}mlp", _swiglu(f"{prefix}mlp.", f"{to}mlp.", config.hidden_size, config.dense_size)),)


def _of_unit(unit: str, form: Form) -> Form:
    return {name: replace(piece, unit=unit) for name, piece in form.items()}


def _norm(width: int, to: str) -> Piece:
    return Piece((width,), f"{to}.weight_plus_one", plus_one=True)


def _attention(prefix: str, to: str, config: ModelConfig) -> Form:
    """q_proj's rows are q|gate head by head; they become the q rows of all heads, then the gate rows."""
    hidden, width = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * width, config.num_kv_heads * width
    by_part = torch.arange(2 * q_width).view(config.num_heads, 2, width).transpose(0, 1).flatten()
    fused = f"{to}qgkv_proj.weight"
    k_start, v_start = 2 * q_width, 2 * q_width + kv_width
    projections = {
        f"{prefix}q_proj.weight": Piece((2 * q_width, hidden), fused, _rows(0, 2 * q_width), by_part),
        f"{prefix}k_proj.weight": Piece((kv_width, hidden), fused, _rows(k_start, kv_width)),
        f"{prefix}v_proj.weight": Piece((kv_width, hidden), fused, _rows(v_start, kv_width)),
        f"{prefix}o_proj.weight": Piece((hidden, q_width), f"{to}o_proj.weight"),
    }
    return _of_unit(to[:-1], projections) | {
        f"{prefix}q_norm.weight": _norm(width, f"{to}q_norm"),
        f"{prefix}k_norm.weight": _norm(width, f"{to}k_norm"),
    }


def _gated_delta_net(prefix: str, to: str, config: ModelConfig, is_quantized: bool = False) -> Iterator[Choice]:
    """in_proj_qkvz's and in_proj_ba's rows are q|k|v|z and b|a, key head by key head; they are put part by part.

    In a quantised layer b and a are a weight of their own, which is not.
    """
    hidden, k_heads, v_heads = config.hidden_size, config.gdn_k_heads, config.gdn_v_heads
    ratio = v_heads // k_heads
    values, conv_dim = v_heads * config.gdn_v_dim, config.conv_dim
    unit, fused = to[:-1], f"{to}in_proj.weight"
    qkvz = conv_dim + values
    ba, b_start = (f"{to}ba_proj.weight", 0) if is_quantized else (fused, qkvz)
    group = [config.gdn_k_dim, config.gdn_k_dim, ratio * config.gdn_v_dim, ratio * config.gdn_v_dim]
    yield (
        {
            f"{prefix}in_proj_qkvz.weight": Piece(
                (qkvz, hidden), fused, _rows(0, qkvz), _group_order(k_heads, group), unit=unit
            ),
            f"{prefix}in_proj_ba.weight": Piece(
                (2 * v_heads, hidden), ba, _rows(b_start, 2 * v_heads), _group_order(k_heads, [ratio, ratio])
            ),
        },
        {
            f"{prefix}in_proj_qkv.weight": Piece((conv_dim, hidden), fused, _rows(0, conv_dim), unit=unit),
            f"{prefix}in_proj_z.weight": Piece((values, hidden), fused, _rows(conv_dim, values), unit=unit),
            f"{prefix}in_proj_b.weight": Piece((v_heads, hidden), ba, _rows(b_start, v_heads)),
            f"{prefix}in_proj_a.weight": Piece((v_heads, hidden), ba, _rows(b_start + v_heads, v_heads)),
        },
    )
    yield (
        {
            f"{prefix}conv1d.weight": Piece((conv_dim, 1, config.conv_width), f"{to}conv_weight"),
            f"{prefix}A_log": Piece((v_heads,), f"{to}A_log"),
            f"{prefix}dt_bias": Piece((v_heads,), f"{to}dt_bias"),
            f"{prefix}norm.weight": Piece((config.gdn_v_dim,), f"{to}norm_weight"),
            f"{prefix}out_proj.weight": Piece((hidden, values), f"{to}out_proj.weight", unit=unit),
        },
    )


def _moe(prefix: str, to: str, config: ModelConfig) -> Iterator[Choice]:
    hidden, inner, num_experts = config.hidden_size, config.moe_size, config.num_experts
    yield (
        {
            f"{prefix}gate.weight": Piece((num_experts, hidden), f"{to}router.weight", _rows(0, num_experts)),
            f"{prefix}shared_expert_gate.weight": Piece((1, hidden), f"{to}router.weight", _rows(num_experts, 1)),
        },
    )
    unit = to[:-1]
    yield (_of_unit(unit, _swiglu(f"{prefix}shared_expert.", f"{to}shared_expert.", hidden, config.shared_size)),)
    one_by_one: Form = {}
    for expert in range(num_experts):
        start = f"{prefix}experts.{expert}."
        gate, up = (expert, slice(0, inner)), (expert, slice(inner, 2 * inner))
        one_by_one[f"{start}gate_proj.weight"] = Piece((inner, hidden), f"{to}w13", gate, unit=unit)
        one_by_one[f"{start}up_proj.weight"] = Piece((inner, hidden), f"{to}w13", up, unit=unit)
        one_by_one[f"{start}down_proj.weight"] = Piece((hidden, inner), f"{to}w2", (expert,), unit=unit)
    stacked = {
        f"{prefix}experts.gate_up_proj": Piece((num_experts, 2 * inner, hidden), f"{to}w13", unit=unit, part=inner),
        f"{prefix}experts.down_proj": Piece((num_experts, hidden, inner), f"{to}w2", unit=unit),
    }
    yield one_by_one, stacked


def _swiglu(prefix: str, to: str, hidden: int, inner: int) -> Form:
    fused = f"{to}gate_up_proj.weight"
    return {
        f"{prefix}gate_proj.weight": Piece((inner, hidden), fused, _rows(0, inner)),
        f"{prefix}up_proj.weight": Piece((inner, hidden), fused, _rows(inner, inner)),
        f"{prefix}down_proj.weight": Piece((hidden, inner), f"{to}down_proj.weight"),
    }


def _rows(start: int, count: int) -> tuple[slice]:
    return (slice(start, start + count),)


def _group_order(num_groups: int, widths: list[int]) -> Tensor:
    """From [group, part, row] to [part, group, row]: the source row of each destination row."""
    rows = torch.arange(num_groups * sum(widths)).view(num_groups, sum(widths))
    return torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])
