"""All that is settled before a weight is read: the model's numbers, the device, the dtypes and the memory plan.

Knows no weight's value and no request. The engine is built from it, and `deltaserve inspect` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deltaserve.config import EngineConfig
from deltaserve.model_config import ModelConfig, load_config_json
from deltaserve.models.load import empty_model, has_mtp, plan_loading, resolve
from deltaserve.ops.layout import BLOCK
from deltaserve.runner.device import choose_device, choose_dtype, free_memory, state_dtype
from deltaserve.runner.memory import SNAPSHOT_SHARE, MemoryPlan, footprint, solve, weight_bytes

AUTO_GUESSES = 3


@dataclass(frozen=True)
class Blueprint:
    """How the engine will be built."""

    path: Path
    """The checkpoint's folder."""
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype
    num_parameters: int
    memory: MemoryPlan
    keeps_prefixes: bool
    num_guesses: int
    """Most tokens that the MTP layer guesses ahead; 0 leaves it out."""

    @classmethod
    def draw(cls, config: EngineConfig) -> Blueprint:
        """Reads config.json and asks the machine. Raises ValueError for what the model or the machine cannot honour."""
        path = resolve(config.model, config.revision)
        model = ModelConfig.from_hf(load_config_json(path))
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device, model.checkpoint_dtype)
        state = state_dtype(config.state_dtype)
        num_guesses = _num_guesses(config.speculative_tokens, path, device)
        outline = empty_model(model, dtype, num_guesses > 0)
        sizes = footprint(model, dtype, state, weight_bytes(outline), num_guesses > 0)
        keeps_prefixes = config.prefix_cache == "on"
        free = free_memory(device)
        share = SNAPSHOT_SHARE if keeps_prefixes else 0.0
        memory = solve(config, model.max_position, sizes, device.type, free, 1 + num_guesses, share)
        num_parameters = sum(parameter.numel() for parameter in outline.parameters())
        return cls(path, model, device, dtype, state, num_parameters, memory, keeps_prefixes, num_guesses)

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
        return [
            f"model {self.path}",
            f"  {self.num_parameters:,} parameters, {mixers}, {mlps}",
            f"  {dtypes[0]} with {dtypes[1]} states on {self.device}, context of {model.max_position:,} tokens",
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


def _num_guesses(wish: str, path: Path, device: torch.device) -> int:
    """Raises ValueError when guesses are asked for and the checkpoint has no layer that makes them."""
    # On a CPU wrong guesses cost a fifth of the speed and right ones gain a quarter (docs/LOG.md): not unasked.
    if wish == "0" or (wish == "auto" and device.type == "cpu"):
        return 0
    if has_mtp(path):
        return AUTO_GUESSES if wish == "auto" else int(wish)
    if wish == "auto":
        return 0
    raise ValueError(f"speculative_tokens is {wish}, but {path} has no MTP layer (mtp.* tensors); take 0 or auto")


def inspect(config: EngineConfig) -> str:
    """What would be built, without reading a weight.

    Raises ValueError as `Blueprint.draw`, and for a checkpoint whose files do not hold what its config.json says.
    """
    blueprint = Blueprint.draw(config)
    plan_loading(blueprint.path, blueprint.model, blueprint.num_guesses > 0)
    return "\n".join(blueprint.lines())
