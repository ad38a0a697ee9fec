"""A running server for the outside clients, and transformers' own answers on the built-in model to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, serving

HERE = Path(__file__).parent
BUILTIN = HERE.parents[1] / "src" / "deltaserve" / "builtin"
API_KEY = "sk-local"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`deltaserve serve` on the built-in model in float32, with an API key."""
    with serving("--dtype", "float32", api_key=API_KEY) as running:
        yield running


@pytest.fixture
def idle(server: Server) -> Iterator[None]:
    """The test leaves nothing in use behind."""
    yield
    server.wait_until_idle()


@pytest.fixture(scope="session")
def continue_text() -> Callable[[str, int], str]:
    """transformers' greedy continuation of a text, by the built-in model in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN)
    model: Any = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype="float32")
    model.eval()

    def continued(text: str, max_tokens: int) -> str:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        # The checkpoint's own defaults sample; all of them must go for a greedy answer without warnings.
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ids = model.generate(**inputs, **greedy, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
        answer: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answer

    return continued


@pytest.fixture(scope="session")
def render() -> Callable[[list[dict[str, str]]], str]:
    """The prompt that the built-in model's template makes of a conversation."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN)
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
