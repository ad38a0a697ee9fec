"""The headers of a checkpoint are read without its tensors, and every broken file is named with its fault."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaserve.models.checkpoint import INDEX, SINGLE, checkpoint_tensors
from tests.models.factory import BUILTIN, tensor_shapes, tiny_config, write_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
def test_names_dtypes_and_shapes(tmp_path: Path, shards: int) -> None:
    folder = write_checkpoint(tmp_path, shards=shards, mtp=True)
    expected = {name: ("F32", shape) for name, shape in tensor_shapes(tiny_config(), mtp=True)}
    assert checkpoint_tensors(folder) == expected


def test_the_builtin_checkpoint() -> None:
    tensors = checkpoint_tensors(BUILTIN)
    assert tensors["model.embed_tokens.weight"] == ("BF16", (2048, 192))
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"}


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


SHARD = "model-00001-of-00002.safetensors"

FAULTS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "no folder": (1, shutil.rmtree, "is not a folder"),
    "no weights": (1, lambda f: (f / SINGLE).unlink(), f"has neither {SINGLE} nor {INDEX}; give the folder"),
    "other weights": (
        1,
        lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"),
        "it has .bin files, which are not read: convert them",
    ),
    "single and index": (2, lambda f: (f / SHARD).rename(f / SINGLE), "has both model.safetensors and model.safetens"),
    "empty file": (1, lambda f: truncate(f / SINGLE, 0), f"{SINGLE} is truncated or no safetensors file: 0 bytes"),
    "cut in the length": (1, lambda f: truncate(f / SINGLE, 5), "is truncated or no safetensors file: 5 bytes"),
    "cut in the header": (1, lambda f: truncate(f / SINGLE, 100), "is truncated or no safetensors file: 100 bytes"),
    "cut in the data": (1, lambda f: truncate(f / SINGLE, 99_999), "is truncated: 99999 bytes, its header promises"),
    "data after the end": (
        1,
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"x"),
        "is too long: .* its header promises",
    ),
    "not safetensors": (1, lambda f: (f / SINGLE).write_bytes(b"<html>" * 99), "is truncated or no safetensors file"),
    "bad header JSON": (
        1,
        lambda f: (f / SINGLE).write_bytes((4).to_bytes(8, "little") + b"{{{{"),
        "has a broken header .*download it again",
    ),
    "header not an object": (
        1,
        lambda f: (f / SINGLE).write_bytes((4).to_bytes(8, "little") + b"[17]"),
        "has a broken header",
    ),
    "header without offsets": (
        1,
        lambda f: (f / SINGLE).write_bytes((24).to_bytes(8, "little") + b'{"a":{"dtype":"F32"   }}'),
        "has a broken header .*data_offsets",
    ),
    "index not JSON": (2, lambda f: (f / INDEX).write_text("{"), f"{INDEX} is not an index with a weight_map"),
    "index without map": (2, lambda f: (f / INDEX).write_text("{}"), "is not an index with a weight_map"),
    "index with a list": (2, lambda f: (f / INDEX).write_text('{"weight_map": [1]}'), "is not an index with a weight"),
    "missing shard": (
        2,
        lambda f: (f / SHARD).unlink(),
        f"{INDEX} says that tensor .* is in '{SHARD}', which is not there; download it again",
    ),
    "shard outside": (
        2,
        lambda f: rewrite_index(f, lambda m: m.update({"x": "../x.safetensors"})),
        "tensor x is in '../x.safetensors', which is not there",
    ),
    "tensor not in its shard": (
        2,
        lambda f: rewrite_index(f, lambda m: m.update({"x.weight": SHARD})),
        f"says that {SHARD} holds tensor x.weight, but it does not; download both again",
    ),
    "tensor not in the index": (
        2,
        lambda f: rewrite_index(f, lambda m: m.pop("lm_head.weight")),
        "holds tensor lm_head.weight, of which .* says nothing; download both again",
    ),
    "tensor in two shards": (
        2,
        lambda f: (f / "model-00002-of-00002.safetensors").write_bytes((f / SHARD).read_bytes()),
        "tensor .* is in .*00001-of-00002.safetensors and in .*00002-of-00002.safetensors; remove one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file(tmp_path: Path, fault: str) -> None:
    shards, break_it, message = FAULTS[fault]
    folder = write_checkpoint(tmp_path / "checkpoint", shards=shards)
    checkpoint_tensors(folder)
    break_it(folder)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint_tensors(folder)
    assert re.search(re.escape(str(folder)), str(caught.value))


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=f"{SINGLE} cannot be read .*check its permissions"):
        checkpoint_tensors(folder)
