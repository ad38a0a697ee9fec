"""Loading is strict both ways, and every naming in the field gives the same weights. Fresh memory is NaN in tests."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models import fill
from deltaserve.models.load import load_model
from deltaserve.models.matching import match
from deltaserve.models.names import Piece, model_choices
from deltaserve.models.qwen3_next import Qwen3Next
from tests.models.factory import (
    BUILTIN,
    random_config,
    random_tensors,
    tensor_shapes,
    tiny_config,
    write_checkpoint,
    write_shards,
)

CPU = torch.device("cpu")


def load_folder(folder: Path, dtype: torch.dtype = torch.float32, progress: bool = False) -> Qwen3Next:
    return load_model(folder, ModelConfig.from_hf(load_config_json(folder)), dtype, CPU, progress)


def weights(model: Qwen3Next) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same_weights(left: Qwen3Next, right: Qwen3Next) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert not tensor.isnan().any(), f"{name} is not written everywhere"
        assert torch.equal(tensor, theirs[name]), name


# ---- the table of names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_published_names_are_those_of_the_table(seed: int) -> None:
    config = random_config(seed)
    choices = list(model_choices(ModelConfig.from_hf(config)))
    published = {name: piece.shape for forms in choices for name, piece in forms[0].items()}
    assert published == dict(tensor_shapes(config))


@pytest.mark.parametrize("seed", range(20))
def test_every_form_fills_every_weight_once(seed: int) -> None:
    config = ModelConfig.from_hf(random_config(seed))
    for form in (0, -1):
        model = Qwen3Next(config, torch.float32, CPU)
        counts = {name: torch.zeros(parameter.shape, dtype=torch.int64) for name, parameter in weights(model).items()}
        for forms in model_choices(config):
            for piece in forms[form].values():
                target = counts[piece.parameter][piece.index]
                target += torch.ones(piece.shape, dtype=torch.int64).reshape(target.shape)
                check_order(piece)
        assert all((count == 1).all() for count in counts.values())


def check_order(piece: Piece) -> None:
    if piece.order is not None:
        assert torch.equal(piece.order.sort().values, torch.arange(piece.shape[0])), "some row is used twice"


def test_the_fused_rows_have_the_documented_order(tmp_path: Path) -> None:
    """Key heads 2, value heads 4 of 24; query heads 4 of 32. Every row holds its own number."""
    tensors = random_tensors(tiny_config())
    for name in ("in_proj_qkvz", "in_proj_ba"):
        tensor = tensors[f"model.layers.0.linear_attn.{name}.weight"]
        tensor.copy_(torch.arange(len(tensor), dtype=torch.float32)[:, None].expand_as(tensor))
    q_proj = tensors["model.layers.3.self_attn.q_proj.weight"]
    q_proj.copy_(torch.arange(len(q_proj), dtype=torch.float32)[:, None].expand_as(q_proj))
    folder = write_checkpoint(tmp_path)
    write_shards(folder, tensors, 1)
    model = load_folder(folder)

    in_proj = weights(model)["layers.0.mixer.in_proj.weight"][:, 0].tolist()
    group = 16 + 16 + 2 * 24 + 2 * 24

    def of(start: int, width: int) -> list[int]:
        return [g * group + start + row for g in range(2) for row in range(width)]

    assert in_proj[: 2 * group] == [*of(0, 16), *of(16, 16), *of(32, 48), *of(80, 48)]
    assert in_proj[2 * group :] == [0, 1, 4, 5, 2, 3, 6, 7]
    qgkv = weights(model)["layers.3.mixer.qgkv_proj.weight"][: 2 * 4 * 32, 0].tolist()
    assert qgkv == [
        *(head * 64 + row for head in range(4) for row in range(32)),
        *(head * 64 + 32 + row for head in range(4) for row in range(32)),
    ]


# ---- namings, shards and dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 5},
        {"mtp": True},
        {"mtp": True, "shards": 3},
        {"stacked_experts": True},
        {"stacked_experts": True, "mtp": True},
        {"split_in_proj": True},
        {"prefix": "model.language_model."},
        {"prefix": "model.language_model.", "split_in_proj": True, "stacked_experts": True, "mtp": True, "shards": 2},
    ],
)
def test_every_naming_gives_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    config = tiny_config(decoder_sparse_step=2, num_hidden_layers=5)
    plain = write_checkpoint(tmp_path / "plain", config)
    other = write_checkpoint(tmp_path / "other", config, **options)
    assert_same_weights(load_folder(plain), load_folder(other))


def test_threads_and_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, shards=4)
    at_once = load_folder(folder)
    for size in (1, 5000):
        monkeypatch.setattr(fill, "BATCH_BYTES", size)
        assert_same_weights(at_once, load_folder(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_stored_and_chosen_dtype_are_independent(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    folder = write_checkpoint(tmp_path, dtype=stored)
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors(tiny_config()).items()}
    loaded = weights(load_folder(folder, dtype))
    wide = torch.promote_types(dtype, torch.float32)
    head = tensors["lm_head.weight"]
    assert torch.equal(loaded["lm_head.weight"], head.to(dtype))
    for ours, theirs in (("A_log", "A_log"), ("dt_bias", "dt_bias"), ("norm_weight", "norm.weight")):
        stored_weight = tensors[f"model.layers.0.linear_attn.{theirs}"]
        assert torch.equal(loaded[f"layers.0.mixer.{ours}"], stored_weight.to(wide))
    norms = ("layers.3.mixer.q_norm", "layers.3.input_norm", "layers.0.post_norm", "norm")
    sources = ("layers.3.self_attn.q_norm", "layers.3.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    for name, source in zip(norms, sources, strict=True):
        assert torch.equal(loaded[f"{name}.weight_plus_one"], tensors[f"model.{source}.weight"].to(wide) + 1)
    assert not any(tensor.isnan().any() for tensor in loaded.values())


def test_tied_embeddings_are_one_weight(tmp_path: Path) -> None:
    model = load_folder(write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=True)))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in weights(model)


def test_weights_need_no_gradient_and_the_model_is_in_eval_mode() -> None:
    model = load_folder(BUILTIN)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


# ---- the MTP layer -------------------------------------------------------------------------------------------------


def test_the_mtp_layer_is_set_aside_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, mtp=True)
    with caplog.at_level(logging.INFO):
        load_folder(folder)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    message = record.getMessage()
    assert message.startswith("set aside 41 tensors of the MTP layer: mtp.fc.weight, mtp.layers.0.input_layernorm")
    assert "mtp.layers.0.mlp.experts.*.down_proj.weight" in message
    assert "experts.0" not in message


def test_no_mtp_layer_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO):
        load_folder(folder)
    assert not caplog.records


# ---- refusals ------------------------------------------------------------------------------------------------------


def refuse(folder: Path, tensors: dict[str, Tensor], message: str, **changes: Any) -> None:
    """Write a checkpoint of these tensors; loading it must fail with the message."""
    write_checkpoint(folder, tiny_config(**changes))
    write_shards(folder, tensors, 1)
    with pytest.raises(ValueError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("name", [name for name, _ in tensor_shapes(tiny_config()) if ".layers.1." not in name])
def test_any_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(tiny_config())
    del tensors[name]
    refuse(tmp_path, tensors, f"{tmp_path} lacks 1 tensors that its config.json asks for: {name}; download it again")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.mlp.gate.weight",
        "model.layers.0.linear_attn.in_proj_qkvz.bias",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.experts.8.up_proj.weight",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.0.linear_attn.in_proj_z.weight",
        "model.layers.0.mlp.up_proj.weight",
        "mtp.layers.1.input_layernorm.weight",
        "mtp.embed_tokens.weight",
        "visual.patch_embed.weight",
    ],
)
def test_any_surplus_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(tiny_config(), mtp=True) | {name: torch.zeros(2)}
    refuse(tmp_path, tensors, f"has 1 tensors that its config.json has no place for: {name}; download it again")


def test_many_names_are_counted(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in random_tensors(tiny_config()).items() if ".experts." not in name}
    refuse(tmp_path, tensors, "lacks 96 tensors .* and 90 more; download")


def test_a_tied_model_has_no_place_for_a_head(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    refuse(tmp_path, tensors, "tie_word_embeddings is true, .*: set it to false", tie_word_embeddings=True)


def test_the_other_forms_are_complete_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "right", split_in_proj=True, stacked_experts=True)
    tensors = dict(load_tensors(tmp_path / "right"))
    del tensors["model.layers.0.linear_attn.in_proj_z.weight"], tensors["model.layers.1.mlp.experts.gate_up_proj"]
    message = "lacks 2 tensors .*: model.layers.0.linear_attn.in_proj_z.weight, model.layers.1.mlp.experts.gate_up_proj"
    refuse(tmp_path / "wrong", tensors, message)


def load_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (161, 64), "[160, 64]"),
        ("model.layers.0.linear_attn.conv1d.weight", (160, 4, 1), "[160, 1, 4]"),
        ("model.layers.0.linear_attn.A_log", (2,), "[4]"),
        ("model.layers.3.self_attn.q_proj.weight", (128, 64), "[256, 64]"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (24, 64), "[64, 24]"),
        ("mtp.fc.weight", (64, 64), "[64, 128]"),
    ],
)
def test_a_wrong_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    tensors = random_tensors(tiny_config(), mtp=True) | {name: torch.zeros(shape)}
    file = tmp_path / "model.safetensors"
    message = f"{file}: tensor {name} has shape {list(shape)}, expected {expected} by config.json; download both again"
    refuse(tmp_path, tensors, f"^{re.escape(message)}$")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float64])
def test_a_wrong_dtype_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(tiny_config())
    name = "model.layers.1.linear_attn.out_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    refuse(tmp_path, tensors, f"tensor {name} is (I8|F8_E5M2|F64), expected one of F32, BF16, F16, F8_E4M3; take the")


@pytest.mark.parametrize("ending", ["qweight", "weight_scale", "weight_packed"])
def test_other_quantised_checkpoints_are_told_as_such(tmp_path: Path, ending: str) -> None:
    tensors = random_tensors(tiny_config())
    tensors[f"model.layers.1.linear_attn.out_proj.{ending}"] = torch.ones(1, 1)
    refuse(tmp_path, tensors, r"of quantised checkpoints only block FP8 \(tensors \*_scale_inv\) is supported")


def test_one_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()
    refuse(tmp_path, tensors, "tensors model.* and model.* are the same weight; remove one of the two")


def test_a_header_that_contradicts_itself_is_told_with_its_file(tmp_path: Path) -> None:
    """The header promises float16 in the bytes of float32."""
    folder = write_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F16"'))
    with pytest.raises(ValueError, match=f"{file} cannot be read: tensor .* in F16 has .* bytes; download it again"):
        load_folder(folder)


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = ModelConfig.from_hf(load_config_json(folder))
    jobs = match(folder, config).jobs
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file} ends before byte .*download it again"):
        fill.fill(Qwen3Next(config, torch.float32, CPU), jobs, False)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} cannot be read .*download it again"):
        fill.fill(Qwen3Next(config, torch.float32, CPU), jobs, False)


# ---- progress ------------------------------------------------------------------------------------------------------


def test_progress_counts_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    load_folder(BUILTIN, progress=True)
    error = capsys.readouterr().err
    assert "Loading weights" in error
    assert "100%" in error


def test_no_progress_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    load_folder(BUILTIN, progress=False)
    assert capsys.readouterr() == ("", "")
