"""The kernels of the gated delta net on a GPU, against float64."""

from __future__ import annotations

import warnings

import pytest
import torch

from deltaserve.ops.gated_delta.api import gated_delta_net
from tests.ops.gated_delta_nets import Net, Rows, Shape, check, chunk_rows, relative, step_rows, with_rows_behind

pytestmark = pytest.mark.gpu

BIG = Shape(16, 2, 128, 128)
SMALL = Shape(4, 2, 32, 32)
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]


def run_and_check(shape: Shape, rows: Rows, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    net = Net.random(shape, rows, dtype, state_dtype, "cuda")
    before = net.copy("cuda")
    out = net.run()
    assert out.dtype == dtype
    exact = 1e-5 if dtype == F32 and state_dtype == F32 else 1e-2
    check(net, out, before, exact, exact)


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
@pytest.mark.parametrize(
    ("rows", "length"),
    [(rows, 1) for rows in (1, 2, 63, 64, 65, 127, 128)] + [(rows, length) for rows in (2, 65) for length in (2, 4)],
)
def test_steps(rows: int, length: int, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    run_and_check(BIG, step_rows(rows, length), dtype, state_dtype)


@pytest.mark.parametrize("state_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [BIG, Shape(3, 1, 128, 128), Shape(2, 4, 128, 128)], ids=str)
def test_many_rows_of_one_token(shape: Shape, state_dtype: torch.dtype) -> None:
    """Some are padding and some have no state; programs have several rows, or fewer than there are programs."""
    for count in (64, 150):
        run_and_check(shape, step_rows(count, 1, padding=[1, 63], fresh=[2, 40]), BF16, state_dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SMALL, F32), (SMALL, BF16), (SMALL, torch.float16), (Shape(1, 4, 128, 128), BF16), (Shape(2, 2, 24, 20), F32)],
    ids=str,
)
def test_other_shapes(shape: Shape, dtype: torch.dtype) -> None:
    """Few, since each compiles its own kernels; the interpreter runs more."""
    run_and_check(shape, step_rows(5, 1, padding=[1, 4], fresh=[2]), dtype, F32)
    run_and_check(shape, step_rows(5, 9, padding=[1, 4], fresh=[2]), dtype, F32)
    run_and_check(shape, chunk_rows([1, 2, 3, 70], [63, 62, 5, 190]), dtype, F32)


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 1000])
def test_chunks(tokens: int, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    run_and_check(BIG, chunk_rows([tokens], [0]), dtype, state_dtype)
    run_and_check(BIG, chunk_rows([tokens, 3], [35, 0]), dtype, state_dtype)


def test_many_rows_of_chunks() -> None:
    run_and_check(BIG, chunk_rows([1, 63, 64, 65, 200, 300], [0, 1, 64, 70, 0, 127]), BF16, F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_without_tokens_behind_the_others(dtype: torch.dtype) -> None:
    """As in a graph that its prompts fill: such a row's first token would stand behind the last of all."""
    net = Net.random(BIG, chunk_rows([125, 3], [0, 70]), dtype, F32, "cuda")
    before, arguments = net.copy("cuda"), net.arguments()
    arguments["layout"] = with_rows_behind(arguments["layout"], 2)
    exact = 1e-5 if dtype == F32 else 1e-2
    check(net, gated_delta_net(**arguments)[0], before, exact, exact)


def test_steps_and_chunks_side_by_side() -> None:
    steps, chunks = step_rows(3, 2), chunk_rows([65, 1], [10, 0])
    shift = steps.num_slots
    moved = [[slot + shift if slot >= 0 else -1 for slot in slots] for slots in (chunks.read, *chunks.write)]
    rows = Rows(
        [*steps.lengths, *chunks.lengths],
        3,
        [*steps.starts, *chunks.starts],
        [*steps.read, *moved[0]],
        [*steps.write, *moved[1:]],
    )
    run_and_check(BIG, rows, BF16, F32)


def test_steps_equal_chunks() -> None:
    outputs, states = [], []
    rows = Rows([9], 1, [60], [1], [[-1] * 8 + [2]])
    net = Net.random(BIG, rows, BF16, F32, "cuda")
    for num_step in (0, 1):
        own = net.copy("cuda")
        own.rows = Rows(rows.lengths, num_step, rows.starts, rows.read, rows.write)
        outputs.append(own.run())
        states.append(own.state_pool[2])
    assert relative(*outputs) < 1e-2
    assert relative(*states) < 1e-2


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("decay", "beta"), [(-1000.0, 1000.0), (-1000.0, 0.0), (-3.0, 1000.0), (20.0, 0.0)])
def test_chunks_of_equal_keys(decay: float, beta: float, dtype: torch.dtype) -> None:
    """The hardest systems: without decay all entries below the diagonal are beta."""
    net = Net.random(Shape(1, 4, 128, 128), chunk_rows([130], [3]), dtype, F32, "cuda")
    channels, values, heads = net.shape.channels, 512, 4
    net.projected[:, 128:256] = net.projected[0, 128:256].abs() + 1
    net.projected[:, channels + values : channels + values + heads] = beta
    net.projected[:, channels + values + heads :] = decay
    net.conv_weight[128:256] = net.conv_weight[128:256].abs()
    before = net.copy("cuda")
    out = net.run()
    # Equal keys answer with one value: the sum of 64 corrections that cancel, differences of two values (sqrt 2 times
    # as long as one), each with four roundings to bf16 (the inverse, u, w S and n) of up to 2**-9. Twice what they make
    # together if they are independent: in float64 with these roundings alone, eight draws err by 0.012 to 0.053.
    rounded = 2 * (64 * 4 * 2) ** 0.5 * 2**-9
    check(net, out, before, 1e-4 if dtype == F32 else rounded, 1e-4 if dtype == F32 else rounded)


@pytest.mark.parametrize(("count", "length"), [(5, 1), (5, 3), (70, 1)])
def test_a_graph_of_a_step_follows_the_layout(count: int, length: int) -> None:
    """Captured with padding only, replayed with rows; nothing waits for the device."""
    rows = step_rows(count, length, padding=[2], fresh=[4])
    net = Net.random(BIG, rows, BF16, F32, "cuda")
    before, arguments = net.copy("cuda"), net.arguments()
    layout, real = arguments["layout"], rows.layout("cuda")
    layout.read_slot.fill_(-1)
    layout.write_slot.fill_(-1)
    gated_delta_net(**arguments)  # compiles
    layout.memo.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = gated_delta_net(**arguments)
    layout.read_slot.copy_(real.read_slot)
    layout.write_slot.copy_(real.write_slot)
    graph.replay()
    check(net, out, before, 1e-2, 1e-2)


def test_a_prompt_waits_for_nothing() -> None:
    net = Net.random(BIG, chunk_rows([200, 7], [0, 65]), BF16, F32, "cuda")
    before, arguments = net.copy("cuda"), net.arguments()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            out, _ = gated_delta_net(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    check(net, out, before, 1e-2, 1e-2)
