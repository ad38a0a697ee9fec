"""Kernels that start before the one before them has ended (programmatic dependent launch). Knows no op.

Hopper and later; elsewhere, and where `EARLY` is false, kernels follow each other. The hardware's rules: a marked
kernel may start once every program of the kernel before it has called `let_next_start` or ended; `wait_for_inputs`
returns once the kernel before it has ended, and what that wrote can be read. A launch that is not marked (torch's own)
starts when all before it have ended.

Rules of every marked kernel:

1. Every program waits, on every path, before it ends: so a kernel that has ended means that all before it have, too.
2. Nothing is written before the wait: memory may still be read by kernels before it, or be theirs to write.
3. Before the wait a kernel reads only what no kernel of the running chain writes: weights, and what a forward pass is
   given (places of states, positions, block tables, contexts). Unmarked launches wrote these, and an unmarked launch,
   of the embedding, stands between them and the first marked one: what the very last launch wrote is not seen yet.
4. More may be read where the kernel before it calls `let_next_start` after its own wait: then all but that one have
   ended. That is stated where it is used.

What each kernel reads before its wait, and why it may:

| kernel           | starts the next | reads before the wait                                         |
|------------------|-----------------|---------------------------------------------------------------|
| norm             | at once         | its weight                                                    |
| gemv             | at once         | the weight, up to 4,096 wide                                  |
| gemm             | at once         | nothing; of 5 to 64 tokens it has its weight brought near, or |
|                  |                 | holds blocks of it                                            |
| gated delta step | at once         | taps, states and windows; a pass writes this layer's once,    |
|                  |                 | here, and between passes there are unmarked launches          |
| entry            | at once         | positions, where entries go                                   |
| attention step   | at once         | contexts; not the pool, since `entry` has just written to it  |
| attention join   | at once         | contexts; of tiles also where rows begin                      |
| pairs' gate_up   | after its wait  | the shared expert; of others it needs the ids of `route`      |
| pairs' down      | at once         | ids and weights of `route`, ended by rule 4, and the experts  |
| groups' gate_up  | after its wait  | nothing                                                       |
| all others       | at once         | nothing                                                       |
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from deltaserve.ops.gpu import properties

MAX_TOKENS = 256
"""Tokens up to which kernels whose caller does not say start early: beyond, one that waits takes a multiprocessor's
memory from one that computes."""


def early_options(device: torch.device, early: bool | None = None, tokens: int = 0) -> dict[str, Any]:
    """Arguments of a launch for so many tokens: EARLY, and the launch attribute that goes with it."""
    if (tokens <= MAX_TOKENS if early is None else early) and properties(device).is_hopper:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Until all kernels before this one have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def bring_near(ptrs):
    """Asks for the lines of 128 bytes that these point into, to be in the L2 cache later. NVIDIA's instruction."""
    to: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(to, "=r,l", [ptrs.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The next kernel may start once all programs of this one have come here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
