"""The commands of `deltaserve bench`. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer

from deltaserve.bench.client_config import LoadConfig, MultiTurnConfig
from deltaserve.config import EngineConfig
from deltaserve.flags import command, config_of, engine_config, flag, flags_of

bench = typer.Typer(
    help="Time steps of an engine, or a server under load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_BATCHES = flag("batches", str, "1,8,32", "rows of the decode steps, with commas")
_LENGTHS = flag("lengths", str, "1024,4000", "tokens of the prompts, with commas")


def _step_flags() -> list[inspect.Parameter]:
    json = flag("json", str, None, "file that one JSON object for each line of the tables is appended to")
    return [_BATCHES, _LENGTHS, json, *flags_of(EngineConfig)]


@command(bench, *_step_flags())
def decode(values: dict[str, Any]) -> None:
    """Time decode steps through the whole engine, each beside its floor."""
    _time_steps(values, decode=True, prefill=False)


@command(bench, *_step_flags())
def prefill(values: dict[str, Any]) -> None:
    """Time prompts through the whole engine, each beside its floor."""
    _time_steps(values, decode=False, prefill=True)


@command(bench, *_step_flags())
def steps(values: dict[str, Any]) -> None:
    """Both: decode steps and prompts."""
    _time_steps(values, decode=True, prefill=True)


@command(
    bench,
    flag("only", str, "", "words with commas: cases whose names hold one of them; all by default"),
    flag("json", str, None, "file that one JSON object for each case is appended to"),
)
def ops(values: dict[str, Any]) -> int:
    """Time single ops on a GPU, each beside its floor."""
    from deltaserve.bench.ops import main

    words = [word.strip() for word in values["only"].split(",") if word.strip()]
    return main(words, None if values["json"] is None else Path(values["json"]))


@command(bench, *flags_of(LoadConfig))
def serve(values: dict[str, Any]) -> None:
    """Put an OpenAI-compatible server under load, and time its answers."""
    config: LoadConfig = config_of(values, LoadConfig)
    from deltaserve.bench.serve import run

    run(config)


@command(bench, *flags_of(MultiTurnConfig))
def multi_turn(values: dict[str, Any]) -> None:
    """Hold conversations with a server, and tell what it computes again of their past."""
    config: MultiTurnConfig = config_of(values, MultiTurnConfig)
    from deltaserve.bench.multi_turn import run

    run(config)


def _time_steps(values: dict[str, Any], decode: bool, prefill: bool) -> None:
    path = values.pop("json")
    batches, lengths = (_integers(name, values.pop(name)) for name in ("batches", "lengths"))
    from deltaserve.bench.steps import run

    run(
        engine_config(values),
        decode=batches if decode else [],
        prefill=lengths if prefill else [],
        path=None if path is None else Path(path),
    )


def _integers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"{name} is {text!r}; it must be whole numbers from 1 on, with commas between them")
    return numbers
