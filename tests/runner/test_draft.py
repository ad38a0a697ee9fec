"""The drafts' logits are those of the MTP layer in a float64 reference of its own, over chunks, hits and rejections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Seating
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.draft import LookAhead
from deltaserve.runner.sampling import Sampler
from deltaserve.scheduler.speculation import Speculation
from tests.models.factory import layer_kinds, tiny_config, write_checkpoint
from tests.models.reference import Reference


class AheadReference(Reference):
    """The whole model, and its MTP layer behind it."""

    first_position = 0

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for layer, kind in enumerate(layer_kinds(self.config)):
            mixer = self.attention if kind == "full_attention" else self.gated_delta_net
            x = self.block(f"model.layers.{layer}.", x, mixer)
        return self.gemma_norm(x, "model.norm.weight")

    def block(self, prefix: str, x: Tensor, mixer: object) -> Tensor:
        assert callable(mixer)
        x = x + mixer(prefix, self.gemma_norm(x, f"{prefix}input_layernorm.weight"))
        return x + self.mlp(f"{prefix}mlp.", self.gemma_norm(x, f"{prefix}post_attention_layernorm.weight"))

    def ahead(self, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Entries at positions 1, 2, ...: the hidden state before each token, and the token."""
        embedding = self.tensors["model.embed_tokens.weight"][torch.tensor(token_ids)]
        normed = (
            self.gemma_norm(embedding, "mtp.pre_fc_norm_embedding.weight"),
            self.gemma_norm(hidden, "mtp.pre_fc_norm_hidden.weight"),
        )
        x = self.project(torch.cat(normed, dim=-1), "mtp.fc")
        self.first_position = 1
        x = self.block("mtp.layers.0.", x, self.attention)
        self.first_position = 0
        return self.gemma_norm(x, "mtp.norm.weight")

    def rotate(self, x: Tensor) -> Tensor:
        padding = x.new_zeros(self.first_position, *x.shape[1:])
        return super().rotate(torch.cat([padding, x]))[self.first_position :]

    def drafts(self, token_ids: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        """Logits of the draft behind `token_ids`, and of those behind each of `drafts`."""
        hidden, tokens, logits = self.hidden(token_ids[:-1]), list(token_ids[1:]), []
        for draft in [*drafts, 0]:
            last = self.ahead(hidden, tokens)[-1:]
            logits.append(last[0] @ self.tensors["lm_head.weight"].T)
            hidden, tokens = torch.cat([hidden, last]), [*tokens, draft]
        return logits


class Recorder:
    """The sampler's drafts, with the logits they were drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.step: list[tuple[int, Tensor, int]] = []

    def draft(self, logits_BV: Tensor, seats: Sequence[int], positions: Tensor) -> Tensor:
        tokens = self.sampler.draft(logits_BV, seats, positions)
        [position], [token] = positions.tolist(), tokens.tolist()
        self.step.append((position, logits_BV[0].clone(), token))
        return tokens


def test_logits_of_drafts_are_the_references(tmp_path: Path) -> None:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2)
    folder = write_checkpoint(tmp_path, shape, seed=8, mtp=True)
    reference = AheadReference(
        json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    )
    engine = Engine(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            state_dtype="float64",
            speculative_tokens="3",
            max_num_seqs=1,
            max_num_batched_tokens=50,
            num_blocks=8,
        ),
        fill=float("nan"),
        speculation=Speculation(3, adaptive=False),
    )
    runner = engine.workers.runner
    assert runner is not None
    assert isinstance(runner.guesser, LookAhead)
    recorder = Recorder(runner.sampler)
    runner.guesser.sampler = recorder  # type: ignore[assignment]
    compared = 0
    prompt = torch.randint(160, (135,), generator=torch.Generator().manual_seed(1)).tolist()
    for number, length in enumerate((135, 135, 128, 2, 1, 64)):  # the second and third go on from stored prefixes
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=8, ignore_eos=True)
        request = Request(request_id="one", prompt_token_ids=prompt[:length], params=params, arrival=0.0)
        engine.add(request)
        tokens = list(request.prompt_token_ids)
        while engine.has_work():
            recorder.step.clear()
            for output in engine.step():
                tokens += output.token_ids
            if not recorder.step or not engine.has_work():
                continue
            assert [position for position, _, _ in recorder.step] == list(
                range(len(tokens), len(tokens) + len(recorder.step))
            )
            rights = reference.drafts(tokens, [token for _, _, token in recorder.step][:-1])
            for (_, told, _), right in zip(recorder.step, rights, strict=True):
                torch.testing.assert_close(told, right, rtol=0, atol=1e-8)
                compared += 1
    assert compared > 30
    assert engine.stats().cached_tokens == 128 + 64


def test_drafts_of_logits_that_are_not_finite_are_some_tokens() -> None:
    sampler = Sampler(1, 10, torch.device("cpu"), torch.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1)
        sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=params))
        [token] = sampler.draft(torch.full((1, 10), float("nan")), [0], [1]).tolist()
        assert 0 <= token < 10
