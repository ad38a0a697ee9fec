"""All that is settled before a weight is read: the model's numbers, the device, the dtypes and the memory plan.

Knows no weight's value and no request. The engine is built from it, and `deltaserve inspect` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deltaserve.config import EngineConfig
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.hub import BUILTIN
from deltaserve.models.load import empty_model, has_mtp, quantized_units, resolve
from deltaserve.models.presets import preset_config
from deltaserve.ops.layout import BLOCK
from deltaserve.runner.device import GPU, choose_device, choose_dtype, free_memory, state_dtype
from deltaserve.runner.memory import GIB, SNAPSHOT_SHARE, MemoryPlan, footprint, solve, weight_bytes

AUTO_GUESSES = 3


@dataclass(frozen=True)
class Blueprint:
    """How the engine will be built."""

    path: Path
    """The checkpoint's folder; of a preset the built-in model's, for its tokenizer."""
    name: str
    """Of the model, for people."""
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype
    num_parameters: int
    memory: MemoryPlan
    max_num_batched_tokens: int
    """Tokens of one step."""
    keeps_prefixes: bool
    num_guesses: int
    """Most tokens that the MTP layer guesses ahead; 0 leaves it out."""
    quantized: frozenset[str]
    """The mixers and MLPs whose weights are held in FP8."""
    is_random: bool
    """Weights are drawn at random, and no file is read for them."""

    @classmethod
    def draw(cls, config: EngineConfig, gpu_memory: int | None = None) -> Blueprint:
        """Reads config.json and asks the machine. `gpu_memory`: as on a GPU with so many bytes free.

        Raises ValueError for what the model or the machine cannot honour.
        """
        is_random = config.preset is not None or config.load_format == "dummy"
        if config.preset is not None:
            path, name, content = BUILTIN, f"preset {config.preset}", preset_config(config.preset)
        else:
            path = resolve(config.model, config.revision, with_weights=not is_random)
            name, content = str(path), load_config_json(path)
        model = ModelConfig.from_hf(content)
        device = choose_device(config.device) if gpu_memory is None else GPU
        dtype = choose_dtype(config.dtype, device, model.checkpoint_dtype, is_here=gpu_memory is None)
        state = state_dtype(config.state_dtype)
        num_guesses = _num_guesses(config.speculative_tokens, None if is_random else path, device)
        config.refuse_pretence(is_random, num_guesses)
        quantized = quantized_units(None if is_random else path, model, num_guesses > 0, config.quantization)
        outline = empty_model(model, dtype, num_guesses > 0, quantized)
        sizes = footprint(model, dtype, state, weight_bytes(outline), num_guesses > 0)
        keeps_prefixes = config.prefix_cache == "on"
        free = free_memory(device) if gpu_memory is None else gpu_memory
        share = SNAPSHOT_SHARE if keeps_prefixes else 0.0
        memory = solve(config, model.max_position, sizes, device.type, free, 1 + num_guesses, share)
        return cls(
            path=path,
            name=name,
            model=model,
            device=device,
            dtype=dtype,
            state_dtype=state,
            num_parameters=outline.num_parameters,
            memory=memory,
            max_num_batched_tokens=config.limits(device.type)[1],
            keeps_prefixes=keeps_prefixes,
            num_guesses=num_guesses,
            quantized=quantized,
            is_random=is_random,
        )

    def measured(self, config: EngineConfig, free: int, reserve: int) -> Blueprint:
        """The same, its pools fitted anew: `free` bytes were there before the weights, and steps take `reserve`.

        Raises ValueError as `solve`.
        """
        sizes, keep = self.memory.sizes, self.memory.max_keep
        share = SNAPSHOT_SHARE if self.keeps_prefixes else 0.0
        memory = solve(config, self.model.max_position, sizes, self.device.type, free, keep, share, reserve)
        return replace(self, memory=memory)

    def lines(self) -> list[str]:
        """For people, one line each: the model, then the memory plan."""
        model = self.model
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.state_dtype)]
        mixers = (
            f"{model.num_layers} layers ({model.num_gdn_layers} gated delta net, {model.num_full_layers} attention)"
        )
        mlps = f"{model.mlp_kinds.count('moe')} with {model.num_experts} experts, {model.top_k} used"
        units = model.num_layers * 2 + 2 * (self.num_guesses > 0)
        in_fp8 = f", {len(self.quantized)} of {units} mixers and MLPs in FP8," if self.quantized else ""
        return [
            f"model {self.name}",
            f"  {self.num_parameters:,} parameters, {mixers}, {mlps}",
            f"  {dtypes[0]}{in_fp8} with {dtypes[1]} states on {self.device}, context of {model.max_position:,} tokens",
            *(["  weights drawn at random: for measuring, not for answers"] if self.is_random else []),
            *self.memory.lines(),
            self._prefix_line(),
            f"speculation on: up to {self.num_guesses} tokens ahead" if self.num_guesses else "speculation off",
        ]

    def _prefix_line(self) -> str:
        if not self.keeps_prefixes:
            return "prefix cache off"
        memory = self.memory
        return (
            f"prefix cache on: prefixes from {BLOCK} tokens are reused; {memory.num_snapshots:,} snapshots fit beside "
            f"{memory.max_num_seqs:,} requests, {memory.num_slots:,} when none runs"
        )


def _num_guesses(wish: str, path: Path | None, device: torch.device) -> int:
    """Without a path, of a random model. Raises ValueError when guesses are asked for and the checkpoint has no layer
    that makes them.
    """
    # On a CPU right guesses gain half of the speed and wrong ones cost some hundredths (docs/LOG.md): not unasked.
    if wish == "0" or (wish == "auto" and device.type == "cpu"):
        return 0
    if path is None:  # a layer can be drawn like the others; what it guesses is as random
        return 0 if wish == "auto" else int(wish)
    if has_mtp(path):
        return AUTO_GUESSES if wish == "auto" else int(wish)
    if wish == "auto":
        return 0
    raise ValueError(f"speculative_tokens is {wish}, but {path} has no MTP layer (mtp.* tensors); take 0 or auto")


def inspect(config: EngineConfig, gpu_memory_gib: float | None = None) -> str:
    """What would be built, without reading a weight, on this machine or on a GPU with so much memory free.

    Raises ValueError as `Blueprint.draw`, and for a checkpoint whose files do not hold what its config.json says.
    """
    if gpu_memory_gib is not None and not 0 < gpu_memory_gib < 1e6:
        raise ValueError(f"gpu_memory_gib is {gpu_memory_gib:g}; give the GiB that are free on a GPU, such as 138")
    if gpu_memory_gib is not None and config.device == "cpu":
        raise ValueError(f"gpu_memory_gib is {gpu_memory_gib:g}, but device is cpu; leave one of them out")
    gpu_memory = None if gpu_memory_gib is None else int(gpu_memory_gib * GIB)
    return "\n".join(Blueprint.draw(config, gpu_memory).lines())
