"""The command line. Flags are made from the fields of the configs (flags.py), so that none is typed twice.

Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

import deltaserve
from deltaserve.bench.commands import bench
from deltaserve.config import EngineConfig
from deltaserve.core.request import SamplingParams
from deltaserve.flags import INTERRUPTED, argument, command, config_of, engine_config, engine_flags, flag, flags_of
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
app.add_typer(bench, name="bench")


_PROMPT = argument("prompt", str, "text; - reads the input")
_GPU_MEMORY = flag("gpu_memory_gib", float, None, "plan for a GPU with so much memory free, be there one or not", "GiB")


def _sampling_flags() -> list[inspect.Parameter]:
    types = get_type_hints(SamplingParams)
    return [flag(name, types[name], () if name == "stop" else None, text) for name, text in SAMPLING.items()]


def _params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """What the flags say over what the checkpoint says."""
    given = {name: values[name] for name in SAMPLING if values[name] not in (None, [])}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    params = SamplingParams(**{**llm.engine.generation_defaults.sampling, **given})
    params.validate()
    return params


# ---- commands ------------------------------------------------------------------------------------------------------


@command(app, *engine_flags(), *flags_of(ServerConfig))
def serve(values: dict[str, Any]) -> int:
    """Serve a model behind an OpenAI-compatible API."""
    import logging

    from deltaserve.engine.client import EngineLaunch
    from deltaserve.server import lifecycle

    server: ServerConfig = config_of(values, ServerConfig)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    key = "-H 'Authorization: Bearer KEY' " if server.api_key else ""

    def announce(info: EngineInfo, model: str, address: str) -> None:
        about = {"dtype": info.dtype, "device": info.device, "context": info.max_model_len}
        example = EXAMPLE.format(version=deltaserve.__version__, model=model, address=address, key=key, **about)
        print(example, flush=True)

    return lifecycle.run(EngineLaunch(engine_config(values), log_level=server.log_level), server, announce)


@command(app, _PROMPT, *flags_of(EngineConfig), *_sampling_flags())
def generate(values: dict[str, Any]) -> int | None:
    """Continue a text, printed as it comes."""
    prompt = values.pop("prompt")
    with _loaded(values) as llm:
        text = sys.stdin.read() if prompt == "-" else prompt
        _, is_whole = _print_answer(llm, text, _params(llm, values))
    return None if is_whole else INTERRUPTED


@command(app, *engine_flags(), *_sampling_flags())
def chat(values: dict[str, Any]) -> None:
    """Talk to a model in the terminal."""
    with _loaded(values) as llm:
        _converse(llm, _params(llm, values))


@command(app, *engine_flags(), _GPU_MEMORY)
def inspect_(values: dict[str, Any]) -> None:
    """Show a model's numbers and the memory plan, without loading weights."""
    from deltaserve.runner.blueprint import inspect as describe

    print(describe(engine_config(values), values["gpu_memory_gib"]))


@command(app, *engine_flags())
def compare(values: dict[str, Any]) -> None:
    """Run transformers beside the engine and show, layer by layer, how far apart they are."""
    from deltaserve.engine.compare import compare as run_both

    print("\n".join(run_both(engine_config(values)).lines()))


def _loaded(values: dict[str, Any]) -> contextlib.AbstractContextManager[LLM]:
    config = engine_config(values)
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
        answer, _ = _print_answer(llm, llm.tokenizer.encode(text, add_special_tokens=False), params)
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


def _print_answer(llm: LLM, prompt: str | list[int], params: SamplingParams) -> tuple[str, bool]:
    """Prints an answer piece by piece; also returns it, and whether it is whole. Ctrl-C ends it between two steps, so
    that the engine stays sound."""
    answer, is_whole = "", True
    pieces = cast("Generator[TextDelta, None, None]", llm.stream(prompt, params))
    with _interruptions() as pressed, contextlib.closing(pieces):
        for piece in pieces:
            print(piece.text, end="", flush=True)
            answer += piece.text
            if piece.error is not None:
                raise RuntimeError(piece.error)
            if pressed.is_set():
                print(" [stopped]", end="")
                is_whole = False
                break
    print(flush=True)
    return answer, is_whole


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
