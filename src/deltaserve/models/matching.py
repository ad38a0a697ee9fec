"""Matches a checkpoint's headers with the table of names, strict both ways, before a byte of a tensor is read.

Decides too what is quantised, tensor by tensor from what the files hold. A unit (a layer's mixer or MLP) is held in FP8
when all of its projections are; one that has some in FP8 and others not, or whose scale blocks would straddle two parts
of a fused weight, is loaded in the model's dtype, its FP8 tensors multiplied with their scales.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltaserve.config import Quantization
from deltaserve.model_config import ModelConfig
from deltaserve.models.checkpoint import TensorInfo, read_headers
from deltaserve.models.names import SCALE, Choice, Form, Piece, model_choices, mtp_choices, quantized_choices, scales_of
from deltaserve.ops.linear.api import scale_shape

SIZES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number of each dtype that is read, beside FP8."""
FP8 = "F8_E4M3"
MAX_NAMED = 6
"""Names told in one message."""

Found = dict[str, tuple[str, TensorInfo]]
"""Published name -> (name in the file, header)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One tensor to read: `name` in the file."""

    name: str
    info: TensorInfo
    piece: Piece
    scales: TensorInfo | None
    """The file's scales of a tensor in FP8."""
    scale_piece: Piece | None
    """Where the scales go if the weight is held in FP8 here."""


@dataclass(frozen=True)
class Match:
    """All that is to be read, and the units that will be held in FP8."""

    jobs: list[Job]
    quantized: frozenset[str]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Of a large checkpoint's hundreds of thousands of small objects all live on; looking for garbage among them again
    and again would take longer than making them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collection()
def match(path: Path, config: ModelConfig, with_mtp: bool = False, quantization: Quantization = "auto") -> Match:
    """Raises ValueError naming file, tensor, what is expected and what was found, and the way out."""
    found = _common_names(read_headers(path))
    scales = {name: found.pop(name) for name in list(found) if name.endswith(SCALE)}
    mtp = {name for name in found if name.startswith("mtp.")}
    pieces = _pick_forms(model_choices(config), set(found))
    extra = _pick_forms(mtp_choices(config), mtp) if mtp or with_mtp else {}
    pieces, aside = (pieces | extra, {}) if with_mtp else (pieces, extra)
    missing = [name for name in pieces if name not in found]
    surplus = [name for name in found if name not in pieces and name not in aside]
    if missing or surplus:
        raise ValueError(_mismatch(path, config, missing, surplus))
    _check_scales(found, scales)
    quantized, scale_pieces = _choose(pieces, found, quantization)
    pieces |= _pick_forms(quantized_choices(config, quantized), set(found))
    jobs = []
    for name, piece in (pieces | aside).items():
        original, info = found[name]
        _check_tensor(original, info, piece, scales.get(name + SCALE))
        if name in pieces:
            its_scales = scales[name + SCALE][1] if name + SCALE in scales else None
            jobs.append(Job(original, info, piece, its_scales, scale_pieces.get(name)))
    if mtp and not with_mtp:
        mtp |= {name for name in scales if name.startswith("mtp.")}
        families = sorted({re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in mtp})
        logger.info("set aside %d tensors of the MTP layer: %s", len(mtp), ", ".join(families))
    return Match(jobs, quantized)


def all_units(config: ModelConfig, with_mtp: bool) -> frozenset[str]:
    """What `fp8` quantises in a model of this config. Raises ValueError when scale blocks would straddle parts."""
    choices = [*model_choices(config), *(mtp_choices(config) if with_mtp else ())]
    return _choose(_pick_forms(choices, set()), {}, "fp8")[0]


def _common_names(headers: dict[str, TensorInfo]) -> Found:
    """Siblings keep the text model under `model.language_model.`."""
    found: Found = {}
    for original, info in headers.items():
        is_nested = original.startswith("model.language_model.")
        name = original.replace("language_model.", "", 1) if is_nested else original
        if name in found:
            raise ValueError(f"tensors {found[name][0]} and {original} are the same weight; remove one of the two")
        found[name] = (original, info)
    return found


def _pick_forms(choices: Iterable[Choice], names: set[str]) -> Form:
    """Of each choice the form that most of the names belong to, the published one where none does."""
    picked: Form = {}
    for forms in choices:
        form = forms[0] if len(forms) == 1 else max(forms, key=lambda form: len(names.intersection(form)))
        picked |= form
    return picked


def _mismatch(path: Path, config: ModelConfig, missing: list[str], surplus: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors that its config.json asks for: {_some(missing)}")
    if surplus:
        parts.append(f"has {len(surplus)} tensors that its config.json has no place for: {_some(surplus)}")
    if "lm_head.weight" in surplus and config.tied:
        parts.append("tie_word_embeddings is true, which leaves no place for lm_head.weight: set it to false")
    if any(name.endswith(("_scale", "_scales", "qweight", "qzeros", "_packed", "g_idx")) for name in surplus):
        parts.append(f"of quantised checkpoints only block FP8 (tensors *{SCALE}) is supported")
    return f"{path} {'; '.join(parts)}; download it again, or correct config.json"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _check_scales(found: Found, scales: Found) -> None:
    """Every tensor of scales belongs to a tensor in FP8."""
    for name, (original, info) in scales.items():
        weight = found.get(name.removesuffix(SCALE))
        if weight is None or weight[1].dtype != FP8:
            there = f"{weight[0]} is {weight[1].dtype}" if weight else "there is no tensor that it belongs to"
            raise ValueError(
                f"{info.file}: tensor {original} holds scales of a weight in {FP8}, but {there}; download it again"
            )


def _choose(pieces: Form, found: Found, quantization: Quantization) -> tuple[frozenset[str], Form]:
    """The units that will be held in FP8, and where the scales of their tensors go."""
    if quantization == "none" or (quantization == "auto" and all(info.dtype != FP8 for _, info in found.values())):
        return frozenset(), {}
    units: dict[str, list[str]] = {}
    straddling: dict[str, str] = {}
    scale_pieces: Form = {}
    for name, piece in pieces.items():
        if piece.unit:
            units.setdefault(piece.unit, []).append(name)
            if (scale_piece := scales_of(piece)) is None:
                straddling[piece.unit] = name
            else:
                scale_pieces[name] = scale_piece
    if quantization == "fp8":
        for unit, name in straddling.items():
            raise ValueError(
                f"quantization is fp8, but in {name} a scale's block of 128 rows would reach over two parts of the "
                f"weight: {unit} has heads or widths that are no multiple of 128; take auto or none"
            )
        return frozenset(units), scale_pieces
    chosen = set()
    for unit, names in units.items():
        num_fp8 = sum(found[name][1].dtype == FP8 for name in names)
        if num_fp8 == len(names) and unit not in straddling:
            chosen.add(unit)
        elif num_fp8:
            some = f"only {num_fp8} of its {len(names)} tensors are in it"
            why = some if num_fp8 < len(names) else f"parts of {straddling[unit]} share scales"
            logger.warning("%s is not kept in FP8, but loaded in the model's dtype: %s", unit, why)
    return frozenset(chosen), {n: piece for n, piece in scale_pieces.items() if pieces[n].unit in chosen}


def _check_tensor(name: str, info: TensorInfo, piece: Piece, scales: tuple[str, TensorInfo] | None) -> None:
    if info.dtype == FP8 and scales is None:
        raise ValueError(
            f"{info.file}: tensor {name} is {FP8} and its scales, {name}{SCALE}, are missing; download it again, or "
            "take the bfloat16 checkpoint"
        )
    _check_header(name, info, piece.shape, {**SIZES, FP8: 1})
    if scales is not None:
        _check_header(*scales, scale_shape(piece.shape), SIZES)


def _check_header(name: str, info: TensorInfo, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if info.shape != shape:
        raise ValueError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {list(shape)} by config.json; "
            "download both again"
        )
    if info.dtype not in sizes:
        raise ValueError(
            f"{info.file}: tensor {name} is {info.dtype}, expected one of {', '.join(sizes)}; take the bfloat16 "
            f"checkpoint, or one in block FP8 ({FP8} with tensors *{SCALE})"
        )
    if info.nbytes != math.prod(shape) * sizes[info.dtype]:
        raise ValueError(
            f"{info.file} cannot be read: tensor {name} of shape {list(shape)} in {info.dtype} has {info.nbytes} "
            "bytes; download it again"
        )
