"""Chat templates: Jinja in a sandbox, with what checkpoints' templates may use. Knows no tokenizer.

The environment is that of `apply_chat_template` in transformers, so that templates written for it render the same:
blocks trimmed, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Raises ValueError for a template with a syntax error, naming the line."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"line {error.lineno} of the chat template: {error.message}; correct the template"
            ) from error

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        """Raises ValueError when the template refuses the messages or cannot make sense of them."""
        try:
            return self._template.render(messages=messages, tools=tools, documents=None, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error


def read_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint folder by name. Files of their own come before tokenizer_config.json."""
    named = tokenizer_config.get("chat_template")
    templates = {t["name"]: t["template"] for t in named} if isinstance(named, list) else {}
    if isinstance(named, str):
        templates["default"] = named
    elif isinstance(named, dict):
        templates.update(named)
    if (path / "chat_template.json").exists():
        templates["default"] = json.loads((path / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    if (path / "chat_template.jinja").exists():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's words, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which a prompt does not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
