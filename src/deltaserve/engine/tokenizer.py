"""Text to token ids and back, and what a checkpoint folder says about generation. Knows no request and no model.

The `tokenizers` package and jinja2 are used directly: together they are imported in a third of a second, transformers
in several. transformers is asked only for a folder that has no tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from deltaserve.core.request import SamplingParams
from deltaserve.engine.chat_template import ChatTemplate, read_templates

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The byte-level BPE tokenizer of a checkpoint folder."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the folder has no tokenizer or one that is not byte-level BPE."""
        self.path = path
        config = read_json(path / "tokenizer_config.json")
        self._backend = _load_backend(path, config)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_ids = {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = _special_tokens(config)
        """Their text by name, such as "eos_token"; only those that are set."""
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        """Ids of the tokenizer; a model may have more, which stand for nothing."""
        self.templates = read_templates(path, config)
        """Jinja source by name; "default" is the one to use, "tool_use" goes first where there are tools."""
        self._compiled: dict[str, ChatTemplate] = {}
        starts_itself = self.bos_token_id in self._backend.encode("", add_special_tokens=True).ids
        self._prefix = [self.bos_token_id] if config.get("add_bos_token") and not starts_itself else []

    @staticmethod
    def load(path: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has none. Raises ValueError for one that cannot be used."""
        if (path / "tokenizer.json").exists() or (path / "vocab.json").exists():
            return Tokenizer(path)
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text of a special token becomes that token, wherever it stands.

        Raises ValueError, naming the position, for text with a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start]
            raise ValueError(
                f"character {error.start} of the text is U+{ord(bad):04X}, half of a surrogate pair, which is no "
                "character of its own; remove it, or send both halves"
            ) from error
        # Of the library's calls this one lets other threads run, so that a long text holds nobody up.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return [i for i in self._prefix if i is not None] + ids if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD. An id without a token gives nothing; a negative one ValueError."""
        hidden = self._special_ids if skip_special_tokens else ()
        return b"".join([self.token_bytes(i) for i in token_ids if i not in hidden]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; b"" for an id without a token. Raises ValueError for a negative id."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < 2**32:
                raise ValueError(f"token id {token_id} is out of range; ids are 0 to {2**32 - 1}")
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            known = self._bytes[token_id] = _bytes_of(token)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary (a special token's is its text)."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @property
    def chat_template(self) -> str | None:
        """The source of the template that a conversation without tools gets."""
        return self.templates.get("default")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text; encode it with add_special_tokens=False.

        `chat_template` is a template's source or the name of one of the folder's. `kwargs` are further variables.
        Raises ValueError when there is no template, or when it refuses the messages.
        """
        name = chat_template or ("tool_use" if tools and "tool_use" in self.templates else "default")
        source = self.templates.get(name, chat_template)
        if source is None:
            raise ValueError(
                f"the checkpoint in {self.path} has no chat template; give one, or send a prompt instead of messages"
            )
        if source not in self._compiled:
            self._compiled = {source: ChatTemplate(source)}
        variables = {**self.special_tokens, **kwargs, "add_generation_prompt": add_generation_prompt}
        return self._compiled[source].render(messages, tools, variables)

    def _id_of(self, name: str) -> int | None:
        return self.token_id(self.special_tokens[name]) if name in self.special_tokens else None


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What a checkpoint folder says about sampling and ends. Reading it costs no heavy import."""

    sampling: dict[str, Any]
    """Fields of SamplingParams from generation_config.json, which a request overrides:
    `SamplingParams(**{**defaults.sampling, **of_the_request})`."""
    eos_token_ids: tuple[int, ...]
    """The union of what generation_config.json, config.json and the tokenizer's files name."""

    @staticmethod
    def load(path: Path) -> GenerationDefaults:
        """Raises ValueError for a file that is no JSON or a value that no request may have."""
        generation = read_json(path / "generation_config.json")
        config = read_json(path / "config.json")
        eos: set[int] = set()
        for place in (generation, config, config.get("text_config") or {}):
            ids = place.get("eos_token_id")
            eos.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        eos.update(_tokenizer_eos(path))
        return GenerationDefaults(_sampling_defaults(generation, path), tuple(sorted(eos)))

    def params(self) -> SamplingParams:
        """What a request that says nothing gets."""
        return SamplingParams(**self.sampling)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file. Raises ValueError naming the file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); the checkpoint is damaged, fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__} where an object is expected; fetch it again")
    return content


def _sampling_defaults(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    found = {ours: generation[theirs] for theirs, ours in names.items() if generation.get(theirs) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        msgspec.convert(found, SamplingParams).validate()
    except ValueError as error:  # msgspec's own errors are ValueErrors
        raise ValueError(f"{path / 'generation_config.json'}: {error}; correct the file") from error
    return found


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokenizer's end-of-text token, found in the files alone."""
    config = read_json(path / "tokenizer_config.json")
    text = _special_tokens(config).get("eos_token")
    if text is None:
        return []
    added = config.get("added_tokens_decoder") or {}
    ids = [int(i) for i, token in added.items() if token["content"] == text]
    # The whole tokenizer.json is large; it is read only where the small file does not say.
    return ids or [
        token["id"] for token in read_json(path / "tokenizer.json").get("added_tokens", []) if token["content"] == text
    ]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {name: config[name] for name in SPECIAL_NAMES if config.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def _load_backend(path: Path, config: dict[str, Any]) -> Backend:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file} cannot be read as a tokenizer ({error}); fetch it again") from error
        added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        for i in sorted(added.keys() - backend.get_added_tokens_decoder().keys()):
            fields = {name: value for name, value in added[i].items() if name not in ("content", "special", "__type")}
            token = AddedToken(added[i]["content"], special=bool(added[i].get("special")), **fields)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            if backend.token_to_id(token.content) != i:
                raise ValueError(
                    f"tokenizer_config.json gives {token.content!r} the id {i}, but tokenizer.json leaves it "
                    f"{backend.token_to_id(token.content)}; the files in {path} do not belong together"
                )
    else:
        backend = _load_by_transformers(path)
    kind = json.loads(backend.decoder.__getstate__())["type"] if backend.decoder else "none"
    if kind != "ByteLevel":
        raise ValueError(
            f"the tokenizer in {path} has a decoder of type {kind}; only byte-level BPE is supported: "
            "remove the tokenizer's files to serve token ids without text"
        )
    return backend


def _load_by_transformers(path: Path) -> Backend:
    from transformers import AutoTokenizer

    backend: Backend = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    return backend


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is one, else from U+0100 on.

    (Radford et al. 2019; the table of GPT-2's tokenizer.)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str) -> bytes:
    """An added token may hold characters that stand for no byte; then it stands for its own text."""
    if all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()
