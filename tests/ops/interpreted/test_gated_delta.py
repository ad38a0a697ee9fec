"""The kernels of the gated delta net, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.gated_delta import api, triton_chunk, triton_step
from deltaserve.ops.linear.triton_fp8 import quantize_rows
from tests.ops.gated_delta_nets import Net, Rows, Shape, check, chunk_rows, relative, step_rows, with_rows_behind

F32, BF16 = torch.float32, torch.bfloat16


def run_and_check(shape: Shape, rows: Rows, dtype: torch.dtype = F32, state_dtype: torch.dtype = F32) -> None:
    net = Net.random(shape, rows, dtype, state_dtype)
    before = net.copy("cpu")
    out = net.run_kernels()
    assert out.dtype == dtype
    # A chunk's decays are summed in fp32: differences of large sums lose digits.
    exact = 3e-5 if rows.num_step < len(rows.lengths) else 1e-5
    # The interpreter cuts to bf16 where a GPU rounds.
    tolerance = exact if dtype == F32 and state_dtype == F32 else 2e-2
    check(net, out, before, tolerance, tolerance)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_steps_keep_every_state(length: int, ratio: int) -> None:
    run_and_check(Shape(2, ratio, 16, 16), step_rows(4, length, padding=[1, 3], fresh=[2]))


@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (64, 64), (32, 32), (24, 20), (5, 3)])
def test_steps_of_any_width(k_dim: int, v_dim: int) -> None:
    for length in (1, 2):
        run_and_check(Shape(1, 2, k_dim, v_dim), step_rows(2, length))


@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, F32), (BF16, BF16), (F32, BF16)])
def test_steps_in_half_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    run_and_check(Shape(1, 2, 32, 32), step_rows(3, 2, fresh=[1]), dtype, state_dtype)


def test_a_step_that_keeps_some_or_none() -> None:
    rows = step_rows(3, 4)
    rows.write[0] = [-1] * 4
    rows.write[1] = [rows.read[1], -1, -1, rows.write[1][0]]  # overwrites what it started from, then goes on
    run_and_check(Shape(2, 2), rows)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1], [0]),
        ([2], [62]),
        ([63, 64, 65], [0, 0, 0]),
        ([127, 128], [1, 64]),
        ([1, 2, 3, 70], [63, 62, 5, 190]),
    ],
    ids=str,
)
def test_chunks_resume_anywhere_and_keep_blocks(lengths: list[int], starts: list[int]) -> None:
    run_and_check(Shape(1, 2), chunk_rows(lengths, starts))


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "ratio"),
    [(128, 128, 1)]
    + [(k_dim, v_dim, ratio) for k_dim, v_dim in ((64, 64), (32, 32), (24, 20), (5, 3)) for ratio in (1, 4)],
)
def test_chunks_of_any_width(k_dim: int, v_dim: int, ratio: int) -> None:
    run_and_check(Shape(1, ratio, k_dim, v_dim), chunk_rows([66, 3], [0, 7]))


@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, F32), (BF16, BF16), (F32, BF16)])
def test_chunks_in_half_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    run_and_check(Shape(1, 2, 32, 32), chunk_rows([70, 5], [0, 60]), dtype, state_dtype)


def test_rows_without_tokens_behind_the_others() -> None:
    """As in a graph that its prompts fill: such a row's first token would stand behind the last of all."""
    net = Net.random(Shape(1, 2), chunk_rows([70, 5], [0, 60]), F32, F32)
    before, arguments = net.copy("cpu"), net.arguments()
    arguments["layout"] = with_rows_behind(arguments["layout"], 2)
    check(net, api._by_kernels(**arguments)[0], before, 3e-5, 3e-5)


def test_steps_and_chunks_side_by_side() -> None:
    steps, chunks = step_rows(2, 2), chunk_rows([65, 1], [10, 0])
    shift = steps.num_slots
    moved = [[slot + shift if slot >= 0 else -1 for slot in slots] for slots in (chunks.read, *chunks.write)]
    rows = Rows(
        [*steps.lengths, *chunks.lengths],
        2,
        [*steps.starts, *chunks.starts],
        [*steps.read, *moved[0]],
        [*steps.write, *moved[1:]],
    )
    run_and_check(Shape(2, 2), rows)


@pytest.mark.parametrize("is_step", [True, False])
@pytest.mark.parametrize(("length", "v_dim", "dtype"), [(1, 128, F32), (2, 128, torch.float16), (1, 256, F32)])
def test_outputs_that_are_quantised(length: int, v_dim: int, dtype: torch.dtype, is_step: bool) -> None:
    """They are what quantising them gives, bit for bit, in steps and in chunks."""
    rows = step_rows(3, length, fresh=[1]) if is_step else chunk_rows([3 * length], [0])
    net = Net.random(Shape(1, 2, 16, v_dim), rows, dtype, F32)
    out, ready = api._by_kernels(**net.arguments(), quantizes=True)
    assert ready is not None
    for found, expected in zip(ready, quantize_rows(out.flatten(1)), strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found[: len(out)].float(), expected[: len(out)].float())
        assert is_step or torch.equal(found[len(out) :].float(), expected[len(out) :].float())
    other = Net.random(Shape(1, 2, 16, 96), rows, dtype, F32)
    assert api._by_kernels(**other.arguments(), quantizes=True)[1] is None


@pytest.mark.parametrize("lengths", [[1], [5, 1, 2, 9]], ids=str)
def test_rows_of_any_length_token_by_token(lengths: list[int]) -> None:
    """As fp32 prompts are computed on a GPU."""
    shape, rows = Shape(2, 2), chunk_rows(lengths, [7 * (row % 2) for row in range(len(lengths))])
    net = Net.random(shape, rows, F32, F32)
    before, arguments = net.copy("cpu"), net.arguments()
    out = torch.empty(sum(lengths), shape.v_heads, shape.v_dim)
    arguments["z_TVD"] = arguments.pop("z_TX").unflatten(1, (shape.v_heads, shape.v_dim))
    triton_step.step(**arguments, segment=arguments["layout"].segments[0], out_TVD=out)
    check(net, out, before, 1e-5, 1e-5)


def test_steps_equal_chunks() -> None:
    shape, tokens = Shape(1, 2, 32, 32), 9
    outputs, states = [], []
    rows = Rows([tokens], 1, [3], [1], [[-1] * (tokens - 1) + [2]])
    net = Net.random(shape, rows, F32, F32)
    for num_step in (0, 1):
        own = net.copy("cpu")
        own.rows = Rows(rows.lengths, num_step, rows.starts, rows.read, rows.write)
        outputs.append(own.run_kernels())
        states.append(own.state_pool[2])
    assert relative(*outputs) < 1e-5
    assert relative(*states) < 1e-5


@pytest.mark.parametrize("beta", [1000.0, 0.0, -9.0])
@pytest.mark.parametrize("decay", [-1000.0, -3.0, 20.0])
def test_chunks_of_equal_keys(decay: float, beta: float) -> None:
    check_equal_keys(decay, beta)


@pytest.fixture
def blocks_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are prepared as on AMD's GPUs."""
    monkeypatch.setattr(triton_chunk, "prepare_tile", lambda *_: {"SIZE": 2, "num_warps": 4})


@pytest.mark.usefixtures("blocks_of_2")
@pytest.mark.parametrize("decay", [-1000.0, -3.0, 20.0])
def test_chunks_of_equal_keys_from_blocks_of_2(decay: float) -> None:
    check_equal_keys(decay, 1000.0)


def check_equal_keys(decay: float, beta: float) -> None:
    """The hardest systems: without decay all entries below the diagonal are beta."""
    shape, rows = Shape(1, 2, 16, 16), chunk_rows([130], [3])
    net = Net.random(shape, rows, F32, F32)
    channels, values, heads = shape.channels, shape.v_heads * shape.v_dim, shape.v_heads
    net.projected[:, 16:32] = net.projected[0, 16:32].abs() + 1
    net.projected[:, channels + values : channels + values + heads] = beta
    net.projected[:, channels + values + heads :] = decay
    before = net.copy("cpu")
    out = net.run_kernels()
    check(net, out, before, 1e-4, 1e-4)


@pytest.mark.usefixtures("blocks_of_2")
@pytest.mark.parametrize(
    ("shape", "lengths", "starts"),
    [(Shape(1, 2), [1, 2, 3, 70, 130], [63, 62, 5, 190, 0]), (Shape(2, 1, 32, 16), [66, 3], [0, 7])],
    ids=str,
)
def test_chunks_from_blocks_of_2(shape: Shape, lengths: list[int], starts: list[int]) -> None:
    run_and_check(shape, chunk_rows(lengths, starts))
