"""Use without a server: the engine in the caller's process. Knows no protocol; one thread calls it."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import msgspec
from tqdm import tqdm

from deltaserve.config import EngineConfig
from deltaserve.core.request import Output, Request, SamplingParams
from deltaserve.engine.answers import Completion, Generation
from deltaserve.engine.detokenizer import TextDelta, TextStream, describe_tokens
from deltaserve.engine.stop_strings import StopStrings
from deltaserve.engine.tokenizer import GenerationDefaults, Tokenizer
from deltaserve.engine.validation import check_template_kwargs, validate
from deltaserve.model_config import ModelConfig

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = dict[str, Any]


class Steps(Protocol):
    """What is asked of an engine."""

    model_config: ModelConfig
    max_model_len: int
    tokenizer_path: Path
    generation_defaults: GenerationDefaults

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, reason: str) -> bool: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Output]: ...
    def close(self) -> None: ...


@dataclass
class _Answer:
    """A request on its way."""

    request: Request
    text: TextStream
    completion: Completion
    generation: Generation
    unread: list[TextDelta] = field(default_factory=list)


class LLM:
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     print(llm.generate("2 + 2 =", SamplingParams(max_tokens=8))[0].outputs[0].text)
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """`options` are the fields of EngineConfig. Loads the model, which takes seconds to minutes.

        Raises ValueError for an option, a checkpoint or a machine that does not fit.
        """
        names = [option.name for option in fields(EngineConfig)]
        unknown = sorted(options.keys() - set(names))
        if unknown:
            raise ValueError(f"LLM has no option {unknown[0]!r}; its options are {', '.join(names)}")
        from deltaserve.engine.engine import Engine

        self._take(Engine(EngineConfig(model=model, **options)))

    @classmethod
    def over(cls, engine: Steps) -> Self:
        """Around an engine that is there already; closing the LLM closes it."""
        llm = cls.__new__(cls)
        llm._take(engine)
        return llm

    def _take(self, engine: Steps) -> None:
        self.engine = engine
        self.tokenizer = Tokenizer.load(engine.tokenizer_path)
        self._open: dict[str, _Answer] = {}
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Answer one prompt or many, each a text or a list of token ids.

        `params` are for all prompts or one for each; None takes the checkpoint's defaults, up to the whole context.
        Results come in the order of the prompts. A request that fails alone has finish_reason "error".
        Raises ValueError, before anything is computed, for a prompt or a parameter that cannot be.
        """
        given: Any = prompts
        if not isinstance(prompts, str) and isinstance(prompts, Iterable):
            given = list(prompts)  # once: a generator gives its items to the first who asks
        items: list[Any] = [given] if _is_prompt(given) else given
        encoded = []
        for number, item in enumerate(items):
            with _naming(number, len(items)):
                encoded.append(self._encode(item))
        return self._run(encoded, params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Answer one conversation or many, as `generate` does.

        A message is a dict with "role" and "content"; for the other arguments see `render_chat`.
        Raises ValueError when the template refuses the messages.
        """
        one = bool(messages) and all(isinstance(message, dict) for message in messages)
        conversations: list[Any] = [messages] if one else list(messages)
        encoded: list[tuple[str | None, list[int]]] = []
        for number, conversation in enumerate(conversations):
            with _naming(number, len(conversations)):
                text = self.render_chat(conversation, tools, chat_template_kwargs, chat_template=chat_template)
                encoded.append((text, self._text_tokenizer().encode(text, add_special_tokens=False)))
        return self._run(encoded, params, progress)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the chat template makes of a conversation. Raises ValueError when it refuses.

        `chat_template` is a template's source, or the name of one of the checkpoint's; `chat_template_kwargs` are
        further variables for it.
        """
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError('a conversation is a list of messages, each a dict with "role" and "content"')
        variables = chat_template_kwargs or {}
        check_template_kwargs(variables)
        return self._text_tokenizer().render_chat(
            list(messages),
            tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **variables,
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Answer one prompt piece by piece; `params.n` is 1. Leaving the loop early ends the request.

        Raises ValueError as `generate` does, before the first piece is asked for.
        """
        params = params or self.engine.generation_defaults.params()
        if params.n != 1:
            raise ValueError(f"n is {params.n}; a stream has one answer, use generate for more")
        _, (answer,) = self._prepare(*self._encode(prompt), params)
        return self._follow(answer)

    def close(self) -> None:
        """Let go of the model's memory. Harmless when repeated."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Generation]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.engine.generation_defaults.params()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} sampling params for {len(prompts)} prompts; give one, or one for each prompt"
            )
        generations, answers = [], []
        for number, (prompt, of_one) in enumerate(zip(prompts, each, strict=True)):
            with _naming(number, len(prompts)):
                generation, its_answers = self._prepare(*prompt, of_one)
            generations.append(generation)
            answers += its_answers
        try:
            for answer in answers:
                self._add(answer)
            waited_for = {answer.request.request_id for answer in answers}
            with tqdm(total=len(answers), unit="answer", disable=not progress) as bar:
                while waited_for:
                    # A stream that is being followed elsewhere may end in the same step.
                    ended = waited_for.intersection(self._step())
                    waited_for -= ended
                    bar.update(len(ended))
        finally:
            self._abandon(answers)
        return generations

    def _follow(self, answer: _Answer) -> Iterator[TextDelta]:
        try:
            self._add(answer)
            while answer.unread or not answer.text.finished:
                if not answer.unread:
                    self._step()
                unread, answer.unread = answer.unread, []
                yield from unread
        finally:
            self._abandon([answer])

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._text_tokenizer().encode(prompt)
        try:
            return None, [x if isinstance(x, bool) else operator.index(x) for x in prompt]  # bools are refused later
        except TypeError as error:
            raise ValueError(f"a prompt is a text or a list of token ids: {error}") from error

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"the checkpoint in {self.engine.tokenizer_path} has no tokenizer; give token ids instead of text"
            )
        return self.tokenizer

    def _prepare(
        self, text: str | None, token_ids: list[int], params: SamplingParams
    ) -> tuple[Generation, list[_Answer]]:
        """The n requests of one prompt, checked. Raises ValueError."""
        whole = Request(request_id="", prompt_token_ids=token_ids, params=params, arrival=time.time())
        validate(whole, self.engine.model_config.vocab_size, self.engine.max_model_len)
        stops = StopStrings(params.stop)
        generation = Generation(text, token_ids, [Completion(index) for index in range(params.n)])
        answers = []
        for completion in generation.outputs:
            request = msgspec.structs.replace(
                whole, request_id=f"{next(self._numbers)}", params=params.of_answer(completion.index)
            )
            answers.append(_Answer(request, TextStream(self.tokenizer, params, stops=stops), completion, generation))
        return generation, answers

    def _add(self, answer: _Answer) -> None:
        self.engine.add(answer.request)
        self._open[answer.request.request_id] = answer

    def _abandon(self, answers: Sequence[_Answer]) -> None:
        """End those that are still open."""
        for answer in answers:
            if self._open.pop(answer.request.request_id, None) is not None:
                self.engine.abort(answer.request.request_id, "client")

    def _step(self) -> list[str]:
        """Compute one step and hand out what it gave. Returns the requests that ended."""
        assert self.engine.has_work(), f"{len(self._open)} answers are open, but the engine has nothing to do"
        try:
            outputs = self.engine.step()
        except BaseException:
            # An engine that failed in a step has let go of its requests, and must not be asked to end them.
            self._open.clear()
            raise
        return [output.request_id for output in outputs if self._deliver(output)]

    def _deliver(self, output: Output) -> bool:
        """True when this ends an answer."""
        answer = self._open.get(output.request_id)
        if answer is None:
            return False
        generation = answer.generation
        if output.prompt_logprobs is not None and generation.prompt_logprobs is None:
            generation.prompt_logprobs = describe_tokens(
                self.tokenizer, generation.prompt_token_ids, output.prompt_logprobs
            )
        generation.num_cached_tokens = max(generation.num_cached_tokens, output.num_cached_tokens)
        delta = answer.text.feed(output)
        answer.completion.add(delta)
        answer.unread.append(delta)
        if delta.finish_reason is None:
            return False
        del self._open[output.request_id]
        if output.finish_reason is None:
            self.engine.abort(output.request_id, "stop")
        return True


@contextmanager
def _naming(number: int, count: int) -> Iterator[None]:
    """Says which of several prompts an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}" if count > 1 else str(error)) from error


def _is_prompt(prompts: object) -> bool:
    """One prompt, or what is no list of prompts; as opposed to a list of them."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return True
    items = list(prompts)
    return bool(items) and not any(hasattr(item, "__iter__") for item in items)
