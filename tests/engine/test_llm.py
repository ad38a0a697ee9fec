"""The offline interface, over a scripted engine and over the built-in model."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaserve
from deltaserve import LLM, SamplingParams
from deltaserve.core.request import Output, Request, TokenLogprobs
from deltaserve.engine.tokenizer import GenerationDefaults, Tokenizer
from deltaserve.model_config import ModelConfig, load_config_json

BUILTIN = Path(deltaserve.__file__).parent / "builtin"
TOKENIZER = Tokenizer(BUILTIN)
EOS = 2034


class Echo:
    """An engine that answers with the prompt's tokens, some at a time, and writes down what is asked of it."""

    def __init__(self, path: Path = BUILTIN, burst: int = 1) -> None:
        self.model_config = ModelConfig.from_hf(load_config_json(BUILTIN))
        self.max_model_len = 200
        self.tokenizer_path = path
        self.generation_defaults = GenerationDefaults.load(path)
        self.burst = burst
        self.added: list[Request] = []
        self.running: dict[str, list[int]] = {}
        self.aborted: list[tuple[str, str]] = []
        self.closed = 0
        self.fails_at_add: int | None = None
        self.fails_in_step = False

    def add(self, request: Request) -> None:
        if len(self.added) == self.fails_at_add:
            raise ValueError("no room")
        self.added.append(request)
        self.running[request.request_id] = []

    def abort(self, request_id: str, reason: str) -> bool:
        self.aborted.append((request_id, reason))
        return self.running.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Output]:
        if self.fails_in_step:
            raise RuntimeError("dead")
        outputs = [Output(request_id="another's", token_ids=[1], finish_reason="length")]
        for request in [request for request in self.added if request.request_id in self.running]:
            outputs.append(self.advance(request))
        return outputs

    def advance(self, request: Request) -> Output:
        params, said = request.params, self.running[request.request_id]
        if params.seed == 13:
            del self.running[request.request_id]
            return Output(request_id=request.request_id, finish_reason="error", error="not finite")
        first = not said
        new = request.prompt_token_ids[len(said) : len(said) + self.burst]
        said += new
        done = len(said) == len(request.prompt_token_ids)
        if done:
            del self.running[request.request_id]
        scores = [TokenLogprobs(token, -0.5, 1, [token], [-0.5]) for token in new]
        return Output(
            request_id=request.request_id,
            token_ids=new,
            logprobs=scores if params.logprobs is not None else None,
            prompt_logprobs=None if params.prompt_logprobs is None or not first
            else [None, *(TokenLogprobs(token, -1.0, 1, [], []) for token in request.prompt_token_ids[1:])],
            finish_reason="length" if done else None,
            num_cached_tokens=3 if first else 0,
        )  # fmt: skip

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine() -> Echo:
    return Echo()


@pytest.fixture
def llm(engine: Echo) -> LLM:
    return LLM.over(engine)


def seeds(engine: Echo) -> list[int | None]:
    return [request.params.seed for request in engine.added]


# ---- what may be asked ---------------------------------------------------------------------------------------------


def test_forms_of_prompts(llm: LLM) -> None:
    ids = TOKENIZER.encode("one two")
    forms: list[Any] = ["one two", ["one two"], ids, tuple(ids), [ids], np.array(ids), [np.array(ids)]]
    for prompts in forms:
        (result,) = llm.generate(prompts)
        assert result.prompt_token_ids == result.outputs[0].token_ids == ids
        assert all(type(token) is int for token in result.prompt_token_ids)
        assert result.prompt in ("one two", None)
        assert result.outputs[0].text == "one two"
        assert result.outputs[0].finish_reason == "length"
        assert result.num_cached_tokens == 3
    several: list[Any] = ["a b", ids, "c"]
    mixed = llm.generate(several)
    assert [result.outputs[0].text for result in mixed] == ["a b", "one two", "c"]
    assert [result.prompt for result in mixed] == ["a b", None, "c"]
    assert llm.generate([]) == []
    once: Any = (text for text in ("a b", "c"))
    assert [result.outputs[0].text for result in llm.generate(once)] == ["a b", "c"]


def test_params_for_all_or_for_each(engine: Echo, llm: LLM) -> None:
    llm.generate(["a", "b"])
    assert [request.params for request in engine.added] == [SamplingParams(temperature=0.6, top_k=20, top_p=0.95)] * 2
    llm.generate(["a", "b"], SamplingParams(seed=5))
    llm.generate(["a", "b"], [SamplingParams(seed=7), SamplingParams(seed=6)])
    assert seeds(engine)[2:] == [5, 5, 7, 6]
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda llm: llm.generate(["fine", ""]), "prompt 1: the prompt is empty"),
    (lambda llm: llm.generate(""), "^the prompt is empty"),
    (lambda llm: llm.generate([[]]), "the prompt is empty"),
    (lambda llm: llm.generate(["fine", [1, 2048]]), "prompt 1: the prompt has token id 2048"),
    (lambda llm: llm.generate([-1]), "token id -1"),
    (lambda llm: llm.generate(["fine", "x\ud83d"]), r"prompt 1: character 1 of the text is U\+D83D"),
    (lambda llm: llm.generate([[1, "a"]]), "a text or a list of token ids"),
    (lambda llm: llm.generate([None]), "a text or a list of token ids"),
    (lambda llm: llm.generate([[1.5]]), "a text or a list of token ids"),
    (lambda llm: llm.generate(5), "a text or a list of token ids"),
    (lambda llm: llm.generate([5] * 200), "the prompt has 200 tokens"),
    (lambda llm: llm.generate("a", SamplingParams(temperature=math.nan)), "temperature is nan"),
    (lambda llm: llm.generate("a", SamplingParams(top_p=-0.1)), "top_p is -0.1"),
    (lambda llm: llm.generate("a", SamplingParams(n=10**6)), "n is 1000000"),
    (lambda llm: llm.generate("a", SamplingParams(n=0)), "n is 0"),
    (lambda llm: llm.generate("a", SamplingParams(stop=("x",) * 3000)), "3000 stop strings"),
    (lambda llm: llm.generate("a", SamplingParams(stop=("",))), "a stop string is empty"),
    (lambda llm: llm.generate("a", SamplingParams(logit_bias={2048: 1.0})), "logit_bias has token id 2048"),
    (lambda llm: llm.generate("a", SamplingParams(max_tokens=0)), "max_tokens is 0"),
    (lambda llm: llm.generate(["a", "b"], [SamplingParams(), SamplingParams(min_p=2)]), "prompt 1: min_p is 2"),
    (lambda llm: llm.chat([{"role": "user"}, "hi"]), "a conversation is a list of messages"),
    (lambda llm: llm.chat("hi"), "a conversation is a list of messages"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tools": []}), "set tools"),
    (
        lambda llm: llm.chat([{"role": "user", "content": 1}], chat_template="{{ 1 + '' }}"),
        "refuses the messages",
    ),
    (lambda llm: llm.stream("a", SamplingParams(n=2)), "n is 2; a stream has one answer"),
    (lambda llm: llm.stream([9999]), "token id 9999"),
]


@pytest.mark.parametrize(("ask", "message"), BAD)
def test_bad_input_is_refused_before_anything_runs(
    engine: Echo, llm: LLM, ask: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(llm)
    assert engine.added == []
    assert llm.generate("still here")[0].outputs[0].text == "still here"


def test_unknown_options_are_refused_without_loading() -> None:
    with pytest.raises(ValueError, match=r"no option 'max_seqs'; its options are model, .*max_num_seqs"):
        LLM(max_seqs=4)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        LLM(max_num_seqs=0)


def test_a_folder_without_tokenizer_takes_and_gives_ids(tmp_path: Path) -> None:
    llm = LLM.over(Echo(tmp_path))
    (result,) = llm.generate([[5, 6, 7]], SamplingParams(logprobs=1))
    assert (result.outputs[0].token_ids, result.outputs[0].text) == ([5, 6, 7], "")
    assert [token.logprob for token in result.outputs[0].logprobs or []] == [-0.5] * 3
    with pytest.raises(ValueError, match="has no tokenizer; give token ids"):
        llm.generate("text")
    with pytest.raises(ValueError, match="has no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="stop strings cannot be found"):
        llm.generate([5, 6], SamplingParams(stop=("x",)))


# ---- what comes back -----------------------------------------------------------------------------------------------


def test_n_answers(engine: Echo, llm: LLM) -> None:
    first, second = llm.generate(["a", "b"], [SamplingParams(n=3, seed=2**63 - 1), SamplingParams(n=2)])
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len(second.outputs) == 2
    assert seeds(engine) == [2**63 - 1, -(2**63), -(2**63) + 1, None, None]
    assert all(request.params.n == 1 for request in engine.added)
    assert len({request.request_id for request in engine.added}) == 5


@pytest.mark.parametrize("burst", range(1, 9))
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request(burst: int, include: bool) -> None:
    engine = Echo(burst=burst)
    llm = LLM.over(engine)
    params = SamplingParams(stop=("o thr", "never"), logprobs=0, include_stop_str_in_output=include)
    (result,) = llm.generate("one two three four", params)
    (output,) = result.outputs
    assert output.text == ("one two thr" if include else "one tw")
    assert (output.finish_reason, output.stop_reason) == ("stop", "o thr")
    # The tokens are those that the stop string needs, and no more.
    assert output.token_ids == result.prompt_token_ids[: len(output.token_ids)]
    assert "o thr" in TOKENIZER.decode(output.token_ids)
    assert "o thr" not in TOKENIZER.decode(output.token_ids[:-1])
    assert len(output.logprobs or []) == len(output.token_ids)
    assert engine.running == {}


def test_ends_are_told_apart(engine: Echo, llm: LLM) -> None:
    good, bad = llm.generate(["one two three", "b"], [SamplingParams(stop=("two",)), SamplingParams(seed=13)])
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "not finite")
    assert (good.outputs[0].finish_reason, good.outputs[0].error) == ("stop", None)
    assert engine.aborted == [(engine.added[0].request_id, "stop")]


def test_prompt_logprobs_have_text(llm: LLM) -> None:
    (result,) = llm.generate("one two", SamplingParams(prompt_logprobs=0, n=2))
    scores = result.prompt_logprobs or []
    assert "".join(token.text for token in scores) == "one two"
    assert [token.logprob for token in scores] == [None] + [-1.0] * (len(scores) - 1)
    assert scores[-1].offset == len("one two") - len(scores[-1].text)


def test_chat(engine: Echo, llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, SamplingParams(seed=1))
    assert one.prompt == TOKENIZER.render_chat(hello)
    assert one.prompt_token_ids == TOKENIZER.encode(one.prompt, add_special_tokens=False)
    bye = [{"role": "system", "content": "x"}, {"role": "user", "content": "bye"}]
    many = llm.chat([hello, bye], chat_template_kwargs={"enable_thinking": True})
    assert [result.prompt for result in many] == [TOKENIZER.render_chat(c, enable_thinking=True) for c in (hello, bye)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert llm.chat(hello, tools=tools)[0].prompt == TOKENIZER.render_chat(hello, tools)
    assert llm.chat([]) == []
    assert llm.chat(hello, chat_template="Say {{ messages[0].content }}")[0].prompt == "Say hello"
    bare = llm.render_chat(hello, add_generation_prompt=False)
    assert bare == TOKENIZER.render_chat(hello, add_generation_prompt=False) != one.prompt


def test_a_stream_gives_the_pieces(engine: Echo, llm: LLM) -> None:
    text = "one two three four five"
    deltas = list(llm.stream(text))
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas) == len(TOKENIZER.encode(text))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert "".join(delta.text for delta in llm.stream(text, SamplingParams(stop=("three",)))) == "one two "
    assert engine.running == {}


def test_leaving_a_stream_ends_its_request(engine: Echo, llm: LLM) -> None:
    unused = llm.stream("one two three")
    stream = llm.stream("one two three")
    assert isinstance(stream, Iterator)
    next(stream)
    assert len(engine.running) == 1
    del unused
    stream.close()  # type: ignore[attr-defined]
    assert engine.running == {}
    assert engine.aborted == [(engine.added[0].request_id, "client")]


def test_streams_and_batches_share_the_engine(llm: LLM) -> None:
    """What belongs to one is not lost while another is being followed."""
    first, second = llm.stream("one two three four five six"), llm.stream("a b c d e f g h")
    heard = [next(first).text, next(second).text]
    assert llm.generate("in between")[0].outputs[0].text == "in between"
    heard[1] += "".join(delta.text for delta in second)
    heard[0] += "".join(delta.text for delta in first)
    assert heard == ["one two three four five six", "a b c d e f g h"]


def test_an_engine_that_refuses_half_way(engine: Echo, llm: LLM) -> None:
    engine.fails_at_add = 2
    with pytest.raises(ValueError, match="no room"):
        llm.generate(["a", "b", "c", "d"])
    assert engine.running == {}
    assert [reason for _, reason in engine.aborted] == ["client", "client"]


def test_an_engine_that_dies_is_not_asked_again(engine: Echo, llm: LLM) -> None:
    engine.fails_in_step = True
    with pytest.raises(RuntimeError, match="dead"):
        llm.generate(["a", "b"])
    assert engine.aborted == []


def test_a_progress_bar_if_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], progress=True)
    assert "2/2" in capsys.readouterr().err


def test_leaving_the_block_closes_the_engine(engine: Echo) -> None:
    with pytest.raises(KeyError), LLM.over(engine):
        raise KeyError
    assert engine.closed == 1


# ---- the package's face --------------------------------------------------------------------------------------------


def test_names_of_the_package() -> None:
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(deltaserve))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = deltaserve.Nothing


def test_importing_the_interface_loads_no_tensor_library() -> None:
    code = "import sys; from deltaserve import LLM, SamplingParams; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- the built-in model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builtin() -> Iterator[LLM]:
    with LLM(num_threads=1, max_num_seqs=8, num_blocks=64) as llm:
        yield llm


QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def test_the_builtin_model_answers(builtin: LLM) -> None:
    (result,) = builtin.chat(QUESTION, SamplingParams(temperature=0.0))
    (output,) = result.outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("12 + 30 = 42", "stop", None)
    assert output.token_ids[-1] == EOS
    assert "".join(delta.text for delta in builtin.stream(result.prompt or "", SamplingParams(temperature=0.0))) == (
        output.text
    )


def test_stops_and_logprobs_of_the_builtin_model(builtin: LLM) -> None:
    params = SamplingParams(temperature=0.0, stop=("= 4",), logprobs=2, prompt_logprobs=1)
    (result,) = builtin.chat(QUESTION, params)
    (output,) = result.outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("12 + 30 ", "stop", "= 4")
    assert TOKENIZER.decode(output.token_ids) == "12 + 30 = 4"
    assert [token.token_id for token in output.logprobs or []] == output.token_ids
    assert all(token.rank == 1 and token.top[0].logprob == token.logprob for token in output.logprobs or [])
    assert [token.token_id for token in result.prompt_logprobs or []] == result.prompt_token_ids
    assert "".join(token.text for token in result.prompt_logprobs or []) == result.prompt
    (scored,) = builtin.generate([result.prompt_token_ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert scored.outputs[0].token_ids == []
    assert scored.outputs[0].finish_reason == "length"
    assert [token.top for token in scored.prompt_logprobs or []] == [t.top for t in result.prompt_logprobs or []]


def test_seeds_of_the_builtin_model(builtin: LLM) -> None:
    """The same alone, beside others and in another order; n answers differ."""
    prompts = ["The cat", "2 + 2 =", "Count:", "Once", "Q: 7 * 8?\nA:"]
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=8, presence_penalty=0.3) for seed in range(5)]

    def texts(order: list[int]) -> dict[int, list[int]]:
        results = builtin.generate([prompts[i] for i in order], [params[i] for i in order])
        return {i: result.outputs[0].token_ids for i, result in zip(order, results, strict=True)}

    together = texts([0, 1, 2, 3, 4])
    assert texts([3, 1, 4, 0, 2]) == together
    for i in (0, 4):
        assert texts([i]) == {i: together[i]}
    (several,) = builtin.generate("The cat", SamplingParams(temperature=1.5, seed=0, max_tokens=8, n=4))
    assert len({tuple(output.token_ids) for output in several.outputs}) == 4


def test_bools_are_no_token_ids() -> None:
    llm = LLM(device="cpu", max_num_seqs=1, max_model_len=64)
    with pytest.raises(ValueError, match="type bool; token ids are integers"):
        llm.generate([[True, 6]], SamplingParams(max_tokens=1))
    assert llm.generate([np.array([1, 6]).tolist()], SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    llm.close()
