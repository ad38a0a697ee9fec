"""From a loaded model to a runner that is ready: pools, and on a GPU the warm-up that sizes them. Knows no request."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

import torch

from deltaserve.config import EngineConfig
from deltaserve.ops import cpu
from deltaserve.runner.blueprint import Blueprint
from deltaserve.runner.device import free_memory
from deltaserve.runner.graphs import StepGraphs
from deltaserve.runner.memory import MemoryPlan, allocate, blocks_of
from deltaserve.runner.model import Model
from deltaserve.runner.runner import Runner
from deltaserve.runner.self_check import complaint, favourites
from deltaserve.runner.warmup import WarmUp

logger = logging.getLogger(__name__)

GRAPH_BYTES = 16 << 20
"""What the driver keeps for one graph of a large model, at most."""


def make_runner(
    config: EngineConfig, blueprint: Blueprint, model: Model, fill: float | None
) -> tuple[Blueprint, Runner]:
    """A runner that can be given plans, and the blueprint with the memory that it really has.

    Raises ValueError for sizes that the user chose and that do not fit.
    """
    on_cpu = blueprint.device.type == "cpu"
    if on_cpu and blueprint.dtype == torch.float32:
        cpu.prepare()
    blueprint = blueprint if on_cpu else _measure(config, blueprint, model)
    if blueprint.num_guesses and not blueprint.is_random:
        blueprint = _check_guesses(blueprint, model)
    runner = _runner(blueprint, model, blueprint.memory, fill)
    if config.pretended and blueprint.num_guesses:
        logger.warning("guesses count as right at random, as was asked: for measuring, not for answers")
        runner.sampler.pretend(config.pretended)
    if on_cpu:
        return blueprint, runner
    if not config.enforce_eager and blueprint.dtype != torch.float64:
        graphs, begin = _graphs(blueprint, runner), time.perf_counter()
        graphs.record()
        runner.use_graphs(graphs)
        logger.info("recorded graphs in %.1f s", time.perf_counter() - begin)
    return blueprint, runner


def _measure(config: EngineConfig, blueprint: Blueprint, model: Model) -> Blueprint:
    """Compiles the kernels and runs the largest steps on pools that hold nothing else; then fits the real pools."""
    most = min(blueprint.max_num_batched_tokens, blueprint.memory.max_model_len)
    trial = replace(
        blueprint.memory,
        num_blocks=blocks_of(most),
        num_slots=1,
        max_model_len=most,
        max_keep=blueprint.memory.max_keep,
    )
    runner = _runner(blueprint, model, trial, fill=0.0)
    mixes = config.enforce_eager or blueprint.dtype == torch.float64
    warm_up = WarmUp(runner, blueprint.max_num_batched_tokens, mixes)
    if blueprint.dtype != torch.float64:
        warm_up.compile()
    begin = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    warm_up.run()
    steps = torch.cuda.max_memory_allocated() - before
    logger.info("ran steps of all sizes in %.1f s", time.perf_counter() - begin)
    num_graphs = 0 if config.enforce_eager else len(_graphs(blueprint, runner).shapes)
    num_graphs += num_graphs // 16 if blueprint.num_guesses else 0  # many more, of one layer each
    del runner, warm_up
    torch.cuda.empty_cache()
    free = free_memory(blueprint.device) + blueprint.memory.sizes.weights
    graphs = 0 if config.enforce_eager else steps + num_graphs * GRAPH_BYTES  # in memory of their own
    return blueprint.measured(config, free, reserve=steps + graphs)


def _check_guesses(blueprint: Blueprint, model: Model) -> Blueprint:
    """The blueprint without guesses, where the MTP layer gives no numbers. One that guesses badly costs no more than
    the few tries that show it."""
    memory = replace(blueprint.memory, num_blocks=1, num_slots=1, device=str(blueprint.device))
    pools = allocate(blueprint.model, memory, blueprint.dtype, blueprint.state_dtype, 0.0, with_mtp=True)
    found = favourites(model, blueprint.model.vocab_size, pools)
    fault = complaint(found, blueprint.model.vocab_size)
    if fault is not None:
        logger.warning(fault)
    return replace(blueprint, num_guesses=0) if math.isnan(found) else blueprint


def _runner(blueprint: Blueprint, model: Model, memory: MemoryPlan, fill: float | None) -> Runner:
    with_mtp = blueprint.num_guesses > 0
    pools = allocate(blueprint.model, memory, blueprint.dtype, blueprint.state_dtype, fill, with_mtp)
    memory = replace(memory, device=str(blueprint.device))
    return Runner(model, blueprint.model.vocab_size, memory, pools, blueprint.dtype)


def _graphs(blueprint: Blueprint, runner: Runner) -> StepGraphs:
    return StepGraphs(
        runner.model,
        runner.pools,
        runner.seats,
        runner.inputs.recent,
        runner.inputs.gained,
        lengths=range(1, 2 + blueprint.num_guesses),
        max_tokens=min(blueprint.max_num_batched_tokens, len(runner.seats.num_blocks) * runner.seats.max_len),
        hidden_size=blueprint.model.hidden_size,
        dtype=blueprint.dtype,
    )
