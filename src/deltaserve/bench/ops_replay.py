"""Two ways to compute tokens that may turn out wrong in the gated delta net, at the 80B model's shapes: keep the state
after each token that may become the last true one, or keep one state and the inputs of the tokens behind it, which the
next step computes again.

The engine does the first. The second moves fewer bytes where rows are many, and computes up to twice as many tokens: a
row begins with those of the step before that became the truth, keeps the state after the last of them, and goes on
with its own. It is timed with the kernel that there is, given longer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from deltaserve.bench.ops import Case
from deltaserve.bench.ops_gated_delta import CHANNELS, HIDDEN_PARTS, L2_BYTES, STATE, V_HEADS, VALUES, WIDTH, layer
from deltaserve.ops.layout import Layout


def keeping_all(rows: int, length: int, device: str = "cuda") -> Layout:
    """Each row reads its first slot and keeps a state after each of its tokens."""
    slots = [list(range(row * length, (row + 1) * length)) for row in range(rows)]
    return _layout(rows, length, [own[0] for own in slots], slots, device)


def replaying(rows: int, again: int, length: int, device: str = "cuda") -> Layout:
    """Each row has one slot, keeps the state after the first `again` tokens in place, and none behind them."""
    write = [[-1] * (again - 1) + [row] + [-1] * length for row in range(rows)]
    return _layout(rows, again + length, range(rows), write, device)


def _layout(rows: int, length: int, read: Sequence[int], write: Sequence[Sequence[int]], device: str) -> Layout:
    starts = [7] * rows
    return Layout.from_rows(
        [length] * rows, num_step=rows, starts=starts, read_slots=read, write_slots=write, device=device
    )


def calls(make_layout: Callable[[], Layout], slots: int) -> Sequence[Callable[[], object]]:
    from deltaserve.ops.gated_delta import triton_step

    layout = make_layout()
    sets = [layer(layout, slots, torch.float32) for _ in range(max(2, -(-2 * L2_BYTES // (slots * STATE * 4))))]
    for arguments in sets:
        arguments["z_TVD"] = arguments.pop("z_TX").unflatten(1, (V_HEADS, WIDTH))
        arguments["out_TVD"] = torch.empty_like(arguments["z_TVD"]).contiguous()
    return [partial(triton_step.step, **arguments, segment=layout.segments[0]) for arguments in sets]


def moved(rows: int, states: int, tokens: int) -> float:
    """Bytes of a step whose rows move so many states with their windows, and compute so many tokens."""
    return rows * (states * (STATE * 4 + 3 * CHANNELS * 2) + tokens * 2.0 * (HIDDEN_PARTS + VALUES))


def cases() -> list[Case]:
    """At 128 rows. Replayed are as many tokens as a step can gain, and one, the fewest."""
    rows, found = 128, []
    for length in (2, 4):
        name = f"gdn guesses B={rows} L={length}"
        call = partial(calls, partial(keeping_all, rows, length), rows * length)
        found.append(Case(f"{name} keeps all", call, moved(rows, 1 + length, length)))
        for again in (1, length):
            call = partial(calls, partial(replaying, rows, again, length), rows)
            found.append(Case(f"{name} replays {again}", call, moved(rows, 2, again + length)))
    return found
