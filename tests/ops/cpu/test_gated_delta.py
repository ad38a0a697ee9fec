"""The gated delta net by its kernel on a CPU, against float64: outputs, what is kept, and all bytes beside."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops import cpu as cpu_kernels
from deltaserve.ops.gated_delta import api, cpu, numba_net
from tests.ops.gated_delta_nets import Net, Rows, Shape, check, chunk_rows, step_rows
from tests.ops.guarded import guarded

F32 = torch.float32


def run(net: Net) -> torch.Tensor:
    with guarded():
        out: torch.Tensor = numba_net.net(**net.arguments())
    return out


def run_and_check(shape: Shape, rows: Rows, tolerance: float = 2e-6) -> None:
    net = Net.random(shape, rows, F32, F32)
    before = net.copy("cpu")
    check(net, run(net), before, tolerance, tolerance)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_steps_keep_every_state(length: int, ratio: int) -> None:
    run_and_check(Shape(2, ratio, 16, 16), step_rows(4, length, padding=[1, 3], fresh=[2]))


@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (32, 32), (8, 8), (24, 40)])
def test_any_width_of_whole_vectors(k_dim: int, v_dim: int) -> None:
    run_and_check(Shape(1, 2, k_dim, v_dim), step_rows(2, 2))
    run_and_check(Shape(2, 1, k_dim, v_dim), chunk_rows([66, 3], [0, 7]))


def test_a_step_that_keeps_some_or_none() -> None:
    rows = step_rows(3, 4)
    rows.write[0] = [-1] * 4
    rows.write[1] = [rows.read[1], -1, -1, rows.write[1][0]]  # overwrites what it started from, then goes on
    rows.write[2] = [-1, rows.read[2], rows.write[2][0], -1]
    run_and_check(Shape(2, 2), rows)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([1], [0]), ([2], [62]), ([63, 64, 65], [0, 0, 0]), ([127, 128], [1, 64]), ([1, 2, 3, 70], [63, 62, 5, 190])],
    ids=str,
)
def test_prompts_resume_anywhere_and_keep_blocks(lengths: list[int], starts: list[int]) -> None:
    run_and_check(Shape(1, 2), chunk_rows(lengths, starts))


def test_steps_and_prompts_side_by_side() -> None:
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


@pytest.mark.parametrize("beta", [1000.0, 0.0, -9.0, -1000.0])
@pytest.mark.parametrize("decay", [-1000.0, -3.0, 20.0, 80.0, 1000.0])
def test_equal_keys_and_gates_at_their_ends(decay: float, beta: float) -> None:
    shape, rows = Shape(1, 2, 16, 16), chunk_rows([130], [3])
    net = Net.random(shape, rows, F32, F32)
    channels, values, heads = shape.channels, shape.v_heads * shape.v_dim, shape.v_heads
    net.projected[:, 16:32] = net.projected[0, 16:32].abs() + 1
    net.projected[:, channels + values : channels + values + heads] = beta
    net.projected[:, channels + values + heads :] = decay
    net.A_log.zero_()
    before = net.copy("cpu")
    out = run(net)
    if beta < -100 and decay > 0:  # nothing is written and all is forgotten: outputs are norms of next to nothing
        assert torch.isfinite(out).all()
        assert float(net.state_pool[net.rows.written].abs().max()) < 1e-30
        return
    check(net, out, before, 2e-5, 2e-5)


def test_a_large_input_of_a_slow_decay() -> None:
    """Its softplus is the input itself, where an exponential of it would be infinite."""
    net = Net.random(Shape(1, 2, 16, 16), step_rows(2, 1), F32, F32)
    net.projected[:, -2:], net.dt_bias[:], net.A_log[:] = 1000.0, 0.0, -9.0
    before = net.copy("cpu")
    check(net, run(net), before, 2e-6, 2e-6)


def test_zero_queries_and_keys() -> None:
    shape = Shape(1, 2, 16, 16)
    net = Net.random(shape, step_rows(2, 1), F32, F32)
    net.projected[:, :32] = 0
    net.conv_pool[..., :32] = 0
    out = run(net)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_row_of_nan_stays_alone() -> None:
    net = Net.random(Shape(2, 2), step_rows(3, 2), F32, F32)
    expected = run(net.copy("cpu"))
    net.projected[2] = torch.nan
    out = run(net)
    assert out[2:4].isnan().all()
    assert torch.equal(out[[0, 1, 4, 5]], expected[[0, 1, 4, 5]])


@pytest.mark.parametrize("cut", [1, 5, 64])
def test_bits_do_not_depend_on_mates_or_cuts(cut: int) -> None:
    """A prompt in one step beside another, and alone in pieces."""
    shape, tokens = Shape(2, 2, 16, 16), 130
    both = Net.random(shape, chunk_rows([7, tokens], [0, 0]), F32, F32)
    out = run(both)
    pieces, slot = [], -1
    conv_memory, state_memory = (
        torch.full_like(both.conv_memory, torch.nan),
        torch.full_like(both.state_memory, torch.nan),
    )
    for first in range(0, tokens, cut):
        length = min(cut, tokens - first)
        rows = Rows([length], 0, [first], [slot], [[-1] * (length - 1) + [2]])
        own = both.projected[7 + first : 7 + first + length]
        weights = (both.conv_weight, both.A_log, both.dt_bias, both.norm_weight)
        pieces.append(run(Net(shape, rows, own, *weights, conv_memory, state_memory)))
        slot = 2
    last = both.rows.written[-1]
    alone = Net(shape, rows, own, *weights, conv_memory, state_memory)
    assert torch.equal(torch.cat(pieces), out[7:])
    assert torch.equal(alone.state_pool[2], both.state_pool[last])
    assert torch.equal(alone.conv_pool[2], both.conv_pool[last])


def taken(shape: Shape, rows: Rows | None = None, dtype: torch.dtype = F32, state_dtype: torch.dtype = F32) -> bool:
    net = Net.random(shape, step_rows(2, 1) if rows is None else rows, dtype, state_dtype)
    *parts, _, conv, state, layout = net.arguments().values()
    return cpu.takes(tuple(parts), conv, state, layout)


def test_what_is_taken() -> None:
    assert taken(Shape())
    assert not taken(Shape(k_dim=12))
    assert not taken(Shape(v_dim=12))
    assert not taken(Shape(), None, torch.bfloat16)
    assert not taken(Shape(), None, F32, torch.bfloat16)
    assert not taken(Shape(), None, F32, torch.float64)


def test_how_many_threads_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are for products of large states, six for all else, if there is enough to do."""
    large, small = Shape(k_dim=96, v_dim=96), Shape()
    for threads, few in ((1, True), (2, True), (5, True), (6, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(cpu_kernels, "THREAD_WORK", 0)
        assert taken(small) == taken(small, chunk_rows([3], [0])) == taken(large) == few
        assert taken(large, chunk_rows([3], [0])) == (threads == 1)
        monkeypatch.setattr(cpu_kernels, "THREAD_WORK", 3 * 2 * 96 * 96)
        assert taken(large, chunk_rows([3], [0]))
        assert taken(large, chunk_rows([4], [0])) == (threads == 1)


@pytest.mark.parametrize("shape", [Shape(), Shape(k_dim=12)])
def test_the_facade(shape: Shape) -> None:
    net = Net.random(shape, step_rows(3, 2, padding=[0]), F32, F32)
    before = net.copy("cpu")
    out, ready = api.gated_delta_net(**net.arguments())
    assert ready is None
    check(net, out, before, 1e-5, 1e-5)
