"""Kernels are kept on the disk, are compiled anew when what they are made of changes, and need no disk."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.ops import numba_kernel
from deltaserve.ops.numba_kernel import KernelCache, kernel, source_stamp

SOURCE = """
from deltaserve.ops.numba_kernel import kernel
from deltaserve.ops.numba_lanes import read_float, write_float

@kernel(2, 1)
def scale(x, y, factor):
    write_float(y, read_float(x) * factor)
"""
PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
sys.path.insert(0, {folder!r})
from scaling import scale
x, y = torch.tensor([3.0]), torch.zeros(1)
scale(x.data_ptr(), y.data_ptr(), 2.0)
assert y.item() == 6
print(sum(scale.stats.cache_hits.values()), scale._cache.cache_path)
"""


def run(folder: Path) -> tuple[int, Path, str]:
    """In a process of its own: kernels that were found, where they are kept, what was said."""
    program = PROGRAM.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    hits, path = done.stdout.split()
    return int(hits), Path(path), done.stderr


def test_the_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    (tmp_path / "scaling.py").write_text(SOURCE)
    hits, path, said = run(tmp_path)
    assert (hits, path) == (0, tmp_path / "__pycache__")
    assert "compiling kernels" in said
    hits, _, said = run(tmp_path)
    assert hits == 1
    assert "compiling" not in said


def test_the_stamp_follows_every_file_that_kernels_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "op").mkdir()
    files = [tmp_path / "cpu.py", tmp_path / "numba_lanes.py", tmp_path / "op" / "numba_step.py"]
    for file in files:
        file.write_text("x = 1")
    stamps = {source_stamp(tmp_path)}
    for file in files:
        file.write_text("x = 2")
        stamps.add(source_stamp(tmp_path))
    (tmp_path / "op" / "reference.py").write_text("x = 3")
    stamps.add(source_stamp(tmp_path))
    assert len(stamps) == 4


def test_a_kernel_is_kept_under_the_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    for stamp in (b"one", b"one", b"two"):
        monkeypatch.setattr(numba_kernel, "_own_stamp", lambda stamp=stamp: stamp)
        made.append(compiled(tmp_path).stats.cache_hits.total())
    assert made == [0, 1, 0]


def compiled(folder: Path) -> Any:
    """A kernel from a file in that folder."""
    file = folder / "doubling.py"
    file.write_text("def double(x, y):\n    write_float(y, read_float(x) * read_float(x))\n")
    names: dict[str, Any] = {}
    exec("from deltaserve.ops.numba_lanes import read_float, write_float", names)
    exec(compile(file.read_text(), str(file), "exec"), names)
    return kernel(2)(names["double"])


def works(dispatcher: Any) -> bool:
    x, y = torch.tensor([3.0]), torch.zeros(1)
    dispatcher(x.data_ptr(), y.data_ptr())
    return y.item() == 9


def test_without_a_folder_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for locator in (numba_kernel._BesideSources, numba_kernel._OfUser):
        monkeypatch.setattr(locator, "from_function", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        dispatcher = compiled(tmp_path)
    assert works(dispatcher)
    assert "in each process" in caplog.text
    assert not list(tmp_path.rglob("*.nbi"))


def test_sources_that_cannot_be_written_leave_kernels_with_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numba_kernel._BesideSources, "from_function", lambda *_: None)
    monkeypatch.setattr(numba_kernel._OfUser, "get_cache_path", lambda _: str(tmp_path / "of the user"))
    (tmp_path / "sources").mkdir()
    dispatcher = compiled(tmp_path / "sources")
    assert works(dispatcher)
    assert list((tmp_path / "of the user").glob("doubling*.nbi"))
    assert not list((tmp_path / "sources").rglob("*.nbi"))


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("damage", [lambda old: old[: len(old) // 2], lambda old: bytes(len(old)), lambda old: b""])
def test_a_damaged_file_is_made_anew(kind: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "scaling.py").write_text(SOURCE)
    run(tmp_path)
    (file,) = tmp_path.rglob(kind)
    file.write_bytes(damage(file.read_bytes()))
    assert run(tmp_path)[0] == 0
    assert run(tmp_path)[0] == 1


@pytest.mark.parametrize("broken", ["_load_index", "_save_index", "_load_data", "_save_data"])
def test_a_disk_that_fails_is_no_error(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if broken.startswith("_load"):
        compiled(tmp_path)

    class Broken(KernelCache):
        def __init__(self, function: Any) -> None:
            super().__init__(function)

            def fail(*_: Any) -> None:
                raise PermissionError("no")

            setattr(self._cache_file, broken, fail)

    monkeypatch.setattr(numba_kernel, "KernelCache", Broken)
    with caplog.at_level(logging.WARNING):
        assert works(compiled(tmp_path))
    assert ("cannot be" in caplog.text) == (broken != "_load_data")
