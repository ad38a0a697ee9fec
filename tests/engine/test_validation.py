"""Requests that cannot be computed, and what is said to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.core.request import Request, SamplingParams
from deltaserve.engine.validation import RESERVED, check_template_kwargs, validate

VOCAB, CONTEXT = 100, 64


def check(prompt: list[Any], **params: Any) -> None:
    sampling = SamplingParams(**params)
    validate(Request(request_id="r", prompt_token_ids=prompt, params=sampling, arrival=0.0), VOCAB, CONTEXT)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([0], {}),
        ([99] * 63, {}),
        ([1] * 64, {"max_tokens": 0, "prompt_logprobs": 0}),
        ([1], {"max_tokens": 10**6}),
        ([1], {"stop_token_ids": (0, 99), "logit_bias": {99: -100.0}}),
    ],
)
def test_legal(prompt: list[int], params: dict[str, Any]) -> None:
    check(prompt, **params)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1, 100], {}, "token id 100; the vocabulary has ids 0 to 99"),
        ([-1, 100], {}, "token id -1; the vocabulary"),
        ([1, 2.0], {}, "type float; token ids are integers"),
        ([1, "2"], {}, "type str"),
        ([1, True], {}, "type bool"),
        ([1, None], {}, "type NoneType"),
        ([1] * 64, {}, "has 64 tokens, but the context of 64 tokens leaves room for 63; shorten"),
        ([1] * 65, {"max_tokens": 0, "prompt_logprobs": 0}, "has 65 tokens, but the context of 64 tokens"),
        ([1], {"stop_token_ids": (100,)}, "stop_token_ids has token id 100"),
        ([1], {"logit_bias": {100: 1.0}}, "logit_bias has token id 100"),
        (
            [1],
            {"stop_token_ids": (np.array(4),)},
            "stop_token_ids has a token id of type ndarray; token ids are integers",
        ),
        ([1], {"stop_token_ids": (torch.tensor(4),)}, "stop_token_ids has a token id of type Tensor"),
        ([1], {"stop_token_ids": (True,)}, "stop_token_ids has a token id of type bool"),
        ([1], {"logit_bias": {np.int64(4): 1.0}}, "logit_bias has a token id of type int64"),
        ([1, 10**5000], {}, "a token id of 16610 bits; the vocabulary has ids 0 to 99"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_refused(prompt: list[Any], params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(prompt, **params)


def test_the_length_of_a_prompt_is_told_before_its_ids_are_looked_at() -> None:
    with pytest.raises(ValueError, match="the prompt has 100000 tokens"):
        check([VOCAB] * 100_000)


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_a_template_gets_from_elsewhere(name: str) -> None:
    check_template_kwargs({"enable_thinking": True})
    with pytest.raises(ValueError, match=f"chat_template_kwargs may not set {name}"):
        check_template_kwargs({name: None})


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "temperature", "logprobs"])
def test_a_boolean_is_no_number(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is True; it must be a number"):
        check([1], **{name: True})
