"""Projection of several inputs in matrix units. Knows no vendor's product, which may be faster for many inputs.

The weight's rows are the tall side of a product and few tokens the narrow one, so that little is wasted: tiles of BO
outputs times BT tokens, through shared memory, some stages ahead. Quantised products start anew every 128 inputs and
are scaled as they are added. Few tokens are quantised here, as they come; many come quantised.

A program that starts before its input is there may hold blocks of its weight in shared memory meanwhile; what is left
to do then are a few products. A second, plain weight of the same input may be multiplied in the same launch.

Where a weight has too few rows for the device, SPLIT programs share a tile's inputs. Each leaves its part in memory,
and the last to arrive adds the parts in their order, so the sum does not depend on who was last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.gpu import properties
from deltaserve.ops.linear.triton_early import bring_near, early_options, let_next_start, wait_for_inputs
from deltaserve.ops.linear.triton_fp8 import fp8_way, operand, quantize, quantize_rows

AHEAD = range(5, 65)
"""Tokens whose products bring their weights to the cache before their inputs are there: eight layers without what mixes
tokens take 611 instead of 640 us at 8 tokens on an H200, 992 instead of 1,043 at 32, and the same at 2 and at 4."""
MAX_TILES = 4096
HELD_BYTES = 32 << 10
"""Of its weight that a program of up to 16 tokens holds while it waits for its input, if that is all of its share and
all programs are there at once: six to a multiprocessor. At 8 tokens on an H200 an output projection moves the end of a
step by 4.9 instead of 7.2 us."""
BESIDE = 256
"""Inputs of a weight beside another that one program multiplies: it must not end later than the others."""
HALVED = 256
"""Tokens up to which tiles that are few are of half as many outputs. On an H200, in a chain of layers, out_proj moves
the end by 9.9 us at 128 tokens, by 23.0 with tiles of 128 outputs in eight parts (at 256 by 12.8 and 19.3), a router of
256 tokens by 6.8 and 7.8."""
NARROWED = 64, 128
"""Classes of tokens for which a plain weight of few rows, a router, has tiles of 16 outputs in four parts. On an H200,
in a layer, one of 513 rows moves the end by 5.8 us at 128 tokens, by 7.8 with 32 outputs in eight parts; at 64 by 4.4,
with 64 outputs in eight parts by 6.3."""
GROUP: tl.constexpr = tl.constexpr(8)
"""Tiles of tokens that are computed side by side, so that weights are found in the cache."""


@dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    outputs: int
    tokens: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    ready: bool = False
    """Whether the input is quantised by a kernel of its own if it does not come quantised."""
    ahead: bool = False
    """Whether a program that starts before its input is there has its weight brought to the cache meanwhile."""
    held: int = 0
    """Blocks of its weight that it loads meanwhile."""


@triton.jit
def multiply(a, b, FLIP: tl.constexpr):
    """a @ b.T of weights [BO, BK] and tokens [BT, BK]: [BO, BT], or [BT, BO] if flipped."""
    return tl.dot(b, tl.trans(a)) if FLIP else tl.dot(a, tl.trans(b))


@triton.jit
def along_tokens(v, FLIP: tl.constexpr):
    """[BT] beside what `multiply` gives."""
    return v[:, None] if FLIP else v[None, :]


@triton.jit
def products(
    acc,
    w_ptrs,
    kept_o,
    w_scale_ptr,
    x_ptrs,
    kept_t,
    x_scale_ptrs,
    stride,
    begin,
    end,
    WIDTH: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    FLIP: tl.constexpr,
):
    """acc plus the product of rows of a weight [BO, 1] and of tokens [BT, 1], over the blocks `begin` to `end` of their
    inputs. Scales are fetched three blocks ahead: they are not worth a stage of their own, but come from afar."""
    last = end - 1
    if FP8 != 0:
        second, third = tl.minimum(begin + 1, last), tl.minimum(begin + 2, last)
        w_scale = tl.load(w_scale_ptr + tl.minimum(begin, last))
        w_scale_1, w_scale_2 = tl.load(w_scale_ptr + second), tl.load(w_scale_ptr + third)
        if READY:
            x_scale = tl.load(x_scale_ptrs + tl.minimum(begin, last) * stride, mask=kept_t, other=0.0)
            x_scale_1 = tl.load(x_scale_ptrs + second * stride, mask=kept_t, other=0.0)
            x_scale_2 = tl.load(x_scale_ptrs + third * stride, mask=kept_t, other=0.0)
    for block in range(begin, end):
        k = block * BK + tl.arange(0, BK)[None, :]
        w = tl.load(w_ptrs + k, mask=kept_o[:, None] & (k < WIDTH), other=0.0)
        x = tl.load(x_ptrs + k, mask=kept_t[:, None] & (k < WIDTH), other=0.0)
        if FP8 == 0:
            if FLIP:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
            else:
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            following = tl.minimum(block + 3, last)
            w_scale_3 = tl.load(w_scale_ptr + following)
            if READY:
                x_scale_3 = tl.load(x_scale_ptrs + following * stride, mask=kept_t, other=0.0)
                acc += multiply(operand(w, FP8), operand(x, FP8), FLIP) * along_tokens(x_scale * w_scale, FLIP)
                x_scale, x_scale_1, x_scale_2 = x_scale_1 + 0.0, x_scale_2 + 0.0, x_scale_3
            else:
                x_q, own_scale = quantize(x.to(tl.float32), FP8)
                acc += multiply(operand(w, FP8), x_q, FLIP) * along_tokens(own_scale * w_scale, FLIP)
            # Each is computed anew: loops in which a value is handed on as it is are not run in stages.
            w_scale, w_scale_1, w_scale_2 = w_scale_1 + 0.0, w_scale_2 + 0.0, w_scale_3
    return acc


@triton.jit
def multiply_tile(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    y_ptr,
    part_ptr,
    count_ptr,
    program,
    tokens,
    height,
    stride,
    WIDTH: tl.constexpr,
    BO: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program of a product: its share of one tile."""
    num_o, num_t = tl.cdiv(height, BO), tl.cdiv(tokens, BT)
    tile, split = program % (num_o * num_t), program // (num_o * num_t)
    group = tile // (GROUP * num_o)
    group_size = tl.minimum(num_t - group * GROUP, GROUP)
    within = tile - group * GROUP * num_o
    first_o = (within // group_size) * BO
    o = first_o + tl.arange(0, BO)
    t = (group * GROUP + within % group_size) * BT + tl.arange(0, BT)
    kept_o, kept_t = o < height, t < tokens
    w_ptrs = w_ptr + o.to(tl.int64)[:, None] * WIDTH
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * WIDTH
    NUM: tl.constexpr = (WIDTH + BK - 1) // BK
    EACH: tl.constexpr = (NUM + SPLIT - 1) // SPLIT
    begin = split * EACH
    end = tl.minimum(begin + EACH, NUM)
    if AHEAD > 0:
        LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
        k = tl.minimum(begin * BK + tl.arange(0, AHEAD)[None, :] * LINE, WIDTH - 1)
        bring_near(w_ptr + tl.minimum(o, height - 1).to(tl.int64)[:, None] * WIDTH + k)
    # Tokens are the narrow side, but not where there are as many as outputs: their scales then fill registers.
    FLIP: tl.constexpr = BT >= 64
    acc = tl.zeros((BT, BO) if FLIP else (BO, BT), tl.float32)
    w_scale_ptr += (first_o // 128) * NUM
    held = ()
    for i in tl.static_range(HELD):
        k = (begin + i) * BK + tl.arange(0, BK)[None, :]
        held += (tl.load(w_ptrs + k, mask=kept_o[:, None] & (k < WIDTH), other=0.0),)
    wait_for_inputs(EARLY)
    inputs, scales = (), ()
    for i in tl.static_range(HELD):
        k = (begin + i) * BK + tl.arange(0, BK)[None, :]
        inputs += (tl.load(x_ptrs + k, mask=kept_t[:, None] & (k < WIDTH), other=0.0),)
        if FP8 != 0:
            scale = tl.load(w_scale_ptr + begin + i)
            if READY:
                scale *= tl.load(x_scale_ptr + t + (begin + i) * stride, mask=kept_t, other=0.0)
            scales += (scale,)
    for i in tl.static_range(HELD):
        # Made anew, an input goes to shared memory when its turn has come: all weights are there already.
        x = tl.where(kept_t[:, None], inputs[i], tl.zeros_like(inputs[i]))
        if FP8 == 0:
            if FLIP:
                acc = tl.dot(x, tl.trans(held[i]), acc, input_precision="ieee")
            else:
                acc = tl.dot(held[i], tl.trans(x), acc, input_precision="ieee")
        elif READY:
            x_q = operand(x, FP8)
            acc += multiply(operand(held[i], FP8), x_q, FLIP) * along_tokens(scales[i], FLIP)
        else:
            x_q, x_scale = quantize(x.to(tl.float32), FP8)
            acc += multiply(operand(held[i], FP8), x_q, FLIP) * along_tokens(x_scale * scales[i], FLIP)
    if HELD < EACH:
        acc = products(
            acc,
            w_ptrs,
            kept_o,
            w_scale_ptr,
            x_ptrs,
            kept_t,
            x_scale_ptr + t,
            stride,
            begin + HELD,
            end,
            WIDTH,
            BK,
            FP8,
            READY,
            FLIP,
        )
    if FLIP:
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * height + o[None, :]
        kept = kept_t[:, None] & kept_o[None, :]
    else:
        y_ptrs = y_ptr + t.to(tl.int64)[None, :] * height + o[:, None]
        kept = kept_o[:, None] & kept_t[None, :]
    if SPLIT == 1:
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=kept)
    else:
        if FLIP:
            place = tl.arange(0, BT)[:, None] * BO + tl.arange(0, BO)[None, :]
        else:
            place = tl.arange(0, BO)[:, None] * BT + tl.arange(0, BT)[None, :]
        part_ptrs = part_ptr + tile.to(tl.int64) * (SPLIT * BO * BT) + place
        tl.store(part_ptrs + split * (BO * BT), acc)
        tl.debug_barrier()  # every thread's part is written before the program counts itself
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros_like(acc)
            for other in tl.range(SPLIT, loop_unroll_factor=4 if BO * BT <= 4096 else 1):
                acc += tl.load(part_ptrs + other * (BO * BT), cache_modifier=".cg")
            tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=kept)
            tl.store(count_ptr + tile, 0)


@triton.jit(do_not_specialize=["tokens", "height", "stride", "height_beside", "first"])
def gemm_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    y_ptr,
    part_ptr,
    count_ptr,
    x_beside_ptr,
    beside_ptr,
    y_beside_ptr,
    tokens,
    height,
    stride,
    height_beside,
    first,
    WIDTH: tl.constexpr,
    BO: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    READY: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    BESIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """AHEAD: the power of two that holds the lines of 128 bytes of a program's row of the weight, or 0. HELD: blocks of
    it that a program loads before its input is there. BESIDE: into how many programs a tile of a second, plain weight
    of the same input is split; theirs are the `first` programs, and the parts and counters in front."""
    let_next_start(EARLY)
    program = tl.program_id(0)
    if BESIDE > 0:  # noqa: SIM102 - known when this is compiled, the other is not
        if program < first:
            BITS: tl.constexpr = beside_ptr.dtype.element_ty.primitive_bitwidth // 16
            OWN: tl.constexpr = 128 // (BITS * BITS)
            BLOCKS: tl.constexpr = (WIDTH + OWN - 1) // OWN
            multiply_tile(
                x_beside_ptr,
                x_beside_ptr,
                beside_ptr,
                beside_ptr,
                y_beside_ptr,
                part_ptr,
                count_ptr,
                program,
                tokens,
                height_beside,
                0,
                WIDTH,
                BO,
                BT,
                OWN,
                BESIDE,
                0,
                False,
                0,
                BLOCKS // BESIDE if EARLY and BLOCKS % BESIDE == 0 and BLOCKS // BESIDE <= 8 else 0,
                EARLY,
            )
            return
    multiply_tile(
        x_ptr,
        x_scale_ptr,
        w_ptr,
        w_scale_ptr,
        y_ptr,
        part_ptr + first.to(tl.int64) * (BO * BT),
        count_ptr + first,
        program - first,
        tokens,
        height,
        stride,
        WIDTH,
        BO,
        BT,
        BK,
        SPLIT,
        FP8,
        READY,
        AHEAD,
        HELD,
        EARLY,
    )


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> Tensor:
    """Zero between launches: who counts last resets its counter."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def choose_tiles(tokens: int, height: int, width: int, quantized: bool, num_sms: int, shared_bytes: int) -> Tiles:
    """Few tokens: about 100 KiB in flight in each multiprocessor, and more programs than fill the device, as each waits
    for its blocks in turn. Many: tiles that read little twice, and two programs for each multiprocessor; smaller ones
    up to HALVED tokens where they are few, since one program adds all parts of a tile up, and the smallest for a router
    of NARROWED tokens. A split leaves four blocks to each program (two of other plain weights). Fewer stages, and
    smaller tiles, where shared memory is small and e4m3 is widened in it."""
    small, stages = shared_bytes < 96 << 10, 4 if shared_bytes > 200 << 10 else 2
    ahead = tokens in AHEAD
    tokens = triton.next_power_of_2(tokens)
    if tokens > 64:
        narrow = 64 if quantized or small or tokens <= 512 else 128
        outputs, programs = 128 if quantized and not small else 64, 2 * num_sms
        if tokens <= HALVED and not small and 2 * -(-height // outputs) * (tokens // narrow) <= num_sms:
            outputs, programs = outputs // 2, programs if quantized else 3 * num_sms
        stages = stages if outputs == 64 and quantized else min(stages, 3)
    else:
        narrow = max(16, tokens)
        outputs = 128 if height >= 128 * 4 * num_sms and not small else 64
        programs = num_sms * ((6 if narrow == 16 else 3) if quantized else 2)
    narrowed = not quantized and not small and tokens in NARROWED and height <= 8 * num_sms
    if narrowed:
        outputs, programs = 16, 2 * num_sms
    least = 4 if quantized or narrowed else 2
    split, tiles = 1, -(-height // outputs) * -(-tokens // narrow)
    while split * 2 * least <= -(-width // 128) and split * 2 * tiles <= programs:
        split *= 2
    if narrow == 16 and split > 1:
        stages = min(stages, 3)  # of four blocks each: more programs at a time are worth more than the last stage
    each, held = -(-width // 128) // split, 0
    if ahead and narrow == 16 and not small and outputs * each * 128 * (1 if quantized else 2) <= HELD_BYTES:
        held = each if split > 1 and split * tiles <= 6 * num_sms and stages > 2 else 0
    return Tiles(outputs, narrow, split, stages=stages, ready=quantized and tokens > 16, ahead=ahead, held=held)


def gemm(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, I], weight [O, I] plain or e4m3 with scales [o, i] -> [T, O] in `dtype`. `ready`: x as `quantize_rows`
    gives it, for an e4m3 weight.

    Variants: I, dtypes, and `tiles`: classes of T that end at powers of two (16 to 1,024), and the weight's height.
    """
    return _launch(x_TI, weight_OI, scale_oi, None, dtype, tiles, early, ready)[0]


def gemm_beside(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor,
    tiles: Tiles | None = None,
    early: bool | None = None,
    ready: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `gemm`, and in the same launch the product with a second, plain weight [P, I]: [T, O] and [T, P], as x."""
    assert beside_PI.dtype == x_TI.dtype, f"linear: {x_TI.dtype} times a weight of {beside_PI.dtype}"
    return _launch(x_TI, weight_OI, scale_oi, beside_PI.contiguous(), x_TI.dtype, tiles, early, ready)


def _launch(
    x_TI: Tensor,
    weight_OI: Tensor,
    scale_oi: Tensor | None,
    beside_PI: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None,
    early: bool | None,
    ready: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    (tokens, width), height, device = x_TI.shape, weight_OI.shape[0], x_TI.device
    if tiles is None:
        found = properties(device)
        tiles = choose_tiles(tokens, height, width, scale_oi is not None, found.num_sms, found.shared_bytes)
    assert tiles.outputs <= 128 or scale_oi is None, f"linear: {tiles.outputs} outputs are more than a block"
    y_TO = torch.empty(tokens, height, dtype=dtype, device=device)
    weight, way = fp8_way(weight_OI.contiguous(), scale_oi)
    if way and tiles.ready and ready is None:
        ready = quantize_rows(x_TI, early)
    if ready is None:
        x_in, x_scale, stride = x_TI.contiguous(), weight, 0
    else:
        x_in, x_scale, stride = fp8_way(*ready)[0], ready[1], ready[1].stride(1)
    block = 128 if way else (64 if tiles.tokens >= 128 else 128) // (weight.element_size() // 2) ** 2
    blocks, columns = triton.cdiv(width, block), triton.cdiv(tokens, tiles.tokens)
    num_tiles, first, split_beside = triton.cdiv(height, tiles.outputs) * columns, 0, 0
    x_beside = beside = y_TP = y_TO
    if beside_PI is not None:
        x_beside, beside = x_TI.contiguous(), beside_PI
        y_TP = torch.empty(tokens, len(beside_PI), dtype=dtype, device=device)
        split_beside = split_of(width, BESIDE)
        first = triton.cdiv(len(beside_PI), tiles.outputs) * columns * split_beside
    parts = counters = y_TO
    if tiles.split > 1 or split_beside > 1:
        assert first + num_tiles <= MAX_TILES, f"linear: {first + num_tiles} tiles are split, at most {MAX_TILES}"
        size = (first + num_tiles * tiles.split) * tiles.outputs * tiles.tokens
        parts, counters = torch.empty(size, dtype=torch.float32, device=device), _counters(device)
    options = early_options(device, early, tokens)
    gemm_kernel[(first + num_tiles * tiles.split,)](
        x_in,
        x_scale,
        weight,
        weight if scale_oi is None else scale_oi,
        y_TO,
        parts,
        counters,
        x_beside,
        beside,
        y_TP,
        tokens,
        height,
        stride,
        y_TP.shape[1],
        first,
        WIDTH=width,
        BO=tiles.outputs,
        BT=tiles.tokens,
        BK=block,
        SPLIT=tiles.split,
        FP8=way,
        READY=ready is not None,
        AHEAD=lines_of(tiles.split, width, weight.element_size()) if tiles.ahead and options["EARLY"] else 0,
        HELD=0 if blocks % tiles.split else min(tiles.held, blocks // tiles.split),
        BESIDE=split_beside,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **options,
    )
    return y_TO, y_TP


def split_of(width: int, most: int) -> int:
    """The largest power of two that leaves each of so many shares of a row at least `most` inputs; 1 if none does."""
    split = 1
    while split * 2 * most <= width:
        split *= 2
    return split


def lines_of(split: int, width: int, element_size: int) -> int:
    """The power of two that holds the lines of 128 bytes in a program's share of a row."""
    return triton.next_power_of_2(-(-width * element_size // (128 * split)))
