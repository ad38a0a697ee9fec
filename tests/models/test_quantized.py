"""Block FP8: scales go with their weights, products are those of the quantised operands, and nothing is guessed."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.config import Quantization
from deltaserve.core.request import SamplingParams
from deltaserve.engine.llm import LLM
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.load import load_model
from deltaserve.models.names import is_scale
from deltaserve.models.qwen3_next import Qwen3Next
from tests.driver import Driver, Row
from tests.models.equality import assert_close, draw_tokens
from tests.models.factory import (
    Json,
    fp8_config,
    quantize_tensors,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_shards,
)
from tests.models.reference import Reference

CPU = torch.device("cpu")
F32 = torch.float32


def load(
    folder: Path, quantization: Quantization = "auto", dtype: torch.dtype = F32, with_mtp: bool = False
) -> Qwen3Next:
    config = ModelConfig.from_hf(load_config_json(folder))
    return load_model(folder, config, dtype, CPU, False, with_mtp, quantization)


def weights(model: Qwen3Next) -> dict[str, Tensor]:
    """By name; FP8 as its bytes, so that it can be compared."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in found.items():
        assert not tensor.isnan().any(), f"{name} is not written everywhere"
    return {name: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for name, t in found.items()}


def assert_same(left: Qwen3Next, right: Qwen3Next) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def spread(scale: Tensor, shape: torch.Size, halves: int = 1) -> Tensor:
    """One factor for each number; of a weight of several halves, each has rows of scales of its own."""
    wide = scale.double().repeat_interleave(128, -1)[..., : shape[-1]]
    parts = wide.chunk(halves, dim=-2)
    return torch.cat([part.repeat_interleave(128, -2)[..., : shape[-2] // halves, :] for part in parts], dim=-2)


def dequantized(model: Qwen3Next) -> dict[str, Tensor]:
    """What each weight stands for, in float64; b and a behind the projection that they belong to."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    result = {}
    for name, tensor in found.items():
        scale = found.get(f"{name}_scale_inv", found.get(f"{name}_scale"))
        if scale is not None:
            result[name] = tensor.double() * spread(scale, tensor.shape, 2 if name.endswith("w13") else 1)
        elif not is_scale(name):
            result[name] = tensor.double()
    for name in [name for name in result if name.endswith("ba_proj.weight")]:
        to = name.replace("ba_proj", "in_proj")
        result[to] = torch.cat([result[to], result.pop(name)])
    return result


def check_rows(quantized: Qwen3Next, plain: Qwen3Next) -> None:
    """Every weight held in FP8 stands for the same numbers as the one multiplied out at load."""
    ours, theirs = dequantized(quantized), {name: p.detach().double() for name, p in plain.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-6, atol=0), name


FORMS = [
    {},
    {"shards": 3},
    {"split_in_proj": True},
    {"stacked_experts": True},
    {"prefix": "model.language_model."},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_go_with_their_rows(tmp_path: Path, form: Json) -> None:
    config = fp8_config(mlp_only_layers=[1], intermediate_size=256)
    folder = write_checkpoint(tmp_path, config, mtp=True, fp8=True, **form)
    model = load(folder, with_mtp=True)
    names = weights(model)
    for name in (
        "layers.0.mixer.in_proj",
        "layers.3.mixer.qgkv_proj",
        "layers.0.mixer.out_proj",
        "layers.3.mixer.o_proj",
    ):
        assert model.get_parameter(f"{name}.weight").dtype == torch.float8_e4m3fn
        assert f"{name}.weight_scale_inv" in names
    for name in ("layers.0.mixer.ba_proj", "layers.0.mlp.router", "mtp.fc", "lm_head", "embed_tokens"):
        assert model.get_parameter(f"{name}.weight").dtype == F32
    assert model.get_parameter("mtp.layer.mlp.w13").dtype == torch.float8_e4m3fn
    plain = load(folder, "none", with_mtp=True)
    assert not any(map(is_scale, weights(plain)))
    assert model.num_parameters == plain.num_parameters == sum(p.numel() for p in plain.parameters())
    check_rows(model, plain)


@pytest.mark.parametrize("name", ["layers.0.mixer.in_proj", "layers.3.mixer.qgkv_proj", "layers.2.mlp.w13"])
def test_a_scale_at_the_wrong_row_is_seen(tmp_path: Path, name: str) -> None:
    """The test above and the comparison below would fail."""
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, fp8=True)
    model, plain = load(folder), load(folder, "none")
    scale = model.get_parameter(f"{name}_scale" if name.endswith("w13") else f"{name}.weight_scale_inv")
    token_ids = draw_tokens(random.Random(0), config, 40)
    before = Driver(model).prefill(Row(token_ids))
    with torch.no_grad():
        scale[..., :2, :] = scale[..., :2, :].flip(-2).clone()
    with pytest.raises(AssertionError, match=name):
        check_rows(model, plain)
    assert (Driver(model).prefill(Row(token_ids)) - before).abs().max() > 1e-3


class QuantizedReference(Reference):
    """The paper's model with the operands of each product quantised, from the file's own tensors."""

    def __init__(self, config: Json, tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        for name, tensor in self.tensors.items():
            if f"{name}_scale_inv" in tensors:
                self.tensors[name] = tensor * spread(tensors[f"{name}_scale_inv"], tensor.shape)

    def project(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.weight_scale_inv" in self.tensors:
            x = torch.cat([self.rounded(part) for part in torch.split(x, 128, dim=-1)], dim=-1)
        return super().project(x, name)

    def rounded(self, x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def test_logits_are_those_of_the_quantised_operands(tmp_path: Path) -> None:
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, fp8=True)
    token_ids = draw_tokens(random.Random(1), config, 70)
    exact = QuantizedReference(config, load_file(folder / "model.safetensors")).logits(token_ids)
    assert_close(Driver(load(folder, dtype=torch.float64)).prefill(Row(token_ids)), exact, 1e-6)
    logits = Driver(load(folder)).prefill(Row(token_ids)).double()
    # Sooner or later float32 rounds some activation to another neighbour, and all that follows feels it.
    assert (logits[:16] - exact[:16]).abs().median() <= 1e-4
    plain = Driver(load(folder, "none")).prefill(Row(token_ids)).double()
    noise = (logits - plain).norm() / plain.norm()
    assert 1e-3 < noise < 0.35, "quantised activations differ, and not by much: some tokens change an expert"


@pytest.mark.parametrize("form", [{}, {"stacked_experts": True, "split_in_proj": True}], ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, F32])
def test_quantising_while_loading_is_loading_what_was_quantised(
    tmp_path: Path, stored: torch.dtype, form: Json
) -> None:
    config = fp8_config()
    ready = write_checkpoint(tmp_path / "ready", config, dtype=stored, mtp=True, fp8=True, **form)
    plain = write_checkpoint(tmp_path / "plain", config, dtype=stored, mtp=True, shards=2, **form)
    assert_same(load(plain, "fp8", torch.bfloat16, with_mtp=True), load(ready, "auto", torch.bfloat16, with_mtp=True))
    assert_same(load(ready, "fp8", with_mtp=True), load(ready, "auto", with_mtp=True))


def test_a_tensor_larger_than_a_buffer_is_quantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, fp8_config(), stacked_experts=True)
    whole, dequantised = load(folder, "fp8"), load(folder, "none")
    monkeypatch.setattr("deltaserve.models.fill.BATCH_BYTES", 200_000)
    assert_same(load(folder, "fp8"), whole)
    assert_same(load(folder, "none"), dequantised)


# ---- the engine ----------------------------------------------------------------------------------------------------


def test_chunks_and_batch_mates_change_nothing(tmp_path: Path) -> None:
    """In float64, where no rounding of a sum moves an activation to another number of FP8."""
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, fp8=True)
    model = load(folder, dtype=torch.float64)
    draw = random.Random(2)
    token_ids = draw_tokens(draw, config, 100)
    whole = Driver(model).prefill(Row(token_ids))
    assert_close(Driver(model).prefill(Row(token_ids), [1, 63, 2, 34]), whole, 1e-9)
    prompts = [token_ids, *(draw_tokens(draw, config, count) for count in (1, 5, 64))]
    alone = [Driver(model).greedy([prompt], 6)[0] for prompt in prompts]
    assert Driver(model).greedy(prompts, 6, chunk=32) == alone


def answers(folder: Path, **options: Any) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    prompts = [[7, 8, 9], list(range(3, 90))]
    with LLM(str(folder), device="cpu", dtype="float64", num_blocks=32, **options) as llm:
        return [
            generation.outputs[0].token_ids
            for params in (greedy, drawn)
            for generation in llm.generate(prompts, params)
        ]


def test_the_engine_answers_alike_however_the_weights_came(tmp_path: Path) -> None:
    ready = write_checkpoint(tmp_path / "ready", fp8_config(), mtp=True, fp8=True)
    plain = write_checkpoint(tmp_path / "plain", fp8_config(), mtp=True)
    expected = answers(ready)
    assert answers(plain, quantization="fp8") == expected
    assert answers(ready, speculative_tokens="3") == expected
    assert answers(plain) != expected


# ---- units that cannot stay in FP8 -----------------------------------------------------------------------------------


def test_a_unit_of_both_kinds_is_multiplied_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, fp8=True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.3.self_attn.k_proj.weight"
    tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale_inv").repeat_interleave(128, 1)[:, :192]
    write_shards(folder, tensors, 1)
    model = load(folder)
    assert model.get_parameter("layers.3.mixer.qgkv_proj.weight").dtype == F32
    assert model.get_parameter("layers.3.mixer.o_proj.weight").dtype == F32
    assert model.get_parameter("layers.3.mlp.w13").dtype == torch.float8_e4m3fn
    assert "layers.3.mixer is not kept in FP8, but loaded in the model's dtype: only 3 of its 4 tensors" in caplog.text
    check_rows(model, load(folder, "none"))


def test_parts_that_share_scales_are_multiplied_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, fp8_config(head_dim=64, moe_intermediate_size=96), fp8=True)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    assert model.get_parameter("layers.0.mixer.in_proj.weight").dtype == torch.float8_e4m3fn
    assert model.get_parameter("layers.3.mixer.qgkv_proj.weight").dtype == F32
    assert model.get_parameter("layers.0.mlp.w13").dtype == F32
    assert "layers.3.mixer is not kept in FP8" in caplog.text
    assert "parts of model.layers.0.mlp.experts.3.up_proj.weight share scales" in caplog.text
    check_rows(model, load(folder, "none"))


def test_other_tensors_in_fp8_are_multiplied_out(tmp_path: Path) -> None:
    """A router or a head in FP8 is no projection that is held so here."""
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, fp8=True)
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.linear_attn.in_proj_ba.weight"):
        as_projection = quantize_tensors({"down_proj.weight": tensors[name]})
        tensors[name], tensors[f"{name}_scale_inv"] = as_projection.values()
    write_shards(folder, tensors, 1)
    model = load(folder)
    assert model.get_parameter("lm_head.weight").dtype == F32
    expected = tensors["lm_head.weight"].double() * spread(
        tensors["lm_head.weight_scale_inv"], tensors["lm_head.weight"].shape
    )
    torch.testing.assert_close(model.lm_head.weight.double(), expected, rtol=1e-6, atol=0)
    check_rows(model, load(folder, "none"))


# ---- refusals ------------------------------------------------------------------------------------------------------


def refuse(folder: Path, tensors: dict[str, Tensor], message: str) -> None:
    write_shards(folder, tensors, 1)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_scales_are_strict_both_ways(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, fp8_config(), fp8=True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    scale = f"{name}_scale_inv"
    without = {key: tensor for key, tensor in tensors.items() if key != scale}
    refuse(folder, without, f"tensor {name} is F8_E4M3 and its scales, {scale}, are missing; download it again")
    plain = tensors | {name: tensors[name].float()}
    refuse(folder, plain, f"tensor {scale} holds scales of a weight in F8_E4M3, but {name} is F32; download it again")
    of_nothing = tensors | {"model.layers.9.x.weight_scale_inv": torch.ones(1, 1)}
    refuse(folder, of_nothing, "layers.9.x.weight_scale_inv holds scales .*, but there is no tensor that it belongs to")
    wrong = tensors | {scale: torch.ones(2, 2)}
    refuse(folder, wrong, re.escape(f"tensor {scale} has shape [2, 2], expected [1, 2] by config.json"))
    odd = tensors | {scale: torch.ones(1, 2, dtype=torch.float64)}
    refuse(folder, odd, f"tensor {scale} is F64, expected one of F32, BF16, F16")
    write_shards(folder, tensors | {scale: tensors[scale].bfloat16()}, 1)
    assert load(folder).get_parameter("layers.2.mlp.w13_scale").dtype == F32


def test_quantising_what_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    message = "quantization is fp8, but in model.layers.0.linear_attn.in_proj_qkvz.weight a scale's block of 128 rows"
    with pytest.raises(ValueError, match=message):
        load(folder, "fp8")


def test_the_mtp_layer_is_a_layer_like_the_others(tmp_path: Path) -> None:
    """With the tensors of layer 3 it has the weights of layer 3."""
    config = fp8_config()
    folder = write_checkpoint(tmp_path, config, mtp=True)
    tensors = random_tensors(config, mtp=True)
    for name in tensors:
        if name.startswith("mtp.layers.0."):
            tensors[name] = tensors[name.replace("mtp.layers.0.", "model.layers.3.")].clone()
    write_shards(folder, quantize_tensors(tensors), 1)
    names = weights(load(folder, with_mtp=True))
    layer = {name: tensor for name, tensor in names.items() if name.startswith("layers.3.")}
    assert any(is_scale(name) for name in layer)
    for name, tensor in layer.items():
        assert torch.equal(names[name.replace("layers.3.", "mtp.layer.")], tensor), name
