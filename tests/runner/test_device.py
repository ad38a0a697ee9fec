"""Device and dtype by name, and the memory that a container's limits leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from deltaserve.runner.device import (
    THREAD_BYTES,
    cgroup_free_memory,
    choose_device,
    choose_dtype,
    choose_threads,
    free_memory,
    state_dtype,
)

CPU = torch.device("cpu")


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_on_a_gpu() -> None:
    assert choose_dtype("auto", CPU, "bfloat16") == torch.float32
    assert choose_dtype("auto", torch.device("cuda"), "float16") == torch.float16
    assert choose_dtype("bfloat16", CPU, "float32") == torch.bfloat16
    assert choose_dtype("float64", CPU, "bfloat16") == torch.float64
    assert state_dtype("float32") == torch.float32


def test_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device is cuda.*no GPU.*take cpu"):
        choose_device("cuda")


def test_gpu_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == CPU


def test_bfloat16_that_a_gpu_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old Card")
    with pytest.raises(ValueError, match=r"bfloat16.*Old Card.*take float16"):
        choose_dtype("auto", torch.device("cuda"), "bfloat16")
    assert choose_dtype("auto", torch.device("cuda"), "bfloat16", is_here=False) == torch.bfloat16


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".", 1)).write_text(str(content))


def test_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    root = tmp_path / "fs"
    write(root / "outer" / "inner", memory__max=1000, memory__current=300, memory__stat="anon 200\ninactive_file 50")
    assert cgroup_free_memory(root, own) == 750
    write(root / "outer", memory__max=900, memory__current=700)
    assert cgroup_free_memory(root, own) == 200
    write(root / "outer", memory__max="max", memory__current=700)
    assert cgroup_free_memory(root, own) == 750


def test_older_cgroups_are_read_too(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,cpuacct:/x\n7:memory:/box\n")
    write(tmp_path / "fs" / "memory" / "box", memory__limit_in_bytes=5000, memory__usage_in_bytes=6000)
    assert cgroup_free_memory(tmp_path / "fs", own) == 0


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_free_memory(tmp_path, tmp_path / "none") is None
    assert 0 < free_memory(CPU) <= psutil.virtual_memory().total


def test_threads_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert choose_threads(None, 10 << 20) == 1
    assert choose_threads(None, 3 * THREAD_BYTES) == 3
    assert choose_threads(None, 1000 * THREAD_BYTES) == 8, "no more than torch would take"
    assert choose_threads(5, 1) == 5, "the user's choice goes first"
