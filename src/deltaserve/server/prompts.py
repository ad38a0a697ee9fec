"""The `prompt` of a completion, in its four forms, to token ids. Long texts are encoded off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.errors import ApiError, bad_request
from deltaserve.server.generation import Prompt
from deltaserve.server.protocol import shorten

Made = TypeVar("Made")

FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"

LONG_TEXT = 4096
"""Characters from which encoding would hold up other requests for too long."""


def read_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """A string, a list of strings, a list of ids, a list of lists of ids. Raises ApiError for anything else."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None or prompt == []:
        raise bad_request(f"prompt is {'null' if prompt is None else 'empty'}; it must be {FORMS}", "prompt")
    if isinstance(prompt, list):
        texts: list[str] = prompt
        rows: list[list[int]] = prompt
        if all(type(text) is str for text in texts):
            return texts
        if _is_ids(prompt):
            return [prompt]
        if all(_is_ids(row) for row in rows):
            return rows
    raise bad_request(
        f"prompt is {shorten(prompt)}; it must be {FORMS}",
        "prompt",
        "wrong_type",
    )


def count_prompts(prompt: Any) -> int:
    """How many a field of any form has, without a look at each."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def _is_ids(ids: Any) -> bool:
    return type(ids) is list and set(map(type, ids)) <= {int}


async def encode_prompts(
    tokenizer: Tokenizer | None, prompts: list[str] | list[list[int]], add_special_tokens: bool, echo: bool
) -> list[Prompt]:
    """Raises ApiError for a text that cannot be encoded. With `echo` a prompt keeps its text."""

    def encode(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(need(tokenizer).encode(prompt, add_special_tokens), prompt if echo else None)
        return Prompt(prompt, _text_of(tokenizer, prompt) if echo else None)

    return await off_loop(sum(map(len, prompts)), lambda: [encode(prompt) for prompt in prompts], "prompt")


async def off_loop(size: int, make: Callable[[], Made], param: str) -> Made:
    """Does a small piece of work here, a large one in a thread; its ValueError is the request's fault."""
    try:
        return await asyncio.to_thread(make) if size > LONG_TEXT else make()
    except ApiError:
        raise
    except RecursionError:
        raise bad_request(f"{param} is nested too deeply to be read", param) from None
    except ValueError as fault:
        raise bad_request(f"{param}: {fault}", param) from None


def need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise bad_request("the model has no tokenizer: send token ids instead of text", "prompt", "no_tokenizer")
    return tokenizer


def _text_of(tokenizer: Tokenizer | None, token_ids: list[int]) -> str:
    """The text that an echo of ids shows; ids out of range are told later."""
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in token_ids if token >= 0], skip_special_tokens=False)
