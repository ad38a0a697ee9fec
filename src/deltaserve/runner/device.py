"""What the machine offers: the device, the dtype that suits it, and the memory that is free.

Knows nothing of models beyond the dtype a checkpoint was saved in.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

THREAD_BYTES = 64 << 20
"""Weights that give one CPU thread enough to do between two ops."""

GPU = torch.device("cuda", 0)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one. Raises ValueError when a GPU is asked for and there is none."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return GPU
    if name == "auto":
        return torch.device("cpu")
    raise ValueError(f"device is {name}, but this machine has no GPU that torch {torch.__version__} can use; take cpu")


def choose_dtype(name: str, device: torch.device, checkpoint_dtype: str, is_here: bool = True) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU and float32 on a CPU, whose units compute nothing faster in less.

    Raises ValueError for a dtype that the GPU has no arithmetic for; nobody is asked of a GPU that is not here.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint_dtype
    is_gpu = device.type == "cuda" and is_here
    if name == "bfloat16" and is_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"dtype is bfloat16, which {torch.cuda.get_device_name(device)} cannot compute; take float16")
    return _DTYPES[name]


def choose_threads(chosen: int | None, weights: int) -> int:
    """CPU threads for a model of so many bytes of weights: the chosen number, else one for every `THREAD_BYTES`.

    Threads share each op and wait for one another at its end. A small model's ops are too short for that: on cores that
    others use too, one thread is ten times as fast as two.
    """
    return chosen or max(1, min(torch.get_num_threads(), weights // THREAD_BYTES))


def state_dtype(name: str) -> torch.dtype:
    """The dtype of the recurrent matrices."""
    return _DTYPES[name]


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on the device, at most."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    machine = int(psutil.virtual_memory().available)
    group = cgroup_free_memory()
    return machine if group is None else min(machine, group)


def cgroup_free_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes left below the tightest memory limit of this process's control groups (v2, then v1); None without one."""
    v2, v1 = "", ""
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    found = [
        *_room(root, v2, "memory.max", "memory.current", "inactive_file"),
        *_room(root / "memory", v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    return min(found, default=None)


def _room(root: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """What each group from `path` up to the root leaves. File cache that the kernel can drop counts as free."""
    group = root / path.strip("/")
    rooms = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit is None or usage is None or not limit.strip().isdigit():
            continue
        stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
        rooms.append(max(0, int(limit) - int(usage) + int(stat.get(cache_name, 0))))
    return rooms


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
