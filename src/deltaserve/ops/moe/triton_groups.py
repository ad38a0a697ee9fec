"""The experts of many tokens, tile by tile of the pairs of one expert. Knows no routing.

`gate_up`: a program owns BI inner columns of a tile's expert, BI rows of gate and of up, and all tokens of the tile; it
streams both rows along the inputs, applies the activation, and where tokens are many also quantises it: BI is then 128,
a block. `down`: BO outputs of the same pairs, each times its pair's weight, left as rows that are added up elsewhere.
A tile with few tokens (decoding) makes this a stream of weights, once each: tiles of 16 tokens, two programs of 102 KiB
or three of 68 on each multiprocessor. Tiles beside each other share an expert, whose weights the cache then holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear.triton_early import early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, operand, quantize, quantize_rows, stored
from deltaserve.ops.linear.triton_gemm import along_tokens, multiply, products
from deltaserve.ops.moe.triton_members import direct, group, same, tile_of

Tables = tuple[Tensor, Tensor, Tensor]
"""Of `group`: each tile's pairs, its expert, and how many tiles there are. Or of `same`."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """How the products of a layer are cut. Sizes are powers of two, but 192 pairs where warps have roles."""

    pairs: int
    inner: int
    """Columns of `gate_up`."""
    outputs: int
    """Of `down`."""
    warps: int = 4
    stages: int = 3
    ready: bool = False
    """Whether inputs are quantised before they are multiplied: by a kernel of their own, and by `gate_up`."""
    down_warps: int = 0
    """As `warps` if 0, and so on."""
    down_stages: int = 0
    registers: int = 0
    """Of each thread at most."""
    down_registers: int = 0
    step: int = 128
    """Inputs that `gate_up` multiplies at once, of a quantised weight."""
    roles: bool = False
    """Whether warps have roles (`triton_roles`; they need Hopper and tiles of 192 pairs)."""


@triton.jit(do_not_specialize=["pairs", "stride"])
def gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    h_ptr,
    h_scale_ptr,
    members_ptr,
    experts_ptr,
    count_ptr,
    pairs,
    stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    TYPE: tl.constexpr,
    DIRECT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """READY: the input comes quantised, and what is made is quantised if BI is a block."""
    wait_for_inputs(EARLY)
    let_next_start(EARLY)
    COLUMNS: tl.constexpr = (INNER + BI - 1) // BI
    tile, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    is_tile, expert, pair = tile_of(members_ptr, experts_ptr, count_ptr, pairs, tile, K, BM, DIRECT)
    if not is_tile:
        return
    kept_t = pair >= 0
    pair = tl.where(kept_t, pair, 0)
    t = pair // K
    i = column * BI + tl.arange(0, BI)
    kept_i = i < INNER
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * WIDTH
    w_ptrs = w_ptr + expert * (2 * INNER * WIDTH) + i[:, None] * WIDTH
    NUM: tl.constexpr = (WIDTH + BK - 1) // BK
    ROWS: tl.constexpr = (INNER + 127) // 128
    BLOCKS: tl.constexpr = (WIDTH + 127) // 128
    FLIP: tl.constexpr = BM >= 64
    gate = tl.zeros((BM, BI) if FLIP else (BI, BM), tl.float32)
    up = tl.zeros_like(gate)
    if FP8 != 0:
        gate_scale_ptr = w_scale_ptr + (expert * (2 * ROWS) + (column * BI) // 128) * BLOCKS
        up_scale_ptr = gate_scale_ptr + ROWS * BLOCKS
        gate_scale, up_scale = tl.load(gate_scale_ptr), tl.load(up_scale_ptr)
        if READY:
            x_scale = tl.load(x_scale_ptr + t, mask=kept_t, other=0.0)
    for block in range(NUM):
        k = block * BK + tl.arange(0, BK)[None, :]
        inside = kept_i[:, None] & (k < WIDTH)
        w1 = tl.load(w_ptrs + k, mask=inside, other=0.0)
        w3 = tl.load(w_ptrs + INNER * WIDTH + k, mask=inside, other=0.0)
        x = tl.load(x_ptrs + k, mask=kept_t[:, None] & (k < WIDTH), other=0.0)
        if FP8 == 0:
            if FLIP:
                gate = tl.dot(x, tl.trans(w1), gate, input_precision="ieee")
                up = tl.dot(x, tl.trans(w3), up, input_precision="ieee")
            else:
                gate = tl.dot(w1, tl.trans(x), gate, input_precision="ieee")
                up = tl.dot(w3, tl.trans(x), up, input_precision="ieee")
        else:
            following = tl.minimum(block + 1, NUM - 1) * BK // 128
            next_gate_scale, next_up_scale = tl.load(gate_scale_ptr + following), tl.load(up_scale_ptr + following)
            if READY:
                x_q = operand(x, FP8)
                next_x_scale = tl.load(x_scale_ptr + following * stride + t, mask=kept_t, other=0.0)
            else:
                x_q, x_scale = quantize(x.to(tl.float32), FP8)
            gate += multiply(operand(w1, FP8), x_q, FLIP) * along_tokens(x_scale * gate_scale, FLIP)
            up += multiply(operand(w3, FP8), x_q, FLIP) * along_tokens(x_scale * up_scale, FLIP)
            gate_scale, up_scale = next_gate_scale, next_up_scale
            if READY:
                x_scale = next_x_scale
    h = (gate / (1.0 + tl.exp(-gate)) * up).to(TYPE)
    h = h if FLIP else tl.trans(h)
    h_ptrs = h_ptr + pair.to(tl.int64)[:, None] * INNER + i[None, :]
    kept = kept_t[:, None] & kept_i[None, :]
    if READY and BI == 128:
        h_q, h_scale = quantize(h.to(tl.float32), FP8)
        tl.store(h_ptrs, stored(h_q, FP8), mask=kept)
        tl.store(h_scale_ptr + pair * ROWS + column, h_scale, mask=kept_t)
    else:
        tl.store(h_ptrs, h, mask=kept)


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    h_ptr,
    h_scale_ptr,
    w_ptr,
    w_scale_ptr,
    weights_ptr,
    y_ptr,
    members_ptr,
    experts_ptr,
    count_ptr,
    pairs,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BM: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    DIRECT: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    COLUMNS: tl.constexpr = (WIDTH + BO - 1) // BO
    tile, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    is_tile, expert, pair = tile_of(members_ptr, experts_ptr, count_ptr, pairs, tile, K, BM, DIRECT)
    o = column * BO + tl.arange(0, BO)
    kept_o = o < WIDTH
    if not is_tile:
        return
    kept_t = pair >= 0
    pair = tl.where(kept_t, pair, 0)
    NUM: tl.constexpr = (INNER + BK - 1) // BK
    FLIP: tl.constexpr = BM >= 64
    acc = products(
        tl.zeros((BM, BO) if FLIP else (BO, BM), tl.float32),
        w_ptr + expert * (WIDTH * INNER) + o[:, None] * INNER,
        kept_o,
        w_scale_ptr + (expert * ((WIDTH + 127) // 128) + (column * BO) // 128) * NUM,
        h_ptr + pair.to(tl.int64)[:, None] * INNER,
        kept_t,
        h_scale_ptr + pair * NUM,
        1,
        0,
        NUM,
        INNER,
        BK,
        FP8,
        READY,
        FLIP,
    )
    weight = tl.load(weights_ptr + pair, mask=kept_t, other=0.0)
    y = (acc * along_tokens(weight, FLIP)).to(y_ptr.dtype.element_ty)
    y = y if FLIP else tl.trans(y)
    y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(y_ptrs, y, mask=kept_t[:, None] & kept_o[None, :])


def has_roles(x_TD: Tensor, pairs: int, inner: int) -> bool:
    """Whether `triton_roles` can compute a layer of quantised experts with these inputs."""
    width = x_TD.shape[1]
    fits = (width % 128, inner % 128) == (0, 0) and pairs * max(width, inner) < 1 << 31
    return fits and x_TD.element_size() == 2 and properties(x_TD.device).is_hopper


def choose_tiles(pairs: int, num_experts: int, quantized: bool, shared_bytes: int, roles: bool = False) -> Tiles:
    """By the pairs that an expert has on average: few make a stream of weights, many a product. Fewer stages and
    smaller tiles where shared memory is small, and e4m3 is widened in registers. `roles` as `has_roles` says."""
    mean, large = pairs / num_experts, shared_bytes > 200 << 10
    if 1 / 8 < mean <= 3 / 8 and quantized and large:
        # Three programs to a multiprocessor are all of `gate_up` for 6 to 9 tokens of the 80B; two would take turns.
        return Tiles(16, 128, 128, stages=2, ready=True, down_stages=3)
    if mean <= 8:
        return Tiles(16, 128, 128, ready=True) if quantized and large else Tiles(16, 64, 64, stages=3 if large else 2)
    if not (quantized and large):
        return Tiles(32 if mean <= 24 or not large else 64, 64, 64, stages=3 if large else 2)
    if mean <= (32 if roles else 24):
        return Tiles(32, 128, 128, ready=True)
    if roles:
        return Tiles(192, 128, 128, stages=4, ready=True, down_stages=6, roles=True)
    # Three programs of `down` share a multiprocessor: one's products hide another's rest.
    return Tiles(64, 128, 128, warps=8, ready=True, down_warps=4, down_stages=3, down_registers=168)


def gate_up(
    x_TD: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    tables: Tables,
    num_pairs: int,
    tiles: Tiles,
    early: bool | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [T, D], w13 [E, 2I, D] plain or e4m3, tables of `num_pairs` pairs -> silu(gate) * up, [pairs, I] as x; or, if
    tiles are `ready` of 128 inner columns and weights quantised, as e4m3 (or its bytes) with scales [pairs, i].
    `quantized`: x as `quantize_rows` gives it, if that was done."""
    inner, width, device = w13.shape[1] // 2, w13.shape[2], x_TD.device
    w13, way = fp8_way(w13, w13_scale)
    ready = tiles.ready and way > 0
    x_in, stride, x_scale = x_TD.contiguous(), 0, w13
    makes_ready = ready and tiles.inner == 128
    h, h_scale = torch.empty(num_pairs, inner, dtype=w13.dtype if makes_ready else x_TD.dtype, device=device), None
    if ready:
        assert tiles.inner <= 128, f"moe: {tiles.inner} inner columns are more than a block"
        x_in, x_scale = quantized or quantize_rows(x_TD, early)
        if x_scale.stride(0) != 1 and not tiles.roles:
            x_scale = x_scale.t().contiguous().t()
        x_in, stride = fp8_way(x_in, x_scale)[0], x_scale.stride(1)
    if makes_ready:
        h_scale = torch.empty(num_pairs, -(-inner // 128), dtype=torch.float32, device=device)
    if tiles.roles:
        from deltaserve.ops.moe import triton_roles

        assert h_scale is not None, f"moe: {tiles} of weights that are not quantised"
        args = x_in, x_scale, w13, w13_scale, h, h_scale, *tables
        triton_roles.gate_up(*args, num_pairs // x_TD.shape[0], TYPES[x_TD.dtype], tiles.stages)
        return h, h_scale
    gate_up_kernel[(len(tables[1]) * triton.cdiv(inner, tiles.inner),)](
        x_in,
        x_scale,
        w13,
        w13 if w13_scale is None else w13_scale,
        h,
        w13 if h_scale is None else h_scale,
        *tables,
        num_pairs,
        stride,
        K=num_pairs // x_TD.shape[0],
        WIDTH=width,
        INNER=inner,
        BM=tiles.pairs,
        BI=tiles.inner,
        BK=tiles.step if ready else 128 if way else 128 // w13.element_size(),
        FP8=way,
        READY=ready,
        TYPE=TYPES[x_TD.dtype],
        DIRECT=direct(tables, num_pairs // x_TD.shape[0]),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **limit(device, tiles.registers),
        **early_options(device, early, x_TD.shape[0]),
    )
    return h, h_scale


def down(
    h: Tensor,
    h_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    weights_TK: Tensor,
    tables: Tables,
    tiles: Tiles,
    dtype: torch.dtype,
    early: bool | None = None,
) -> Tensor:
    """h of `gate_up`, w2 [E, D, I] plain or e4m3, weights float32 [T, K] -> rows [T * K, D] in `dtype`."""
    (_, width, inner), device = w2.shape, w2.device
    assert tiles.outputs <= 128 or w2_scale is None, f"moe: {tiles.outputs} outputs are more than a block"
    w2, way = fp8_way(w2, w2_scale)
    y_PD = torch.empty(weights_TK.numel(), width, dtype=dtype, device=device)
    if tiles.roles:
        from deltaserve.ops.moe import triton_roles

        assert h_scale is not None, f"moe: {tiles} of inner columns that are not quantised"
        args = h, h_scale, w2, w2_scale, weights_TK, y_PD, *tables
        triton_roles.down(*args, tiles.down_stages or tiles.stages)
        return y_PD
    down_kernel[(len(tables[1]) * triton.cdiv(width, tiles.outputs),)](
        h,
        w2 if h_scale is None else h_scale,
        w2,
        w2 if w2_scale is None else w2_scale,
        weights_TK,
        y_PD,
        *tables,
        weights_TK.numel(),
        K=weights_TK.shape[1],
        WIDTH=width,
        INNER=inner,
        BM=tiles.pairs,
        BO=tiles.outputs,
        BK=128 if way else 128 // w2.element_size(),
        FP8=way,
        READY=h_scale is not None,
        DIRECT=direct(tables, weights_TK.shape[1]),
        num_warps=tiles.down_warps or tiles.warps,
        num_stages=tiles.down_stages or tiles.stages,
        **limit(device, tiles.down_registers),
        **early_options(device, early, len(weights_TK)),
    )
    return y_PD


def limit(device: torch.device, registers: int) -> dict[str, int]:
    """The argument of a launch that limits a thread's registers; 0 is no limit."""
    return {"maxnreg": registers} if registers and properties(device).is_hopper else {}


def grouped(
    x_TD: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    count: Tensor,
    tiles: Tiles | None = None,
    shared: bool = False,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, D], w13 [E, 2I, D] and w2 [E, D, I] plain or e4m3, weights float32 and ids int32 [T, K], `count` as `route`
    gives it -> [T, K, D] as x or fp32, for `add_up` or the next norm. `shared` as in `group`, `ready` as `quantized` in
    `gate_up`.

    Variants: shapes of the weights, K, dtypes, classes of pairs per expert (`choose_tiles`), and up to 16 tokens.
    """
    num_experts, pairs = w2.shape[0], ids_TK.numel()
    if tiles is None:
        shared_bytes, roles = properties(x_TD.device).shared_bytes, has_roles(x_TD, pairs, w2.shape[2])
        tiles = choose_tiles(pairs, num_experts, w13_scale is not None, shared_bytes, roles)
    if len(ids_TK) <= tiles.pairs == 16:
        tables = same(ids_TK, count)
    else:
        tables = *group(ids_TK, count, num_experts, tiles.pairs, shared, early), count
    h, h_scale = gate_up(x_TD, w13, w13_scale, tables, pairs, tiles, early, ready)
    # Few rows are kept exact; of many, the bytes count.
    dtype = x_TD.dtype if tiles.ready else torch.float32
    y_PD = down(h, h_scale, w2, w2_scale, weights_TK, tables, tiles, dtype, early)
    return y_PD.view(*ids_TK.shape, -1)
