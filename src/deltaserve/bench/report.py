"""What a measurement prints: a table for people, JSON lines for machines, and where it was taken."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltaserve

if TYPE_CHECKING:
    import torch

Row = Mapping[str, Any]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the software that a figure of a device belongs to."""
    import torch

    found = {**machine(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cpu":
        return found | {"threads": torch.get_num_threads()}
    import triton

    return found | {
        "card": torch.cuda.get_device_name(device),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
        "runtime": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
    }


def machine() -> dict[str, Any]:
    """Where a program runs that needs no device."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "deltaserve": deltaserve.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "command": re.sub(r"(--api-key[ =])\S+", r"\1***", " ".join(sys.argv)),
    }


def table(rows: Sequence[Row]) -> str:
    """Columns of the first row's keys, aligned."""
    if not rows:
        return "nothing was measured"
    names = list(rows[0])
    lines = [names, *([told(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    aligned = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(aligned)


def told(value: Any) -> str:
    """A cell of a table."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def write(rows: Sequence[Row], kind: str, where: Mapping[str, Any], path: Path | None) -> None:
    """Print the table; append one JSON object per row, the environment in each, to `path` if there is one."""
    print(table(rows), flush=True)
    append(rows, kind, where, path)


def output(name: str | Path | None) -> Path | None:
    """The file for `append`, made if it is not there. Raises OSError now rather than when all is measured."""
    if name is None:
        return None
    path = Path(name)
    path.open("a").close()
    return path


def append(rows: Sequence[Row], kind: str, where: Mapping[str, Any], path: Path | None) -> None:
    """The second half of `write`."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"bench": kind, **row, "environment": dict(where)}) + "\n")
