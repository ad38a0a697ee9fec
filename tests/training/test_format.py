"""The chat template renders exactly what the model is trained on."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import training
from training.data.chat import Message, chat, render
from training.data.corpus import conversation
from training.data.toolchat import tool_chat

BUILTIN = Path(__file__).parents[2] / "src" / "deltaserve" / "builtin"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUILTIN)
    return loaded


def with_tool_calls(messages: list[Message]) -> list[dict[str, Any]]:
    """The same messages with their calls as the API gives them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant" and "<tool_call>" in message["content"]:
            bodies = [json.loads(part.split("</tool_call>")[0]) for part in message["content"].split("<tool_call>")[1:]]
            calls = [{"type": "function", "function": body} for body in bodies]
            out.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            out.append(dict(message))
    return out


def text_of(messages: list[Message], **kwargs: Any) -> str:
    return "".join(text for text, _ in render(messages, **kwargs))


def test_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(1)
    for turns in (1, 2, 5, 10):
        messages = chat(conversation(rng, turns), system="Be kind." if turns % 2 else None)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text_of(messages)


def test_several_system_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    system = [{"role": "system", "content": text} for text in ("Be kind.", "Be brief.")]
    messages = [*system, *chat([("Hi", "Hello!"), ("Bye", "Goodbye!")])]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text_of(messages)


def test_tool_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(2)
    for _ in range(150):
        t = tool_chat(rng)
        got = tokenizer.apply_chat_template(with_tool_calls(t.messages), tools=list(t.tools), tokenize=False)
        assert got == text_of(t.messages, tools=t.tools)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_thinking(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    messages = chat([("What is 2 plus 3?", "@")])
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    got = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **options)
    want = text_of(messages, think="why" if thinking else None)
    assert got == want.split("why" if thinking else "@")[0]


def test_builtin_has_the_recipe_s_template_and_config() -> None:
    recipe = Path(training.__file__).parent
    for name in ("chat_template.jinja", "config.json"):
        assert (BUILTIN / name).read_text() == (recipe / name).read_text(), f"{name} is not the recipe's"
