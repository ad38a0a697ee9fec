"""Those who obey the plan. Today one runner in this process; every rank's runner later, behind the same call."""

from __future__ import annotations

import logging
import time

import torch

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Pending, Plan, Result
from deltaserve.models.load import load_model, random_model
from deltaserve.runner.blueprint import Blueprint
from deltaserve.runner.device import choose_threads
from deltaserve.runner.runner import Runner
from deltaserve.runner.setup import make_runner

logger = logging.getLogger(__name__)


class Workers:
    """Loads the model, takes the pools' memory, runs plans."""

    def __init__(self, config: EngineConfig, blueprint: Blueprint, fill: float | None = None) -> None:
        """`fill` is written to all of the pools; without it they hold whatever the memory held."""
        it = blueprint
        self._threads_before = torch.get_num_threads()
        if it.device.type == "cpu":
            torch.set_num_threads(choose_threads(config.num_threads, it.memory.sizes.weights))
        with_mtp, begin = it.num_guesses > 0, time.perf_counter()
        if it.is_random:
            model = random_model(it.model, it.dtype, it.device, with_mtp, it.quantized)
        else:
            model = load_model(it.path, it.model, it.dtype, it.device, True, with_mtp, config.quantization)
        if it.device.type != "cpu":
            torch.accelerator.synchronize()
        logger.info("%s weights in %.1f s", "drew" if it.is_random else "loaded", time.perf_counter() - begin)
        self.runner: Runner | None
        self.blueprint, self.runner = make_runner(config, it, model, fill)

    @property
    def most_prompts(self) -> int:
        """Of a step of prompts alone, which has a graph up to so many; 0: there are no graphs. Mixed steps have none,
        and keep the host busy for longer than the device."""
        graphs = None if self.runner is None else self.runner.graphs
        return 0 if graphs is None else graphs.prompt_rows - 1

    def launch(self, plan: Plan) -> Pending:
        """Begin a step; its outcome can be had later. Steps are computed in the order of their launch."""
        assert self.runner is not None, "the workers are closed"
        return self.runner.launch(plan)

    def step(self, plan: Plan) -> Result:
        return self.launch(plan).result()

    def close(self) -> None:
        """Lets go of the model and the pools, and of the say in how many threads torch uses. Harmless when repeated."""
        if self.runner is not None:
            torch.set_num_threads(self._threads_before)
        self.runner = None
