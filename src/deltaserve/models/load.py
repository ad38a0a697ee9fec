"""Fills a model from a checkpoint folder, strict both ways: every tensor is used once, every weight written once.

All is judged from the headers before a byte of a tensor is read. Knows no request and no cache.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from deltaserve.model_config import ModelConfig
from deltaserve.models.checkpoint import TensorInfo, checkpoint_tensors, read_headers
from deltaserve.models.hub import resolve
from deltaserve.models.names import Choice, Form, Piece, model_choices, mtp_choices
from deltaserve.models.qwen3_next import Qwen3Next

__all__ = ["checkpoint_tensors", "empty_model", "has_mtp", "load_model", "plan_loading", "resolve"]

DTYPES = ("F32", "BF16", "F16")
BATCH_BYTES = 64 << 20
"""What one thread reads before it takes more work."""
MAX_THREADS = 8
MAX_NAMED = 6
"""Names told in one message."""


@dataclass(frozen=True)
class Job:
    """One tensor to read: `name` in the file."""

    name: str
    info: TensorInfo
    piece: Piece


def has_mtp(path: Path) -> bool:
    """Whether the checkpoint folder holds an MTP layer: no config.json says so. Raises ValueError as `read_headers`."""
    return any(name.startswith("mtp.") for name in read_headers(path))


def empty_model(config: ModelConfig, dtype: torch.dtype, with_mtp: bool = False) -> Qwen3Next:
    """The model's shapes and dtypes, as `load_model` would fill them; nothing is allocated."""
    return Qwen3Next(config, dtype, torch.device("meta"), with_mtp)


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    with_mtp: bool = False,
) -> Qwen3Next:
    """The model of the checkpoint folder `path`, its weights in `dtype` on `device`; norms and decays stay in float32.
    Its MTP layer is loaded if asked for, and set aside otherwise.

    Raises ValueError naming file, tensor, what is expected and what was found, and the way out.
    """
    jobs = plan_loading(path, config, with_mtp)
    model = Qwen3Next(config, dtype, device, with_mtp)
    _fill(model, jobs, progress)
    return model.eval()


def plan_loading(path: Path, config: ModelConfig, with_mtp: bool = False) -> list[Job]:
    """Match the checkpoint's headers with the table of names. Raises ValueError as `load_model`; reads no tensor."""
    found = _common_names(read_headers(path))
    mtp = {name for name in found if name.startswith("mtp.")}
    pieces = _pick_forms(model_choices(config), set(found))
    extra = _pick_forms(mtp_choices(config), mtp) if mtp or with_mtp else {}
    pieces, aside = (pieces | extra, {}) if with_mtp else (pieces, extra)
    missing = [name for name in pieces if name not in found]
    surplus = [name for name in found if name not in pieces and name not in aside]
    if missing or surplus:
        raise ValueError(_mismatch(path, config, missing, surplus))
    jobs = [Job(original, info, pieces[name]) for name, (original, info) in found.items() if name in pieces]
    for job in jobs:
        _check_tensor(job.name, job.info, job.piece)
    for name in aside:
        if name in mtp:
            _check_tensor(name, found[name][1], aside[name])
    if mtp and not with_mtp:
        families = sorted({re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in mtp})
        logging.getLogger(__name__).info("set aside %d tensors of the MTP layer: %s", len(mtp), ", ".join(families))
    return jobs


def _common_names(headers: dict[str, TensorInfo]) -> dict[str, tuple[str, TensorInfo]]:
    """Published name -> (name in the file, header): siblings keep the text model under `model.language_model.`."""
    found: dict[str, tuple[str, TensorInfo]] = {}
    for original, info in headers.items():
        name = re.sub(r"^model\.language_model\.", "model.", original)
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
    if any(name.endswith(("_scale_inv", "_scale", "qweight", "qzeros")) for name in surplus):
        parts.append("quantised checkpoints are not supported yet: take the bfloat16 one")
    return f"{path} {'; '.join(parts)}; download it again, or correct config.json"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _check_tensor(name: str, info: TensorInfo, piece: Piece) -> None:
    if info.shape != piece.shape:
        raise ValueError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {list(piece.shape)} by config.json; "
            "download both again"
        )
    if info.dtype not in DTYPES:
        raise ValueError(
            f"{info.file}: tensor {name} is {info.dtype}, expected one of {', '.join(DTYPES)}; "
            "quantised checkpoints are not supported yet: take the bfloat16 one"
        )


def _fill(model: Qwen3Next, jobs: list[Job], progress: bool) -> None:
    parameters = dict(model.named_parameters())
    written = dict.fromkeys(parameters, 0)
    for job in jobs:
        written[job.piece.parameter] += parameters[job.piece.parameter][job.piece.index].numel()
    for name, count in written.items():
        assert count == parameters[name].numel(), f"the table of names fills {count} numbers of {name}"
    total = sum(job.info.nbytes for job in jobs)
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        try:
            for nbytes in pool.map(lambda batch: _fill_batch(parameters, batch), _batches(jobs)):
                bar.update(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _batches(jobs: list[Job]) -> Iterator[list[Job]]:
    """The jobs in the files' order, cut into batches of one file and about BATCH_BYTES."""
    batch: list[Job] = []
    size = 0
    for job in sorted(jobs, key=lambda job: (job.info.file, job.info.start)):
        if batch and (job.info.file != batch[0].info.file or size + job.info.nbytes > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job.info.nbytes
    if batch:
        yield batch


@torch.inference_mode()
def _fill_batch(parameters: dict[str, torch.nn.Parameter], batch: list[Job]) -> int:
    file = batch[0].info.file
    try:
        with safe_open(file, framework="pt") as tensors:
            for job in batch:
                _place(parameters[job.piece.parameter], tensors.get_tensor(job.name), job.piece)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    return sum(job.info.nbytes for job in batch)


def _place(parameter: Tensor, source: Tensor, piece: Piece) -> None:
    target = parameter[piece.index]
    if piece.order is not None:
        source = source.index_select(0, piece.order)
    if piece.plus_one:
        source = source.to(target.dtype) + 1
    target.copy_(source.reshape(target.shape))
