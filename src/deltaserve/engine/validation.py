"""Whether a request can be computed at all: ids against the vocabulary, length against the context, names of variables.

Knows two numbers of the model and nothing else, so that the API process can answer before the engine is asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np

from deltaserve.core.request import Request

MAX_SALT_CHARS = 1024
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "self",
)
"""Names that chat_template_kwargs may not set: there are arguments for them, or none at all."""


def validate(request: Request, vocab_size: int, max_model_len: int) -> array[int]:
    """The prompt's ids, packed. Raises ValueError naming the value, the limit and the way out."""
    prompt, params = request.prompt_token_ids, request.params
    params.validate()
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if request.cache_salt is not None and len(request.cache_salt) > MAX_SALT_CHARS:
        raise ValueError(f"cache_salt has {len(request.cache_salt)} characters; at most {MAX_SALT_CHARS} are allowed")
    longest = max_model_len if params.max_tokens == 0 else max_model_len - 1
    if len(prompt) > longest:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but the context of {max_model_len} tokens leaves room for "
            f"{longest}; shorten the prompt"
        )
    # After its length: a glance at each id of a huge one takes long.
    packed = _check_ids("the prompt", prompt, vocab_size)
    for where, few in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        # Taken as they are: what only counts as an integer would never equal a token.
        _refuse_types(where, (kind for kind in map(type, few) if kind is not int))
        _check_ids(where, few, vocab_size)
    return packed


def check_template_kwargs(names: Collection[str]) -> None:
    """Raises ValueError for variables that a chat template gets from elsewhere."""
    for name in RESERVED:
        if name in names:
            raise ValueError(f"chat_template_kwargs may not set {name}; leave it out there")


def _check_ids(where: str, token_ids: Iterable[int], vocab_size: int) -> array[int]:
    """The ids, packed."""
    ids = list(token_ids)
    try:
        packed = array("q", ids)
    except (TypeError, OverflowError):
        _refuse_types(where, (kind for kind in set(map(type, ids)) if kind is not int))
        _check_range(where, min(ids), max(ids), vocab_size)
        raise
    if ids:
        seen = np.frombuffer(packed, dtype=np.int64)
        low, high = int(seen.min()), int(seen.max())
        if low <= 1 and bool in set(map(type, ids)):  # which count as 0 and 1
            _refuse_types(where, [bool])
        _check_range(where, low, high, vocab_size)
    return packed


def _refuse_types(where: str, kinds: Iterable[type]) -> None:
    for kind in kinds:
        raise ValueError(f"{where} has a token id of type {kind.__name__}; token ids are integers") from None


def _check_range(where: str, low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        told = f"token id {outside}" if outside.bit_length() <= 256 else f"a token id of {outside.bit_length()} bits"
        raise ValueError(f"{where} has {told}; the vocabulary has ids 0 to {vocab_size - 1}")
