"""The gated delta rule in torch: token by token for steps, in chunks for prompts (arXiv 2412.06464).

Within a chunk, with G the running sum of g and D[i, j] = exp(G_i - G_j) for j <= i, the corrections u obey

    u_i = beta_i * (v_i - exp(G_i) * S^T k_i - sum over j < i of D[i, j] * (k_i . k_j) * u_j)

which is a unit lower triangular system: the WY form. It is inverted for all chunks of all rows at once; what remains
sequential are the products with the state, chunk by chunk.

Shape letters beyond api.py's: M chunks of all rows, C places in a chunk, R value heads per key head, X = B * Hv.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from deltaserve.ops.layout import Kept, Layout, Segment, keep_slots, kept_by_place, read_slots, slot_index
from deltaserve.ops.numeric import cast, constant, wide_dtype

CHUNK = 16
"""Tokens in one chunk: few, because what a CPU does with pairs of tokens is not matrix products alone. Fixed, so that a
row's rounding does not depend on its neighbours."""


@dataclass(frozen=True)
class Tokens:
    """A step's inputs, normalised and gated, in the dtype of the computation."""

    qk: Tensor
    """[2, T, Hk, K]: of length 1; q is still to be scaled by `scale`."""
    v: Tensor
    """[T, Hv, V]"""
    g: Tensor
    """[T, Hv]: log of the decay, at most 0."""
    beta: Tensor
    """[T, Hv]"""
    dtype: torch.dtype
    """Of the output."""

    @property
    def scale(self) -> float:
        return float(self.qk.shape[-1] ** -0.5)

    @property
    def repeats(self) -> int:
        """R"""
        return self.v.shape[1] // self.qk.shape[2]

    def part(self, segment: Segment) -> Tokens:
        """The tokens of one segment."""
        if segment.token_end - segment.token_start == self.v.shape[0]:
            return self
        qk = self.qk[:, segment.token_start : segment.token_end]
        return Tokens(qk, segment.cut(self.v), segment.cut(self.g), segment.cut(self.beta), self.dtype)


def prepare(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TVD: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    A_log_V: Tensor,
    dt_bias_V: Tensor,
) -> Tokens:
    wide = wide_dtype(v_TVD.dtype)
    a_TV, A_log_V, dt_bias_V = cast(a_TV, wide), cast(A_log_V, wide), cast(dt_bias_V, wide)
    g_TV = functional.softplus(a_TV + dt_bias_V) * -A_log_V.exp()
    qk = cast(torch.stack([q_THK, k_THK]), wide)
    # hypot(|x|, 1e-3) is sqrt(|x|^2 + 1e-6).
    length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
    qk = qk / torch.hypot(length, constant(1e-3, wide, qk.device))
    return Tokens(qk, cast(v_TVD, wide), g_TV, cast(b_TV, wide).sigmoid(), v_TVD.dtype)


# ---- steps ----


def step(x: Tokens, pool_SVKD: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """The recurrence itself. All rows have `max_len` tokens, N; those of one place are computed together."""
    x, index, length = x.part(segment), layout.once(slot_index, segment), segment.max_len
    qk = x.qk.repeat_interleave(x.repeats, dim=2) if x.repeats > 1 else x.qk
    places = zip(*(_by_place(part, length) for part in (*qk.unbind(0), x.v, x.g.exp(), x.beta)), strict=True)
    in_place = index.in_place if pool_SVKD.dtype == x.v.dtype else None
    state_BVKD = read_slots(pool_SVKD, index) if in_place is None else pool_SVKD[in_place]
    state_XKD = cast(state_BVKD, x.v.dtype).view(-1, *pool_SVKD.shape[2:])
    rows_heads = state_XKD.shape[0]
    outputs = []
    for parts, kept in zip(places, layout.once(kept_by_place, segment), strict=True):
        q_X1K, k_X1K, v_X1D, decay_X11, beta_X11 = (part.reshape(rows_heads, 1, -1) for part in parts)
        state_XKD.mul_(decay_X11)
        u_X1D = torch.baddbmm(v_X1D, k_X1K, state_XKD, alpha=-1).mul_(beta_X11)
        state_XKD.addcmul_(k_X1K.transpose(1, 2), u_X1D)
        outputs.append(torch.baddbmm(u_X1D, q_X1K, state_XKD, beta=0, alpha=x.scale))
        if in_place is None:
            keep_slots(pool_SVKD, state_XKD.view(-1, *pool_SVKD.shape[1:]), kept)
    if length == 1:
        return cast(outputs[0].view(x.v.shape), x.dtype)
    o_BVND = torch.cat(outputs, dim=1).view(-1, x.v.shape[1], length, x.v.shape[2])
    return cast(o_BVND.transpose(1, 2).reshape(x.v.shape), x.dtype)


def _by_place(part: Tensor, length: int) -> tuple[Tensor, ...]:
    """[rows * length, ...] as `length` times [rows, ...]."""
    return (part,) if length == 1 else part.view(-1, length, *part.shape[1:]).unbind(1)


# ---- chunks ----


@dataclass(frozen=True)
class ChunkIndex:
    """How the rows of a segment are cut into chunks.

    Rows are sorted by length, the longest first: a row's number among the sorted is its turn. Chunks are sorted by
    their number within the row, then by turn: the chunks number c of all rows that have one are neighbours, and belong
    to the first turns.
    """

    row_of_turn: Tensor
    """int64 [rows]"""
    bounds: list[int]
    """Chunks number c are `bounds[c]` to `bounds[c + 1]`."""
    place: Tensor
    """int64 [tokens]: chunk * CHUNK + place in the chunk."""
    token: Tensor
    """int64 [places]: the token of a place, any where there is none."""
    padding: Tensor
    """int64: the places where there is none."""
    end: Kept
    """The turns whose state is kept after the last token, as rows."""
    inner_place: Tensor
    """int64: places of the other tokens after which the state is kept, in `inner_slot`."""
    inner_slot: Tensor
    inner_by_number: dict[int, tuple[Tensor, Tensor]]
    """For c: which of the inner places are in chunks number c, if any is, and the turns of their rows."""


def chunk(x: Tokens, pool_SVKD: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """Rows of any length, cut into chunks; the tail of a row's last chunk is padded by tokens that change nothing.

    All chunks at once: the tensors below have M, Hk and R (or 1) in front of what their names say.
    """
    x, index = x.part(segment), layout.once(chunk_index, segment)
    wide, device, k_heads = x.v.dtype, x.v.device, x.qk.shape[2]

    def chunks(part: Tensor) -> Tensor:
        """[tokens, heads, ...] to [M, Hk, R or 1, C, ...]."""
        padded = part.index_select(0, index.token).index_fill_(0, index.padding, 0)
        return padded.view(-1, CHUNK, k_heads, part.shape[1] // k_heads, *part.shape[2:]).movedim(1, 3).contiguous()

    q_CK, k_CK, v_CD, beta_C1 = (chunks(part) for part in (x.qk[0] * x.scale, x.qk[1], x.v, x.beta[..., None]))
    sum_C = chunks(x.g).double().cumsum(-1)  # fp32 would lose a small decay beside a large sum
    between_CC = sum_C[..., :, None] - sum_C[..., None, :]
    decay_CC, decay_C1 = between_CC.to(wide).exp_().tril_(), sum_C.exp().to(wide)[..., None]

    system_CC = (k_CK @ k_CK.transpose(-1, -2) * decay_CC).mul_(beta_C1)
    identity_CC = torch.eye(CHUNK, dtype=wide, device=device)
    # The transpose is a matrix as LAPACK stores it, and is solved from the right without a copy.
    inverse_CC = torch.linalg.solve_triangular(system_CC.mT, identity_CC, upper=True, left=False, unitriangular=True).mT
    u_CD, w_CK = inverse_CC @ (v_CD * beta_C1), inverse_CC @ (k_CK * (decay_C1 * beta_C1))

    state_BVKD = read_slots(pool_SVKD, layout.once(slot_index, segment)).index_select(0, index.row_of_turn).to(wide)
    to_end_CK = k_CK * decay_CC[..., -1, :, None]
    o_CD, before_IVKD = _pass_over_states(
        state_BVKD, u_CD, w_CK, q_CK * decay_C1, to_end_CK, decay_C1[..., -1:, :], index
    )
    within_CC = q_CK @ k_CK.transpose(-1, -2) * decay_CC
    o_CD.flatten(0, 2).baddbmm_(within_CC.flatten(0, 2), u_CD.flatten(0, 2))

    keep_slots(pool_SVKD, state_BVKD, index.end)
    if index.inner_by_number:
        m, c = index.inner_place // CHUNK, index.inner_place % CHUNK
        until_CK = k_CK[m] * decay_CC[m, :, :, c, :, None]
        added_IVKD = (until_CK.transpose(-1, -2) @ u_CD[m]).view_as(before_IVKD)
        decayed_IVKD = before_IVKD * decay_C1[m, :, :, c].view(-1, state_BVKD.shape[1], 1, 1)
        keep_slots(pool_SVKD, decayed_IVKD + added_IVKD, Kept(None, index.inner_slot))
    return cast(o_CD.movedim(3, 1).reshape(-1, *x.v.shape[1:]).index_select(0, index.place), x.dtype)


def _pass_over_states(
    state_BVKD: Tensor, u_CD: Tensor, w_CK: Tensor, q_CK: Tensor, k_CK: Tensor, decay_11: Tensor, index: ChunkIndex
) -> tuple[Tensor, Tensor]:
    """Carry the states through their chunks, all rows at once; corrects `u` and moves `state` to the end, in place.

    q is decayed from the chunk's start and k to its end; decay is the whole chunk's. Returns what the outputs owe to
    the states, and the states before the chunks of the inner places [I, Hv, K, V].
    """
    heads = state_BVKD.shape[1]
    before_IVKD = state_BVKD.new_empty(index.inner_place.shape[0], *state_BVKD.shape[1:])
    o_CD = torch.empty_like(u_CD)
    state = state_BVKD.flatten(0, 1)
    u, w, q, k, decay, o = (part.flatten(0, 2) for part in (u_CD, w_CK, q_CK, k_CK, decay_11, o_CD))
    for number, (first, last) in enumerate(pairwise(index.bounds)):
        here, active = slice(first * heads, last * heads), state[: (last - first) * heads]
        if number in index.inner_by_number:
            inner, turn = index.inner_by_number[number]
            before_IVKD[inner] = state_BVKD[turn]
        u[here].baddbmm_(w[here], active, alpha=-1)
        torch.bmm(q[here], active, out=o[here])
        active.mul_(decay[here]).baddbmm_(k[here].transpose(1, 2), u[here])
    return o_CD, before_IVKD


def chunk_index(layout: Layout, segment: Segment) -> ChunkIndex:
    index = layout.once(slot_index, segment)
    device = segment.cu_seqlens.device
    lengths = segment.cu_seqlens.diff().long()
    row_of_turn = lengths.argsort(descending=True, stable=True)
    turn_of_row = row_of_turn.argsort()
    num_chunks = -(-lengths // CHUNK)
    most = int(num_chunks.max())
    active = (num_chunks[:, None] > torch.arange(most, device=device)).sum(0)
    bound = torch.cat([active.new_zeros(1), active.cumsum(0)])

    row = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    token = torch.arange(len(row), device=device) - segment.cu_seqlens.long()[row]
    place = (bound[token // CHUNK] + turn_of_row[row]) * CHUNK + token % CHUNK

    bounds: list[int] = bound.tolist()
    token_of_place = place.new_full((bounds[-1] * CHUNK,), -1)
    token_of_place[place] = torch.arange(len(row), device=device)

    kept_row, kept_token = row[index.kept_token], token[index.kept_token]
    is_end = kept_token == lengths[kept_row] - 1
    inner_turn, inner_number = turn_of_row[kept_row][~is_end], kept_token[~is_end] // CHUNK
    inner_by_number = {}
    for number in set(inner_number.tolist()):
        inner = (inner_number == number).nonzero().squeeze(1)
        inner_by_number[number] = (inner, inner_turn[inner])
    return ChunkIndex(
        row_of_turn=row_of_turn,
        bounds=bounds,
        place=place,
        token=token_of_place.clamp(min=0),
        padding=(token_of_place < 0).nonzero().squeeze(1),
        end=Kept(turn_of_row[kept_row][is_end], index.kept_slot[is_end]),
        inner_place=place[index.kept_token][~is_end],
        inner_slot=index.kept_slot[~is_end],
        inner_by_number=inner_by_number,
    )
