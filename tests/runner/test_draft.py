"""The drafts' logits are those of the MTP layer in a float64 reference of its own, over chunks, hits and rejections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.config import EngineConfig
from deltaserve.core.plan import Plan, Row, Seating
from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.engine import Engine
from deltaserve.runner.draft import Guesser, LookAhead
from deltaserve.runner.inputs import Batch, Inputs, Numbers, Seats
from deltaserve.runner.memory import Pools
from deltaserve.runner.sampling import Sampled, Sampler
from deltaserve.runner.staging import Ints
from deltaserve.scheduler.speculation import Speculation
from tests.equivalence.test_overlap import Late, let_outcomes_come_late
from tests.models.factory import layer_kinds, tiny_config, write_checkpoint
from tests.models.reference import Reference
from tests.runner.test_graphs import with_graphs


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
    """The sampler's drafts of one step, seat by seat, with the logits they were drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.step: dict[int, list[tuple[int, Tensor, int]]] = {}

    def draft(self, logits_BV: Tensor, seats: Sequence[int], positions: Tensor, behind: int) -> Tensor:
        tokens = self.sampler.draft(logits_BV, seats, positions, behind)
        for row, seat in enumerate(seats):
            drawn = (int(positions[row]) + behind, logits_BV[row].clone(), int(tokens[row]))
            self.step.setdefault(seat, []).append(drawn)
        return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), shape, seed=8, mtp=True)


def make_engine(folder: Path, max_num_seqs: int, overlap: str = "off") -> tuple[Engine, Recorder]:
    """Without overlap a call of `step` is one step."""
    engine = Engine(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            state_dtype="float64",
            speculative_tokens="3",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=50,
            num_blocks=8 * max_num_seqs,
            overlap=overlap,  # type: ignore[arg-type]
        ),
        fill=float("nan"),
        speculation=Speculation(3, adaptive=False),
    )
    runner = engine.workers.runner
    assert runner is not None
    assert runner.look_ahead is not None
    recorder = Recorder(runner.sampler)
    runner.look_ahead.sampler = recorder  # type: ignore[assignment]
    return engine, recorder


def reference_of(folder: Path) -> AheadReference:
    return AheadReference(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def compare(reference: AheadReference, tokens: list[int], drawn: list[tuple[int, Tensor, int]]) -> int:
    assert [position for position, _, _ in drawn] == list(range(len(tokens), len(tokens) + len(drawn)))
    rights = reference.drafts(tokens, [token for _, _, token in drawn][:-1])
    for (_, told, _), right in zip(drawn, rights, strict=True):
        torch.testing.assert_close(told, right, rtol=0, atol=1e-8)
    return len(drawn)


def test_logits_of_drafts_are_the_references(folder: Path) -> None:
    reference, compared = reference_of(folder), 0
    engine, recorder = make_engine(folder, max_num_seqs=1)
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
            if recorder.step and engine.has_work():
                compared += compare(reference, tokens, recorder.step[0])
    assert compared > 30
    assert engine.stats().cached_tokens == 128 + 64


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_of_several_seats_at_once(folder: Path, graphs: bool) -> None:
    """Rows of different lengths, while other prompts are still cut into chunks; and in steps of fixed shapes."""
    reference, compared, most = reference_of(folder), 0, 0
    engine, recorder = make_engine(folder, max_num_seqs=4)
    runner = engine.workers.runner
    assert runner is not None
    if graphs:
        with_graphs(engine)
    draw = torch.Generator().manual_seed(2)
    for number, length in enumerate((70, 3, 120, 1, 64)):
        prompt = torch.randint(160, (length,), generator=draw).tolist()
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=12, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, arrival=0.0))
    while engine.has_work():
        recorder.step.clear()
        engine.step()
        most = max(most, len(recorder.step))
        for seat, drawn in recorder.step.items():
            known = runner.seats.token_ids[seat, : drawn[0][0]].tolist()
            compared += compare(reference, known, drawn)
    assert compared > 60
    assert most == 4


class Proposals:
    """Of each step: the first tokens of whoever sits on a seat, and what was drawn for it."""

    def __init__(self, inner: Guesser, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.prompts: dict[int, list[int]] = {}
        self.drawn: list[tuple[list[int], list[tuple[int, Tensor, int]]]] = []
        self.num_open = 0

    def begin(self, plan: Plan) -> None:
        self.inner.begin(plan)
        self.prompts |= {seating.seat: list(seating.known) for seating in plan.seatings}

    def propose(self, plan: Plan, batch: Batch, hidden_TD: Tensor, sampled: Sampled | None) -> None:
        self.recorder.step.clear()
        self.inner.propose(plan, batch, hidden_TD, sampled)
        wanted = {row.seat: row.num_propose for row in plan.rows}
        later = 0 if batch.later is None else int(batch.later.max())
        for seat, drawn in self.recorder.step.items():
            self.drawn.append((self.prompts[seat], drawn[: wanted[seat]]))
            self.num_open += later > 0

    def learn(self, seats: Ints, num_more: Ints) -> None:
        self.inner.learn(seats, num_more)


@pytest.mark.parametrize("late", [None, "eager", "graphs"])
def test_drafts_of_rows_that_start_later_than_was_planned(folder: Path, late: Late) -> None:
    """Steps overlap, and drafts count as right at random."""
    reference = reference_of(folder)
    engine, recorder = make_engine(folder, 3, overlap="on")
    let_outcomes_come_late(engine, late)
    runner = engine.workers.runner
    assert runner is not None
    assert runner.guesser is not None
    runner.sampler.pretend([0.7])
    runner.guesser = proposals = Proposals(runner.guesser, recorder)
    draw, said = torch.Generator().manual_seed(3), dict[str, list[int]]()
    for number, length in enumerate((70, 3, 120, 1, 62)):
        prompt = torch.randint(160, (length,), generator=draw).tolist()
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=25, ignore_eos=True)
        said[str(number)] = list(prompt)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, arrival=0.0))
    while engine.has_work():
        for output in engine.step():
            said[output.request_id] += output.token_ids
        for sequence in engine.scheduler._lines.running:
            known = said[sequence.request_id]
            assert runner.seats.token_ids[sequence.seat, : len(known)].tolist() == known
    compared = 0
    for prompt, drawn in proposals.drawn:
        [tokens] = [told for told in said.values() if told[: len(prompt)] == prompt]
        if drawn and drawn[0][0] <= len(tokens):  # not of a row behind the last one
            compared += compare(reference, tokens[: drawn[0][0]], drawn)
    assert compared > 60
    assert proposals.num_open > 20 or late is None  # then the host knows it all
    assert engine.stats().accepted_tokens > 40


def test_drafts_of_logits_that_are_not_finite_are_some_tokens() -> None:
    sampler = Sampler(1, 10, torch.device("cpu"), torch.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1)
        sampler.seat(Seating(seat=0, token_ids=[1], num_prompt=1, params=params))
        [token] = sampler.draft(torch.full((1, 10), float("nan")), [0], [1]).tolist()
        assert 0 <= token < 10


def bookkeeper() -> LookAhead:
    """Of two seats and eight blocks; its model is never asked."""
    pools = Pools(kv=(torch.zeros(2, 8, 64, 1, 1),), conv=(), state=())
    inputs = Inputs(Seats(2, 192), pools, torch.device("cpu"), 2)
    return LookAhead(None, inputs, Sampler(2, 10, torch.device("cpu")), pools)  # type: ignore[arg-type]


def begin(book: LookAhead, seat: int, blocks: tuple[int, ...], new: tuple[int, ...] = ()) -> None:
    seating = Seating(seat=seat, token_ids=[1] * 80, num_prompt=80, params=SamplingParams(seed=1), blocks=blocks)
    row = Row(seat=seat, start=64 * len(blocks), num_tokens=1, samples=False, new_blocks=new, write_slots=(0,))
    book.seats.seat(seating)
    book.seats.append_blocks(seat, new)
    book.begin(Plan(step=0, seatings=[seating], rows=[row], num_decode=0))


def three_tokens_at(seat: int, start: int) -> Numbers:
    row = Row(seat=seat, start=start, num_tokens=3, num_drafts=2, samples=True, write_slots=(0, 1, 2))
    return Numbers.of(Plan(step=1, rows=[row], num_decode=1))


def test_a_prefix_has_the_entries_of_its_whole_blocks_from_the_end_backwards() -> None:
    book = bookkeeper()
    for whole, first, ahead in (((), 128, 0), ((3,), 64, 128), ((2, 3), 1, 128), ((2,), 128, 0)):
        book._is_whole[:] = False
        book._is_whole[list(whole)] = True
        begin(book, 0, (2, 3))
        assert (book.seats.first_ahead[0], book.seats.num_ahead[0]) == (first, ahead)


@pytest.mark.parametrize(("given", "is_whole"), [(1, False), (2, True), (3, True)])
def test_a_block_is_whole_when_its_last_true_entry_is_there(given: int, is_whole: bool) -> None:
    book = bookkeeper()
    begin(book, 0, (), (5,))
    book.seats.num_ahead[0] = 62
    numbers = three_tokens_at(0, 61)
    book._note(numbers, book._entries(numbers))
    assert book.seats.num_ahead[0] == 63
    book.learn(np.array([0]), np.array([given - 1]))
    assert book.seats.num_ahead[0] == min(62 + given, 64)
    assert book.is_whole(5) == is_whole


def test_a_block_that_changes_hands_is_not_whole() -> None:
    """Also where the one who had it learns of its last step afterwards."""
    book = bookkeeper()
    begin(book, 0, (), (5,))
    book.seats.num_ahead[0] = 63
    book.learn(np.array([0]), np.array([2]))
    assert book.is_whole(5)
    begin(book, 1, (), (5,))
    assert not book.is_whole(5)
    book.seats.num_ahead[0] = 63
    book.learn(np.array([0]), np.array([2]))
    assert not book.is_whole(5)
