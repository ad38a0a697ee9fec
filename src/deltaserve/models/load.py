"""From a checkpoint folder, or from nothing, to a model with weights. Knows no request and no cache.

All is judged from the headers before a byte of a tensor is read (matching.py); then several threads read (fill.py).
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import torch

from deltaserve.config import Quantization
from deltaserve.model_config import ModelConfig
from deltaserve.models.checkpoint import checkpoint_tensors, tensor_names
from deltaserve.models.dummy import fill_at_random
from deltaserve.models.fill import fill
from deltaserve.models.hub import resolve
from deltaserve.models.matching import all_units, match
from deltaserve.models.qwen3_next import Qwen3Next

__all__ = ["checkpoint_tensors", "empty_model", "has_mtp", "load_model", "quantized_units", "random_model", "resolve"]


def has_mtp(path: Path) -> bool:
    """Whether the checkpoint folder holds an MTP layer: no config.json says so. Raises ValueError as `read_headers`."""
    return any(name.startswith("mtp.") for name in tensor_names(path))


def quantized_units(
    path: Path | None, config: ModelConfig, with_mtp: bool = False, quantization: Quantization = "auto"
) -> frozenset[str]:
    """The mixers and MLPs that `load_model` would hold in FP8; without a path, those of a model made at random.

    Raises ValueError as `load_model`; reads no tensor.
    """
    if path is not None:
        return match(path, config, with_mtp, quantization).quantized
    in_fp8 = quantization == "fp8" or (quantization == "auto" and config.quantized)
    return all_units(config, with_mtp) if in_fp8 else frozenset()


def empty_model(
    config: ModelConfig, dtype: torch.dtype, with_mtp: bool = False, quantized: Container[str] = ()
) -> Qwen3Next:
    """The model's shapes and dtypes, as `load_model` would fill them; nothing is allocated."""
    return Qwen3Next(config, dtype, torch.device("meta"), with_mtp, quantized)


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    with_mtp: bool = False,
    quantization: Quantization = "auto",
) -> Qwen3Next:
    """The model of the checkpoint folder `path`, its weights in `dtype` on `device`; norms and decays stay in float32.
    Its MTP layer is loaded if asked for, and set aside otherwise. FP8 weights stay what they are, unless
    `quantization` is none; if it is fp8, projections and experts that are not yet FP8 are quantised as they come.

    Raises ValueError naming file, tensor, what is expected and what was found, and the way out.
    """
    matched = match(path, config, with_mtp, quantization)
    model = Qwen3Next(config, dtype, device, with_mtp, matched.quantized)
    fill(model, matched.jobs, progress)
    return model.eval()


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    with_mtp: bool = False,
    quantized: Container[str] = (),
    seed: int = 0,
) -> Qwen3Next:
    """A model of this config with weights drawn on the device: as large and as fast as a real one, and no wiser."""
    model = Qwen3Next(config, dtype, device, with_mtp, quantized)
    fill_at_random(model, seed)
    return model.eval()
