"""Runs transformers' model beside the engine on the same tokens and tells, layer by layer, how far apart they are.

The engine runs as it serves: through the scheduler, the cache and the runner, once with the whole prompt in one step
and once with it cut into chunks. Only one of the two models is in memory at a time. Knows no text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from deltaserve.cache.manager import CacheManager
from deltaserve.config import EngineConfig
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.workers import Workers
from deltaserve.runner.blueprint import Blueprint
from deltaserve.scheduler.scheduler import Scheduler

PROMPT_LEN = 200
"""Tokens of the prompt that is drawn when none is given."""
UNLIKE = (
    "activations are rounded to FP8 here, and on a CPU not by transformers: --quantization none compares the same sums"
)


@dataclass(frozen=True)
class LayerDifference:
    """The largest absolute differences between the two models' outputs of one layer, over all tokens and channels."""

    layer: str
    scale: float
    """The largest absolute value that transformers computes there."""
    whole: float
    """Prompt computed in one step."""
    chunked: float
    """Prompt computed in steps of `chunk` tokens."""
    decode: float
    """Generated tokens, one step each."""


@dataclass(frozen=True)
class Comparison:
    """One row per layer, then the final norm and the logits."""

    rows: list[LayerDifference]
    num_prompt: int
    num_decode: int
    chunk: int
    num_equal: int
    """Generated tokens that transformers would have chosen too, greedy, after the same tokens."""
    is_unlike: bool = False
    """The engine computes in FP8 and transformers does not, as it has no such products for a CPU."""

    def lines(self) -> list[str]:
        """A table of plain text."""
        head = f"{self.num_prompt} prompt tokens (whole, and {self.chunk} a step), {self.num_decode} generated"
        rows = [
            f"{row.layer:<34}{row.scale:>10.3g}{row.whole:>12.3g}{row.chunked:>12.3g}{row.decode:>12.3g}"
            for row in self.rows
        ]
        return [
            f"largest difference from transformers: {head}",
            f"{'output of':<34}{'largest':>10}{'whole':>12}{'chunked':>12}{'decode':>12}",
            *rows,
            f"greedy tokens equal: {self.num_equal} of {self.num_decode}",
            *([UNLIKE] if self.is_unlike else []),
        ]


@dataclass
class Outputs:
    """What one run of one model computed, for all its tokens, on the CPU."""

    token_ids: list[int]
    layers: list[Tensor] = field(default_factory=list)
    """[tokens, D] each: the residual stream after each layer, then the final norm; [tokens, V]: the logits."""


def compare(
    config: EngineConfig, prompt: Sequence[int] | None = None, num_decode: int = 16, chunk: int = 24
) -> Comparison:
    """Compare the model of `config` with transformers' in the same dtype and on the same device.

    `prompt` is token ids (without one, random ids); `num_decode` greedy tokens follow it. The engine's limits in
    `config` do not matter.

    Raises ValueError for a model, a prompt or a number that cannot be run.
    """
    if num_decode < 1 or chunk < 1:
        raise ValueError(f"num_decode is {num_decode} and chunk {chunk}; both must be at least 1")
    num_prompt = PROMPT_LEN if prompt is None else len(prompt)
    config = replace(
        config,
        max_num_seqs=1,
        max_model_len=num_prompt + num_decode + 1,
        max_num_batched_tokens=max(1, num_prompt),
        num_blocks=None,
        num_slots=None,
        speculative_tokens="0",
    )
    blueprint = Blueprint.draw(config)
    if blueprint.is_random:
        raise ValueError("compare needs a checkpoint's weights: leave out preset and load_format dummy")
    prompt_ids = _prompt(prompt, blueprint.model.vocab_size)
    whole, chunked = _run_ours(config, blueprint, prompt_ids, num_decode, chunk)
    assert len(whole.token_ids) == num_prompt + num_decode, "the engine ended the request early"
    theirs = _run_theirs(blueprint, whole.token_ids)
    rows = [
        LayerDifference(
            layer=name,
            scale=_largest(expected),
            whole=_largest(ours[:num_prompt] - expected[:num_prompt]),
            chunked=_largest(cut - expected[:num_prompt]),
            decode=_largest(ours[num_prompt:] - expected[num_prompt:]),
        )
        for name, ours, cut, expected in zip(
            _layer_names(blueprint), whole.layers, chunked.layers, theirs.layers, strict=True
        )
    ]
    chosen = theirs.layers[-1][num_prompt - 1 : -1].argmax(-1).tolist()
    num_equal = sum(a == b for a, b in zip(chosen, whole.token_ids[num_prompt:], strict=True))
    is_unlike = bool(blueprint.quantized) and blueprint.device.type == "cpu"
    return Comparison(rows, num_prompt, num_decode, chunk, num_equal, is_unlike)


def _prompt(prompt: Sequence[int] | None, vocab_size: int) -> list[int]:
    if prompt is None:
        draw = random.Random(0)
        return [draw.randrange(vocab_size) for _ in range(PROMPT_LEN)]
    if not prompt or not all(0 <= token < vocab_size for token in prompt):
        raise ValueError(f"the prompt must be token ids from 0 to {vocab_size - 1}, at least one")
    return list(prompt)


def _layer_names(blueprint: Blueprint) -> list[str]:
    mixers = {"gdn": "gated delta net", "full": "attention"}
    kinds = zip(blueprint.model.layer_kinds, blueprint.model.mlp_kinds, strict=True)
    return [
        *(f"layer {index} ({mixers[kind]}, {mlp})" for index, (kind, mlp) in enumerate(kinds)),
        "final norm",
        "logits",
    ]


def _run_ours(
    config: EngineConfig, blueprint: Blueprint, prompt: list[int], num_decode: int, chunk: int
) -> tuple[Outputs, Outputs]:
    """The prompt in one step and `num_decode` tokens after it; then the prompt alone, in chunks."""
    workers = Workers(config, blueprint)
    try:
        # The last of the generated tokens is computed too, which takes the request that samples one more.
        whole = _serve(workers, blueprint, prompt, num_decode + 1, len(prompt))
        return whole, _serve(workers, blueprint, prompt, 1, chunk)
    finally:
        workers.close()


def _serve(workers: Workers, blueprint: Blueprint, prompt: list[int], max_tokens: int, budget: int) -> Outputs:
    """One greedy request of its own scheduler and cache, at most `budget` tokens a step."""
    memory = blueprint.memory
    cache = CacheManager(*memory.pool_sizes, memory.max_keep)
    scheduler = Scheduler(cache, 1, budget, memory.max_model_len, ())
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    scheduler.add(Request(request_id="compare", prompt_token_ids=prompt, params=params, arrival=0.0))
    assert workers.runner is not None, "the workers are closed"
    model = workers.runner.model
    assert isinstance(model, nn.Module), "the runner's model has no layers to listen to"
    outputs = Outputs(list(prompt))
    with _listen([*model.get_submodule("layers").children(), model], outputs, _stream):
        while scheduler.has_work:
            plan = scheduler.plan()
            assert plan is not None, "a lone request cannot go on"
            for output in scheduler.commit(plan, workers.step(plan)):
                outputs.token_ids += output.token_ids
    with torch.inference_mode():
        hidden_TD = outputs.layers[-1].to(blueprint.device)
        outputs.layers.append(model.logits(hidden_TD).cpu())
    outputs.token_ids.pop()
    return outputs


def _stream(output: Any) -> Tensor:
    """A layer hands on what it adds and the stream it adds it to; the model hands on one tensor."""
    stream: Tensor = output[0] + output[1] if isinstance(output, tuple) else output
    return stream


@contextmanager
def _listen(modules: Sequence[nn.Module], outputs: Outputs, read: Callable[[Any], Tensor]) -> Iterator[None]:
    """Append to `outputs.layers` what each of the modules gives, all steps of it joined."""
    heard: list[list[Tensor]] = [[] for _ in modules]

    def append_to(parts: list[Tensor]) -> Callable[..., None]:
        return lambda module, inputs, output: parts.append(read(output).detach().cpu())

    hooks = [module.register_forward_hook(append_to(parts)) for module, parts in zip(modules, heard, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    outputs.layers += [torch.cat(parts) for parts in heard]


def _run_theirs(blueprint: Blueprint, token_ids: list[int]) -> Outputs:
    """All tokens at once, without a cache: nothing of transformers' own state handling is in the comparison."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(blueprint.path, dtype=blueprint.dtype)
    model = loaded.to(blueprint.device).eval()
    outputs = Outputs(token_ids)
    modules = [*model.get_submodule("model.layers").children(), model.get_submodule("model.norm"), model.lm_head]
    with _listen(modules, outputs, lambda output: output[0]), torch.inference_mode():
        model(torch.tensor([token_ids], device=blueprint.device), use_cache=False)
    return outputs


def _largest(values: Tensor) -> float:
    return values.abs().max().item()
