"""The command line. Flags are made from the fields of the configs, so that none is typed twice.

Knows how commands are put together and how errors are told: one line, exit code 2 for a choice that cannot be
honoured, 1 for a failure. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer

import deltaserve
from deltaserve.config import EngineConfig
from deltaserve.core.request import SamplingParams
from deltaserve.server.config import ServerConfig

if TYPE_CHECKING:
    from deltaserve.engine.detokenizer import TextDelta
    from deltaserve.engine.llm import LLM
    from deltaserve.engine.messages import EngineInfo

SAMPLING = {
    "temperature": "0 takes the likeliest token; by default the checkpoint's",
    "top_k": "draw from the k likeliest tokens; by default the checkpoint's",
    "top_p": "draw from the likeliest tokens of this much probability; by default the checkpoint's",
    "min_p": "leave out tokens below this share of the likeliest one's probability",
    "repetition_penalty": "above 1 shuns tokens of the prompt and the answer; by default the checkpoint's",
    "max_tokens": "longest answer; by default what the context holds",
    "stop": "text that ends the answer; may be given several times",
}
"""The fields of SamplingParams that are flags of `generate` and `chat`."""

EXAMPLE = """\
deltaserve {version} serves {model} ({dtype} on {device}, context of {context:,} tokens) on {address}

  curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' {key}-d \\
    '{{"model": "{model}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}'
"""
CHAT_HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves."

app = typer.Typer(
    name="deltaserve",
    help="Serves the model family of gated delta nets. Without MODEL every command uses the small built-in one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# ---- flags ---------------------------------------------------------------------------------------------------------


def flags_of(config: type) -> list[inspect.Parameter]:
    """A parameter for each field of a config, under the field's name."""
    types = get_type_hints(config)
    return [
        _flag(field.name, types[field.name], field.default, field.metadata["help"], field.metadata["unit"])
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


def _sampling_flags() -> list[inspect.Parameter]:
    types = get_type_hints(SamplingParams)
    return [_flag(name, types[name], () if name == "stop" else None, text) for name, text in SAMPLING.items()]


def _flag(name: str, kind: Any, default: Any, text: str, unit: str = "") -> inspect.Parameter:
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
    elif default is None:
        kind = kind | None
    if get_origin(kind) is Literal:
        unit, text = "name", f"{text} ({_values(kind)})"
    metavar = None if kind is bool else (unit or _values(kind)).upper()
    option = typer.Option(_flag_name(name), help=text, metavar=metavar)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values(kind: Any) -> str:
    """What a flag takes, in a word."""
    inner = [part for part in get_args(kind) if part not in (type(None), Ellipsis)]
    if get_origin(kind) is Literal:
        return ", ".join(map(str, inner))
    return _values(inner[0]) if inner else {str: "text", int: "integer", float: "number", bool: ""}[kind]


_MODEL = inspect.Parameter(
    "model",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Argument(help="checkpoint folder or hub id; without it the built-in model")],
)
_PROMPT = inspect.Parameter(
    "prompt", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, typer.Argument(help="text; - reads the input")]
)
_WHAT = inspect.Parameter(
    "what",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[Literal["decode", "prefill", "steps"], typer.Argument(help="steps: both")],
)


def command(*parameters: inspect.Parameter) -> Callable[[Callable[[dict[str, Any]], int | None]], None]:
    """Makes a command of a function over the flags' values; its first line is the help."""

    def register(run: Callable[[dict[str, Any]], int | None]) -> None:
        def entry(**values: Any) -> None:
            raise typer.Exit(told(lambda: run(values)))

        entry.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
        entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(run.__name__.strip("_"), help=run.__doc__)(entry)

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
        return 130


def _config(values: dict[str, Any], kind: type[Any]) -> Any:
    """The config that the flags describe."""
    given = {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    model, option = values.pop("model"), values.pop("model_option", None)
    if model is not None and option is not None and model != option:
        raise ValueError(f"model is given twice, as {model!r} and as {option!r}; give one")
    config: EngineConfig = _config({**values, "model": option if model is None else model}, EngineConfig)
    return config


def _engine_flags() -> list[inspect.Parameter]:
    """The model can be given in its place or by its flag."""
    return [_MODEL, *(p.replace(name="model_option") if p.name == "model" else p for p in flags_of(EngineConfig))]


def _params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """What the flags say over what the checkpoint says."""
    given = {name: values[name] for name in SAMPLING if values[name] not in (None, [])}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    params = SamplingParams(**{**llm.engine.generation_defaults.sampling, **given})
    params.validate()
    return params


# ---- commands ------------------------------------------------------------------------------------------------------


@command(*_engine_flags(), *flags_of(ServerConfig))
def serve(values: dict[str, Any]) -> int:
    """Serve a model behind an OpenAI-compatible API."""
    import logging

    from deltaserve.engine.client import EngineLaunch
    from deltaserve.server import lifecycle

    server: ServerConfig = _config(values, ServerConfig)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    key = "-H 'Authorization: Bearer KEY' " if server.api_key else ""

    def announce(info: EngineInfo, model: str, address: str) -> None:
        about = {"dtype": info.dtype, "device": info.device, "context": info.max_model_len}
        example = EXAMPLE.format(version=deltaserve.__version__, model=model, address=address, key=key, **about)
        print(example, flush=True)

    return lifecycle.run(EngineLaunch(_engine_config(values), log_level=server.log_level), server, announce)


@command(_PROMPT, *flags_of(EngineConfig), *_sampling_flags())
def generate(values: dict[str, Any]) -> None:
    """Continue a text, printed as it comes."""
    prompt = values.pop("prompt")
    with _loaded(values) as llm:
        text = sys.stdin.read() if prompt == "-" else prompt
        _print_answer(llm, text, _params(llm, values))


@command(*_engine_flags(), *_sampling_flags())
def chat(values: dict[str, Any]) -> None:
    """Talk to a model in the terminal."""
    with _loaded(values) as llm:
        _converse(llm, _params(llm, values))


@command(*_engine_flags())
def inspect_(values: dict[str, Any]) -> None:
    """Show a model's numbers and the memory plan, without loading weights."""
    from deltaserve.runner.blueprint import inspect as describe

    print(describe(_engine_config(values)))


@command(*_engine_flags())
def compare(values: dict[str, Any]) -> None:
    """Run transformers beside the engine and show, layer by layer, how far apart they are."""
    from deltaserve.engine.compare import compare as run_both

    print("\n".join(run_both(_engine_config(values)).lines()))


@command(
    _WHAT,
    _flag("batches", str, "1,8,32", "rows of the decode steps, with commas"),
    _flag("lengths", str, "1024,8192", "tokens of the prompts, with commas"),
    _flag("json", str, None, "file that one JSON object for each line of the tables is appended to"),
    *flags_of(EngineConfig),
)
def bench(values: dict[str, Any]) -> None:
    """Time decode steps or prompts through the whole engine, each beside its floor."""
    what, path = values.pop("what"), values.pop("json")
    sizes = [_integers(name, values.pop(name)) for name in ("batches", "lengths")]
    from deltaserve.bench.steps import run

    batches, lengths = sizes
    run(
        _engine_config(values),
        decode=batches if what in ("decode", "steps") else [],
        prefill=lengths if what in ("prefill", "steps") else [],
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


def _loaded(values: dict[str, Any]) -> contextlib.AbstractContextManager[LLM]:
    config = _engine_config(values)
    from deltaserve.engine.llm import LLM

    return LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


# ---- a conversation ------------------------------------------------------------------------------------------------


def _converse(llm: LLM, params: SamplingParams) -> None:
    """Reads lines until the input ends; each is answered with all before it in mind."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its editing keys
    is_terminal = sys.stdin.isatty()
    history: list[dict[str, Any]] = []
    print(CHAT_HELP)
    while (line := _read_line("> " if is_terminal else "")) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                history.clear()
                print("The conversation is forgotten.")
            case word if word.startswith("/"):
                print(f"There is no {word.split()[0]}. {CHAT_HELP}")
            case text:
                history.append({"role": "user", "content": text})
                _reply(llm, params, history)


def _reply(llm: LLM, params: SamplingParams, history: list[dict[str, Any]]) -> None:
    """Answers the last message and remembers the answer, or forgets the message when it cannot be answered."""
    try:
        text = llm.render_chat(history)
        assert llm.tokenizer is not None, "a template was rendered without a tokenizer"
        answer = _print_answer(llm, llm.tokenizer.encode(text, add_special_tokens=False), params)
    except ValueError as refusal:
        history.pop()
        print(f"{refusal} (/reset forgets the conversation)")
        return
    history.append({"role": "assistant", "content": answer})


def _read_line(prompt: str) -> str | None:
    """None at the end of the input. Ctrl-C drops the line."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(f"\n{CHAT_HELP}")


def _print_answer(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Prints an answer piece by piece. Ctrl-C ends it between two steps, so that the engine stays sound."""
    answer = ""
    pieces = cast("Generator[TextDelta, None, None]", llm.stream(prompt, params))
    with _interruptions() as pressed, contextlib.closing(pieces):
        for piece in pieces:
            print(piece.text, end="", flush=True)
            answer += piece.text
            if piece.error is not None:
                raise RuntimeError(piece.error)
            if pressed.is_set():
                print(" [stopped]", end="")
                break
    print(flush=True)
    return answer


@contextlib.contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into whatever runs."""
    pressed = threading.Event()

    def press(number: int, frame: FrameType | None) -> None:
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the program ---------------------------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deltaserve {deltaserve.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
