"""What a stored prefix saves, in tokens, and that it changes no token of any answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.engine.engine import Engine
from tests.models.factory import tiny_config, write_checkpoint

BLOCK = 64
VOCAB = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_config(num_hidden_layers=2, full_attention_interval=2, max_position_embeddings=4096)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), shape, seed=3)


class Chat:
    """One engine and the answers it gives, one or several at a time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        sizes = {"max_num_seqs": 8, "num_blocks": 200, **settings}
        self.engine = Engine(EngineConfig(model=str(folder), dtype="float64", state_dtype="float64", **sizes))
        self.count = 0

    def ask(
        self, *prompts: list[int], max_tokens: int = 20, salt: str | None = None, **params: Any
    ) -> list[tuple[list[int], int]]:
        """Each prompt's answer, and how many of its tokens were not computed."""
        names = []
        for number, prompt in enumerate(prompts):
            names.append(f"{self.count}")
            self.count += 1
            drawn = {"temperature": 1.0, "seed": 7 + number, **params}
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **drawn)
            self.engine.add(
                Request(request_id=names[-1], prompt_token_ids=prompt, params=sampling, arrival=0.0, cache_salt=salt)
            )
        outputs: dict[str, list[Output]] = {name: [] for name in names}
        while self.engine.has_work():
            for output in self.engine.step():
                outputs[output.request_id].append(output)
        return [
            ([token for output in told for token in output.token_ids], told[0].num_cached_tokens)
            for told in outputs.values()
        ]

    @property
    def prefilled(self) -> int:
        return self.engine.stats().prefilled_tokens


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def test_the_same_prompt_twice(folder: Path) -> None:
    chat = Chat(folder)
    prompt = tokens(1, 900)
    [(first, cached_first)] = chat.ask(prompt)
    [(second, cached_second)] = chat.ask(prompt)
    assert (cached_first, cached_second) == (0, 896)
    assert first == second


def test_a_prompt_that_ends_on_a_boundary_leaves_one_token_at_least(folder: Path) -> None:
    chat = Chat(folder)
    prompt = tokens(2, 4 * BLOCK)
    [(first, _)] = chat.ask(prompt)
    assert chat.ask(prompt) == [(first, 3 * BLOCK)]


def test_a_chat_of_twenty_turns_prefills_what_is_new(folder: Path) -> None:
    chat, plain = Chat(folder), Chat(folder, prefix_cache="off")
    history: list[int] = []
    for turn in range(20):
        new = tokens(100 + turn, 30 + turn)
        before = chat.prefilled
        [(answer, cached)] = chat.ask(history + new, max_tokens=25)
        assert chat.prefilled - before <= len(new) + BLOCK, f"turn {turn}"
        assert cached >= len(history) - BLOCK
        if turn % 5 == 4:
            assert plain.ask(history + new, max_tokens=25) == [(answer, 0)]
        history = history + new + answer


def test_an_edited_last_turn_is_all_that_is_computed(folder: Path) -> None:
    chat = Chat(folder)
    history = tokens(5, 500)
    history += chat.ask(history, max_tokens=100)[0][0]
    first, edited = tokens(6, 300), tokens(7, 300)
    chat.ask(history + first)
    before = chat.prefilled
    chat.ask(history + edited)
    assert chat.prefilled - before <= len(edited) + BLOCK


def test_several_answers_share_one_prefill(folder: Path) -> None:
    chat, plain = Chat(folder), Chat(folder, prefix_cache="off")
    prompt = tokens(8, 500)
    answers = chat.ask(*[prompt] * 5)
    assert [cached for _, cached in answers] == [0, 448, 448, 448, 448]
    assert chat.prefilled == 500 + 4 * (500 - 448)
    assert [answer for answer, _ in answers] == [answer for answer, _ in plain.ask(*[prompt] * 5)]


def test_a_shared_beginning_is_found_from_the_third_prompt_on(folder: Path) -> None:
    """The second finds blocks and no state there to go on from; it leaves one."""
    chat = Chat(folder)
    shared = tokens(9, 330)
    cached = [chat.ask(shared + tokens(20 + number, 200))[0][1] for number in range(3)]
    assert cached == [0, 0, 320]
    stats = chat.engine.stats()
    assert stats.lost_tokens["no state"] == 320
    assert stats.wanted_tokens == stats.cached_tokens + sum(stats.lost_tokens.values())


def test_salts_keep_tenants_apart(folder: Path) -> None:
    chat = Chat(folder)
    prompt = tokens(10, 200)
    for salt, cached in ((None, 0), ("a", 0), ("b", 0), ("a", 192), (None, 192), ("b", 192)):
        assert chat.ask(prompt, salt=salt)[0][1] == cached, salt


def test_logprobs_of_the_prompt_cost_every_token(folder: Path) -> None:
    chat = Chat(folder)
    prompt = tokens(11, 200)
    chat.ask(prompt)
    assert chat.ask(prompt, prompt_logprobs=0)[0][1] == 0
    assert chat.engine.stats().lost_tokens["logprobs"] == 192


def test_a_cache_full_of_prefixes_starves_nobody(folder: Path) -> None:
    """Nothing but stored prefixes is left: they make room, whatever the size of the request."""
    chat = Chat(folder, num_blocks=12, num_slots=4, max_num_seqs=2)
    plain = Chat(folder, prefix_cache="off", num_blocks=12, max_num_seqs=2)
    for number in range(12):
        prompt = tokens(30 + number % 5, 40 + 97 * (number % 7))
        assert chat.ask(prompt)[0][0] == plain.ask(prompt)[0][0]
    usage = chat.engine.stats().cache
    assert usage.snapshots_evicted > 0
    assert usage.blocks_used == usage.slots_used == 0
