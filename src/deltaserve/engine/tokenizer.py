"""Text to token ids and back, and chat templates. Knows no request and no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Tokenizer:
    """A byte-level BPE tokenizer of a checkpoint folder."""

    vocab_size: int
    eos_token_id: int | None
    chat_template: str | None

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the folder has no tokenizer or one that is not byte-level BPE."""
        raise NotImplementedError

    @staticmethod
    def load(path: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has none."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError, naming the position, for text with a lone surrogate."""
        raise NotImplementedError

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; b"" for an id without a token."""
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        raise NotImplementedError

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text (encode it with add_special_tokens=False). Raises ValueError when the template refuses."""
        raise NotImplementedError


class GenerationDefaults:
    """What generation_config.json, config.json and tokenizer_config.json say of sampling and ends. Reads JSON only."""

    sampling: dict[str, Any]
    """Fields of SamplingParams: `SamplingParams(**{**defaults.sampling, **of_the_request})`."""
    eos_token_ids: tuple[int, ...]
    """The union of all the files."""

    @staticmethod
    def load(path: Path) -> GenerationDefaults:
        raise NotImplementedError
