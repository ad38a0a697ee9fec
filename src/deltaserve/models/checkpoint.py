"""The files of a checkpoint and the headers of their tensors. Reads no tensor, and knows no model.

The safetensors format: 8 bytes header length (little-endian), a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes; the safetensors library's own limit."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header states it; `dtype` in safetensors' words (F32, BF16, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    nbytes: int


def checkpoint_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor in the checkpoint folder `path`, from the headers alone.

    Raises ValueError as `read_headers`.
    """
    return {name: (info.dtype, info.shape) for name, info in read_headers(path).items()}


def tensor_names(path: Path) -> Collection[str]:
    """Of the checkpoint folder `path`. Raises ValueError as `read_headers`."""
    weight_map = _read_index(path) if path.is_dir() else None
    return read_headers(path) if weight_map is None else weight_map


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint folder `path` by name.

    Raises ValueError naming the file and the fault: no checkpoint, a broken or contradictory index, a missing,
    truncated or unreadable file, a tensor in two files.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the folder of a checkpoint")
    weight_map = _read_index(path)
    files = [path / SINGLE] if weight_map is None else [path / name for name in sorted(set(weight_map.values()))]
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_header(file):
            if name in tensors:
                raise ValueError(f"tensor {name} is in {tensors[name].file} and in {file}; remove one of the two")
            tensors[name] = info
    if weight_map is not None:
        _check_index(path / INDEX, weight_map, tensors)
    return tensors


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a sharded checkpoint; None for a single file."""
    single, index = path / SINGLE, path / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{path} has both {SINGLE} and {INDEX}; remove the one that is not meant")
    if single.is_file():
        return None
    if not index.is_file():
        others = sorted({file.suffix for file in path.iterdir() if file.suffix in (".bin", ".gguf", ".pt", ".pth")})
        found = f"; it has {', '.join(others)} files, which are not read: convert them" if others else ""
        raise ValueError(f"{path} has neither {SINGLE} nor {INDEX}{found}; give the folder of a checkpoint")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index with a weight_map ({error!r}); download it again") from error
    for name, file in names:
        if Path(file).name != file or not (path / file).is_file():
            raise ValueError(f"{index} says that tensor {name} is in {file!r}, which is not there; download it again")
    return dict(names)


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{index} says that {file} holds tensor {name}, but it does not; download both again")
    for name, info in tensors.items():
        if name not in weight_map:
            raise ValueError(f"{info.file} holds tensor {name}, of which {index} says nothing; download both again")


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(min(length, MAX_HEADER))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); check its permissions, or download it again") from error
    if size < 8 or len(header) < length:
        raise ValueError(f"{file} is truncated or no safetensors file: {size} bytes; download it again")
    first = 8 + length
    try:
        entries: dict[str, Any] = msgspec.json.decode(header)  # json takes seconds for 150,000 tensors
        entries.pop("__metadata__", None)
        tensors = [(name, _tensor_info(file, first, entry)) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a broken header ({error!r}); download it again") from error
    end = max((info.start + info.nbytes for _, info in tensors), default=first)
    if size != end:
        state = "truncated" if size < end else "too long"
        raise ValueError(f"{file} is {state}: {size} bytes, its header promises {end}; download it again")
    yield from tensors


def _tensor_info(file: Path, first: int, entry: dict[str, Any]) -> TensorInfo:
    start, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {start} to {end}")
    return TensorInfo(
        file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), first + start, end - start
    )
