"""The pass over chunks by warps with roles on a Hopper GPU, against float64 and against the pass that is chosen.

python -m tests.ops.gpu.pass_on_hopper
"""

from __future__ import annotations

import sys

import torch

from deltaserve.ops.gated_delta import triton_chunk
from deltaserve.ops.gated_delta.triton_chunk import HopperConfig
from tests.ops.gated_delta_nets import Net, Rows, Shape, check, chunk_rows, relative

BIG = Shape(16, 2, 128, 128)
ROWS = [([tokens], [0]) for tokens in (1, 63, 64, 65, 128, 1000)]
ROWS += [([1, 63, 64, 65, 200, 300], [0, 1, 64, 70, 0, 127]), ([4000, 3], [35, 0])]


def run(rows: Rows, state_dtype: torch.dtype) -> float:
    """How far its outputs are from those of the pass that is chosen. Raises AssertionError where they, states or
    anything else are not what float64 says."""
    net = Net.random(BIG, rows, torch.bfloat16, state_dtype, "cuda")
    before, chosen = net.copy("cuda"), net.copy("cuda")
    expected = chosen.run()
    triton_chunk.HOPPER, kept = HopperConfig(), triton_chunk.HOPPER
    try:
        out = net.run()
    finally:
        triton_chunk.HOPPER = kept
    check(net, out, before, 1e-2, 1e-2)
    return relative(out, expected)


def main() -> int:
    torch.manual_seed(0)
    for lengths, starts in ROWS:
        for state_dtype in (torch.float32, torch.bfloat16):
            difference = run(chunk_rows(lengths, starts), state_dtype)
            assert difference < 5e-3, f"{difference} from the other pass"
            print(lengths, starts, state_dtype, f"{difference:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
