"""However the tokens of a prompt are cut into steps, the logits are transformers' (float32) and exact (float64)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltaserve.models.qwen3_next import Qwen3Next
from tests.driver import Driver, Row
from tests.models.equality import TOLERANCE, TOLERANCE_64, assert_close, draw_tokens, ours, their_logits, theirs
from tests.models.factory import random_tensors, tiny_config, write_checkpoint
from tests.models.reference import Reference

PROMPT_LEN = 200
ROWS = 40
"""Rows that share a step."""


@dataclass(frozen=True)
class Case:
    model: Qwen3Next
    model_64: Qwen3Next
    token_ids: list[int]
    expected: Tensor
    """transformers' logits in float32."""
    exact: Tensor
    """The float64 reference's."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    config = tiny_config(
        vocab_size=97,
        hidden_size=48,
        full_attention_interval=3,
        mlp_only_layers=[1],
        head_dim=16,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    folder = write_checkpoint(tmp_path_factory.mktemp("chunks"), config, mtp=True)
    token_ids = draw_tokens(random.Random(5), config, PROMPT_LEN)
    (expected,) = their_logits(theirs(folder), [token_ids])
    exact = Reference(config, random_tensors(config)).logits(token_ids)
    return Case(ours(folder), ours(folder, torch.float64), token_ids, expected, exact)


def run_cuts(driver: Driver, token_ids: list[int], cuts: Sequence[Sequence[int]]) -> list[Tensor]:
    """One row for each list of chunk lengths, side by side in the same steps; each row's logits [tokens, V]."""
    rows = [Row(token_ids) for _ in cuts]
    left = [list(chunks) for chunks in cuts]
    logits: list[list[Tensor]] = [[] for _ in cuts]
    while busy := [index for index, chunks in enumerate(left) if chunks]:
        parts = driver.step([rows[index] for index in busy], [left[index].pop(0) for index in busy])
        for index, part in zip(busy, parts, strict=True):
            logits[index].append(part)
    for row in rows:
        driver.release(row)
    return [torch.cat(parts) for parts in logits]


def big_driver(model: Qwen3Next, in_place: bool = False) -> Driver:
    return Driver(model, num_blocks=4 * ROWS, num_slots=2 * ROWS, in_place=in_place)


def test_the_two_references_agree(case: Case) -> None:
    assert_close(case.expected, case.exact, TOLERANCE)


def test_every_split_in_two(case: Case) -> None:
    drivers = [big_driver(case.model), big_driver(case.model, in_place=True)]
    splits = [[first, PROMPT_LEN - first] for first in range(1, PROMPT_LEN)]
    random.Random(0).shuffle(splits)
    for turn, start in enumerate(range(0, len(splits), ROWS)):
        for logits in run_cuts(drivers[turn % 2], case.token_ids, splits[start : start + ROWS]):
            assert_close(logits, case.expected, TOLERANCE)


def test_every_chunk_size(case: Case) -> None:
    sizes = [*range(2, 20), *range(20, PROMPT_LEN, 12), 63, 64, 65, 127, 128, 129]
    assert len(sizes) <= ROWS
    cuts = [[min(size, PROMPT_LEN - start) for start in range(0, PROMPT_LEN, size)] for size in sizes]
    for logits in run_cuts(big_driver(case.model), case.token_ids, cuts):
        assert_close(logits, case.expected, TOLERANCE)


def test_a_prompt_alone(case: Case) -> None:
    driver = Driver(case.model)
    for chunks in (None, [1, 199], [64, 1, 135], [199, 1]):
        row = Row(case.token_ids)
        assert_close(driver.prefill(row, chunks), case.expected, TOLERANCE)
        driver.release(row)


def test_decode_after_any_prefill(case: Case) -> None:
    driver = big_driver(case.model)
    prompt_lens = list(range(1, PROMPT_LEN - 1))
    random.Random(0).shuffle(prompt_lens)
    for start in range(0, len(prompt_lens), ROWS):
        part = prompt_lens[start : start + ROWS]
        rows = [Row(case.token_ids) for _ in part]
        driver.step(rows, part)
        for _ in range(2):
            for row, logits in zip(rows, driver.decode(rows), strict=True):
                assert_close(logits, case.expected[row.num_computed - 1 : row.num_computed], TOLERANCE)
        for row in rows:
            driver.release(row)


def test_all_tokens_by_decode(case: Case) -> None:
    driver, row = Driver(case.model, in_place=True), Row(case.token_ids)
    assert_close(torch.cat([driver.decode([row])[0] for _ in range(130)]), case.expected[:130], TOLERANCE)


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_several_tokens_a_row_in_a_step(case: Case, num_tokens: int) -> None:
    """Rows of a step segment may have more than one token each, and start anywhere."""
    driver = Driver(case.model)
    rows = [Row(case.token_ids) for _ in range(3)]
    driver.step(rows, (1, 62, 130))
    for _ in range(4):
        starts = [row.num_computed for row in rows]
        logits = driver.step(rows, [num_tokens] * 3, num_step=3)
        for start, part in zip(starts, logits, strict=True):
            assert_close(part, case.expected[start : start + num_tokens], TOLERANCE)


def test_decode_and_prefill_rows_share_a_step(case: Case) -> None:
    driver = Driver(case.model)
    rows = [Row(case.token_ids) for _ in range(4)]
    driver.step(rows[:2], (90, 3))
    for step in range(20):
        starts = [row.num_computed for row in rows]
        counts = [1, 1, 3 + step % 3, 9]
        for start, count, part in zip(starts, counts, driver.step(rows, counts, num_step=2), strict=True):
            assert_close(part, case.expected[start : start + count], TOLERANCE)


@pytest.mark.parametrize("poison", [float("nan"), 1e3])
def test_float64_is_exact_however_it_is_cut(case: Case, poison: float) -> None:
    """What lies in free memory does not matter, be it NaN or a plain number."""
    driver = Driver(case.model_64, poison=poison)
    cuts = ([200], [1, 199], [63, 1, 64, 72], [64, 136], [65, 1, 1, 133], [127, 73], [199, 1])
    for logits in run_cuts(driver, case.token_ids, cuts):
        assert_close(logits, case.exact, TOLERANCE_64)
    row = Row(case.token_ids)
    driver.step([row], [37])
    for position in range(37, 140):
        assert_close(driver.decode([row])[0], case.exact[position : position + 1], TOLERANCE_64)
