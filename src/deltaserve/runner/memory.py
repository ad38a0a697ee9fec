"""Bytes of a block, a slot and the pools, and how many of each fit: computed exactly, before anything loads.

Knows the shapes of a model and the wishes of a user. Does not know who uses which id.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.model_config import ModelConfig
from deltaserve.ops.layout import BLOCK

GIB = 1 << 30
CPU_CACHE_BYTES = 4 * GIB
GPU_CACHE_SHARE = 0.9
"""Of what the weights leave; the rest is for activations."""
MEASURED_CACHE_SHARE = 0.97
"""Of what the weights and the measured steps leave; the rest is for what the allocator cannot use."""

SNAPSHOT_SHARE = 0.25
"""Of what the requests' own slots and a block for each leave: for the states that the prefix cache keeps."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one model's parts."""

    weights: int
    block: int
    """KV of 64 tokens in all full-attention layers."""
    slot: int
    """Recurrent matrices and conv windows of all gated delta nets, after one token; with an MTP layer the hidden state
    too, which its next entry is made of."""


def footprint(
    model: ModelConfig, dtype: torch.dtype, state_dtype: torch.dtype, weights: int, with_mtp: bool = False
) -> Footprint:
    num_kv_layers = model.num_full_layers + with_mtp
    state = model.gdn_v_heads * model.gdn_k_dim * model.gdn_v_dim * state_dtype.itemsize
    window = (model.conv_width - 1) * model.conv_dim * dtype.itemsize
    return Footprint(
        weights=weights,
        block=num_kv_layers * 2 * BLOCK * model.num_kv_heads * model.head_dim * dtype.itemsize,
        slot=model.num_gdn_layers * (state + window) + with_mtp * model.hidden_size * dtype.itemsize,
    )


def weight_bytes(module: torch.nn.Module) -> int:
    """Parameters and buffers, each once. The module may be on the meta device, where nothing is allocated."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class MemoryPlan:
    """How many ids there are, and what they cost. `notes` says what was reduced to fit, and how to get more."""

    sizes: Footprint
    device: str
    free: int
    num_blocks: int
    num_slots: int
    max_num_seqs: int
    max_model_len: int
    max_keep: int
    notes: tuple[str, ...] = ()
    reserve: int = 0
    """Bytes that steps and graphs take beside weights and pools; 0 where that was not measured."""

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """Blocks and slots: all that the cache's bookkeeping needs to know."""
        return self.num_blocks, self.num_slots

    @property
    def num_snapshots(self) -> int:
        """States that can be kept while as many requests run as may."""
        return self.num_slots - self.max_num_seqs * self.max_keep

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.sizes.block + self.num_slots * self.sizes.slot

    def lines(self) -> list[str]:
        """The plan as a table of plain text, one line per pool."""
        sizes, per_request = self.sizes, blocks_of(self.max_model_len)
        rows = [
            ("weights", "", size(sizes.weights), ""),
            (
                "KV blocks",
                f"{self.num_blocks:,} x {size(sizes.block)}",
                size(self.num_blocks * sizes.block),
                f"{self.num_blocks * BLOCK:,} tokens: {self.num_blocks // per_request:,} "
                f"requests of {self.max_model_len:,} tokens",
            ),
            (
                "state slots",
                f"{self.num_slots:,} x {size(sizes.slot)}",
                size(self.num_slots * sizes.slot),
                f"{self.num_slots // self.max_keep:,} requests of any length"
                if self.num_snapshots < self.max_keep
                else f"{self.max_num_seqs:,} requests of any length and {self.num_snapshots:,} snapshots",
            ),
        ]
        if self.reserve:
            rows.append(("steps", "", size(self.reserve), "largest ones as measured, and graphs"))
        together = size(sizes.weights + self.cache_bytes + self.reserve)
        rows.append(("together", "", together, f"of {size(self.free)} free on the {self.device}"))
        table = [f"  {name:<12}{count:<22}{total:>12}   {meaning}".rstrip() for name, count, total, meaning in rows]
        limits = f"  at most {self.max_num_seqs:,} requests at once, {self.max_model_len:,} tokens each"
        return ["memory plan", *table, limits, *(f"  note: {note}" for note in self.notes)]


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def size(count: int) -> str:
    """Bytes for people: three digits that matter."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def solve(
    config: EngineConfig,
    max_position: int,
    sizes: Footprint,
    device: str,
    free: int,
    max_keep: int = 1,
    snapshot_share: float = 0.0,
    reserve: int = 0,
) -> MemoryPlan:
    """Fit the pools into what the weights and `reserve` leave; `snapshot_share` of what is left open goes to further
    slots.

    What the user left open is made smaller until it fits (a note tells). What the user chose is kept or refused.

    Raises ValueError for a choice that cannot be kept, naming it, its limit and the largest legal value; and when not
    even the weights and one request fit.
    """
    chosen = _Chosen.of(config, max_keep)
    most, budget = _budget(config, sizes, device, free, reserve)
    _refuse_contradictions(chosen, max_position)
    _refuse_beyond(chosen, sizes, most)
    blocks, slots = chosen.least()
    left = max(0, budget - blocks * sizes.block - slots * sizes.slot)
    longest = blocks_of(chosen.model_len or max_position)

    num_seqs, (usual, _) = chosen.num_seqs, config.limits(device)
    if num_seqs is None:
        unit = (0 if chosen.num_slots else max_keep * sizes.slot) + (0 if chosen.num_blocks else sizes.block)
        others = 0 if chosen.num_blocks else max(0, longest - blocks) * sizes.block
        num_seqs = 1 + max(left // 2, left - others) // max(1, unit)
        num_seqs = min(num_seqs, usual, (chosen.num_slots or 1 << 60) // max_keep)
        num_seqs = min(num_seqs, chosen.num_blocks or num_seqs)
        left -= (num_seqs - 1) * unit
        blocks += num_seqs - 1
    snapshots = 0 if chosen.num_slots else int(left * snapshot_share) // max(1, sizes.slot)
    snapshots = min(snapshots, chosen.num_blocks or num_seqs * longest)  # one after each block is all there can be
    left -= snapshots * sizes.slot
    num_slots = chosen.num_slots or num_seqs * max_keep + snapshots
    num_blocks = chosen.num_blocks or min(num_seqs * longest, blocks + left // max(1, sizes.block))
    max_model_len = chosen.model_len or min(max_position, num_blocks * BLOCK)

    notes = []
    pools = f"there is room for {num_blocks:,} KV blocks and {num_slots:,} state slots"
    if chosen.num_seqs is None and num_seqs < usual:
        notes.append(f"max_num_seqs is {num_seqs}, not {usual}: {pools}")
    if chosen.model_len is None and max_model_len < max_position:
        notes.append(f"max_model_len is {max_model_len:,}, not the model's {max_position:,}: {pools}")
    return MemoryPlan(
        sizes, device, free, num_blocks, num_slots, num_seqs, max_model_len, max_keep, tuple(notes), reserve
    )


@dataclass(frozen=True)
class _Chosen:
    """The sizes that the user chose; None is left open."""

    num_seqs: int | None
    model_len: int | None
    num_blocks: int | None
    num_slots: int | None
    max_keep: int

    @classmethod
    def of(cls, config: EngineConfig, max_keep: int) -> _Chosen:
        return cls(config.max_num_seqs, config.max_model_len, config.num_blocks, config.num_slots, max_keep)

    def least(self) -> tuple[int, int]:
        """The fewest blocks and slots that keep every choice: a request of full length, and a block for each one."""
        num_seqs = self.num_seqs or 1
        blocks = self.num_blocks or max(blocks_of(self.model_len or 1), num_seqs)
        return blocks, self.num_slots or num_seqs * self.max_keep


def _budget(config: EngineConfig, sizes: Footprint, device: str, free: int, reserve: int) -> tuple[int, int]:
    """Bytes that the pools may take at most, and bytes that they take when left to themselves."""
    most = free - sizes.weights - reserve
    if most < 0:
        steps, way = "", "free some, or take a smaller dtype or model"
        if reserve:
            steps, way = f" and the largest steps {size(reserve)}", f"{way}, or lower max_num_batched_tokens"
        raise ValueError(
            f"the weights take {size(sizes.weights)}{steps}, but only {size(free)} are free on the {device}; {way}"
        )
    if config.cache_memory_gib is not None:
        if config.cache_memory_gib * GIB > most:
            raise ValueError(
                f"cache_memory_gib is {config.cache_memory_gib:g}, but the weights leave {size(most)} of the "
                f"{device}'s {size(free)}; the largest legal value is {most * 100 // GIB / 100:g}"
            )
        most = int(config.cache_memory_gib * GIB)
        return most, most
    share = MEASURED_CACHE_SHARE if reserve else GPU_CACHE_SHARE
    return most, min(CPU_CACHE_BYTES, most // 2) if device == "cpu" else int(most * share)


def _refuse_contradictions(chosen: _Chosen, max_position: int) -> None:
    if chosen.model_len is not None and chosen.model_len > max_position:
        raise ValueError(
            f"max_model_len is {chosen.model_len}, beyond the model's context of {max_position} tokens, "
            "which is the largest legal value"
        )
    if chosen.model_len is not None and chosen.num_blocks and blocks_of(chosen.model_len) > chosen.num_blocks:
        raise ValueError(
            f"max_model_len is {chosen.model_len}, but num_blocks {chosen.num_blocks} holds "
            f"{chosen.num_blocks * BLOCK} tokens, which is the largest legal value; raise num_blocks or lower it"
        )
    if chosen.num_slots is not None and (chosen.num_seqs or 1) * chosen.max_keep > chosen.num_slots:
        raise ValueError(
            f"max_num_seqs is {chosen.num_seqs or 1}, but num_slots {chosen.num_slots} serves at most "
            f"{chosen.num_slots // chosen.max_keep} requests, which is the largest legal value; "
            f"raise num_slots or lower it (a request takes {chosen.max_keep}: one, and one for each guess)"
        )


def _refuse_beyond(chosen: _Chosen, sizes: Footprint, most: int) -> None:
    """Names the first choice that alone can be lowered until the pools fit."""

    def excess(choice: _Chosen) -> int:
        blocks, slots = choice.least()
        return blocks * sizes.block + slots * sizes.slot - most

    if excess(chosen) <= 0:
        return
    blocks, slots = chosen.least()
    story = (
        f"{blocks:,} KV blocks of {size(sizes.block)} and {slots:,} state slots of {size(sizes.slot)} take "
        f"{size(excess(chosen) + most)}, and there are {size(most)} for the cache"
    )
    names = {
        "model_len": "max_model_len",
        "num_blocks": "num_blocks",
        "num_seqs": "max_num_seqs",
        "num_slots": "num_slots",
    }
    kept = {field: value for field in names if (value := getattr(chosen, field)) is not None}
    for field, value in kept.items():
        legal = bisect_left(range(1, value + 1), 1, key=lambda v: excess(replace(chosen, **{field: v})))
        if legal:
            raise ValueError(f"{names[field]} is {value}: {story}; the largest legal value is {legal}")
    if kept:
        wishes = ", ".join(f"{names[field]} {value}" for field, value in kept.items())
        raise ValueError(f"{wishes}: {story}; leave some of them out, or make more memory free")
    raise ValueError(f"not one request fits: {story}; free some memory, or take a smaller dtype or model")


@dataclass(frozen=True)
class Pools:
    """The cache's memory, one tensor per layer of a kind, in the layers' order.

    Name     Shape                     Dtype
    kv       [2, blocks, BLOCK, G, D]  the model's; keys, then values
    conv     [slots, W - 1, C]         the model's
    state    [slots, Hv, K, V]         chosen apart
    hidden   [slots + 1, D]            the model's; one with an MTP layer, else none. The last row is nobody's: steps of
                                       fixed shapes write there what is not to be kept

    An MTP layer's keys and values are the last of `kv`.
    """

    kv: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...] = ()

    @property
    def per_slot(self) -> tuple[Tensor, ...]:
        """All pools that are indexed by slot."""
        return (*self.conv, *self.state, *(hidden_SD[:-1] for hidden_SD in self.hidden))

    def fill_block(self, block: int, value: float) -> None:
        for pool in self.kv:
            pool[:, block] = value

    def fill_slot(self, slot: int, value: float) -> None:
        for pool in self.per_slot:
            pool[slot] = value


def allocate(
    model: ModelConfig,
    plan: MemoryPlan,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    fill: float | None = None,
    with_mtp: bool = False,
) -> Pools:
    """The pools of a plan. Nothing is cleared: whoever gets an id writes before it reads. `fill` is for tests."""
    device = torch.device(plan.device)
    kv = (2, plan.num_blocks, BLOCK, model.num_kv_heads, model.head_dim)
    conv = (plan.num_slots, model.conv_width - 1, model.conv_dim)
    state = (plan.num_slots, model.gdn_v_heads, model.gdn_k_dim, model.gdn_v_dim)
    pools = Pools(
        kv=tuple(torch.empty(kv, dtype=dtype, device=device) for _ in range(model.num_full_layers + with_mtp)),
        conv=tuple(torch.empty(conv, dtype=dtype, device=device) for _ in range(model.num_gdn_layers)),
        state=tuple(torch.empty(state, dtype=state_dtype, device=device) for _ in range(model.num_gdn_layers)),
        hidden=(torch.empty(plan.num_slots + 1, model.hidden_size, dtype=dtype, device=device),) if with_mtp else (),
    )
    if fill is not None:
        for pool in (*pools.kv, *pools.per_slot):
            pool.fill_(fill)
    return pools
