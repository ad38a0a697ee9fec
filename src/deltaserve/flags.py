"""Flags of the command line, made from the fields of configs, and commands made from flags.

A config is a dataclass whose fields say what they mean (`config.option`). Knows how errors are told: one line, and exit
code 2 for a choice that cannot be honoured, 1 for a failure. Knows no command.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from deltaserve.config import EngineConfig

# ---- from fields to flags ------------------------------------------------------------------------------------------

INTERRUPTED = 130
"""The exit code of what Ctrl-C has ended."""


def flags_of(config: type) -> list[inspect.Parameter]:
    """A parameter for each field of a config, under the field's name."""
    types = get_type_hints(config)
    return [
        flag(field.name, types[field.name], field.default, field.metadata["help"], field.metadata["unit"])
        for field in dataclasses.fields(config)
    ]


def flag_table(config: type) -> str:
    """The flags of a config as a table of Markdown."""
    lines = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    types = get_type_hints(config)
    for field in dataclasses.fields(config):
        values = field.metadata["unit"] or _values(types[field.name])
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        lines.append(f"| `{_flag_name(field.name)}` | {values} | {default} | {field.metadata['help']} |")
    return "\n".join(lines)


def flag(name: str, kind: Any, default: Any, text: str, unit: str = "") -> inspect.Parameter:
    """One flag: `max_num_seqs` is `--max-num-seqs`."""
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
    elif default is None:
        kind = kind | None
    if get_origin(kind) is Literal:
        unit, text = "name", f"{text} ({_values(kind)})"
    metavar = None if kind is bool else (unit or _values(kind)).upper()
    option = typer.Option(_flag_name(name), help=text, metavar=metavar)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def argument(name: str, kind: Any, text: str, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A word in its place, without a flag."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, typer.Argument(help=text)]
    )


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values(kind: Any) -> str:
    """What a flag takes, in a word."""
    inner = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    if get_origin(kind) is Literal:
        return ", ".join(map(str, inner))
    return _values(inner[0]) if inner else {str: "text", int: "integer", float: "number", bool: ""}[kind]


# ---- from flags to configs -----------------------------------------------------------------------------------------


def config_of(values: dict[str, Any], kind: type[Any]) -> Any:
    """The config that the flags describe."""
    given = {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def engine_flags() -> list[inspect.Parameter]:
    """The model can be given in its place or by its flag."""
    model = argument("model", str | None, "checkpoint folder or hub id; without it the built-in model", None)
    return [model, *(p.replace(name="model_option") if p.name == "model" else p for p in flags_of(EngineConfig))]


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """Of the flags of `engine_flags` or of `flags_of(EngineConfig)`. Raises ValueError for two models."""
    model, option = values.pop("model"), values.pop("model_option", None)
    if model is not None and option is not None and model != option:
        raise ValueError(f"model is given twice, as {model!r} and as {option!r}; give one")
    config: EngineConfig = config_of({**values, "model": option if model is None else model}, EngineConfig)
    return config


# ---- commands ------------------------------------------------------------------------------------------------------


def command(
    app: typer.Typer, *parameters: inspect.Parameter
) -> Callable[[Callable[[dict[str, Any]], int | None]], None]:
    """Makes a command of a function over the flags' values; its first line is the help."""

    def register(run: Callable[[dict[str, Any]], int | None]) -> None:
        def entry(**values: Any) -> None:
            raise typer.Exit(told(lambda: run(values)))

        entry.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
        entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(run.__name__.strip("_").replace("_", "-"), help=run.__doc__)(entry)

    return register


def told(run: Callable[[], int | None]) -> int:
    """Runs a command; its exit code. An error that a user can understand becomes one line."""
    try:
        return run() or 0
    except ValueError as refusal:
        typer.echo(f"error: {refusal}", err=True)
        return 2
    except (RuntimeError, OSError, MemoryError) as failure:
        typer.echo(f"error: {str(failure) or type(failure).__name__}", err=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
