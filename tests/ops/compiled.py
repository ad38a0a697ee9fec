"""Compiles a kernel for GPUs that are not there, and says what it takes of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER, AMPERE, CDNA3 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)
TARGETS = {"sm_90": HOPPER, "sm_80": AMPERE, "gfx942": CDNA3}


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel. AMD: vector registers and spilled vector registers of one lane."""

    registers: int
    spilled: int
    """Bytes of the stack frame on NVIDIA, registers on AMD."""
    shared: int
    """Bytes."""
    assembly: str
    """PTX, or AMD's."""
    cubin: bytes = b""
    """Of NVIDIA's."""


def compile_for(
    target: GPUTarget,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Resources:
    """`signature`: argument name -> Triton type ("*bf16", "i32", "fp32"; a constexpr's name is in `constants`)."""
    whole = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    # What a launch would find out: pointers, and sizes where the caller says so, are divisible by 16.
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, kind in whole.items() if kind[0] == "*"
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, whole, dict(constants), attributes)
    found = triton.compile(
        source, target=target, options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    )
    shared = int(found.metadata.shared)
    if target.backend == "hip":
        text = found.asm["amdgcn"]
        return Resources(
            _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.vgpr_spill_count:\s+(\d+)", text), shared, text
        )
    cubin = found.asm["cubin"]
    usage = _told("cuobjdump", "--dump-resource-usage", cubin)
    return Resources(_number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), shared, found.asm["ptx"], cubin)


def instructions(found: Resources) -> str:
    """NVIDIA's machine code as text."""
    return _told("nvdisasm", "--print-code", found.cubin)


def innermost_loops(code: str) -> list[str]:
    """Of `instructions`: from a label to the branch back to it, without other such branches inside."""
    lines = code.splitlines()
    labels = {found.group(1): at for at, line in enumerate(lines) if (found := re.match(r"(\.L_\w+):", line))}
    jumps = [(at, found.group(1)) for at, line in enumerate(lines) if (found := re.search(r"BRA.*\((\.L_\w+)\)", line))]
    backward = [(labels[label], at) for at, label in jumps if labels.get(label, at) < at]
    inner = [(a, b) for a, b in backward if not any(a <= c and d < b for c, d in backward if (c, d) != (a, b))]
    return ["\n".join(lines[first : last + 1]) for first, last in inner]


def _told(tool: str, flag: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, flag, file.name], check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text[:300]}"
    return int(found.group(1))
