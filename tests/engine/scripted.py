"""An engine without a model: it repeats the prompt, a token a step, and misbehaves on demand."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import deltaserve
from deltaserve.config import EngineConfig
from deltaserve.core.request import FinishReason, Output, Request, TokenLogprobs
from deltaserve.core.stats import CacheUsage, Stats
from deltaserve.engine.messages import EngineInfo

BUILTIN = Path(deltaserve.__file__).parent / "builtin"
VOCAB_SIZE = 2048
EOS = (2034, 2032)
NUM_BLOCKS, NUM_SLOTS = 4096, 512

RAISE, DIE, NOT_FINITE, HANG, NOT_FINITE_LATER, BURSTS = 9001, 9002, 9003, 9004, 9005, 9010
"""Seeds that make a step raise, the process die, the request end with an error at once, the engine stand still, the
request end with an error at its fourth token, a step but the first give three tokens as two of three drafts are right.
"""
STILL_SECONDS = 60.0


class Running:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_tokens = 0


class ScriptedEngine:
    """Token i of the answer is token i of the prompt, over and over; an end-of-text id among them ends it."""

    def __init__(self, config: EngineConfig, step_seconds: float) -> None:
        self.config = config
        self.step_seconds = step_seconds
        self.max_running = config.limits("cpu")[0]
        self.max_model_len = config.max_model_len or 4096
        self.waiting: list[Request] = []
        self.running: dict[str, Running] = {}
        self.steps = self.prefilled = self.generated = 0
        self.finished: dict[str, int] = {}
        self.aborts: dict[str, int] = {}

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ValueError(f"the engine has no room for {len(request.prompt_token_ids)} tokens")
        self.waiting.append(request)

    def abort(self, request_id: str, reason: str) -> bool:
        found = self.running.pop(request_id, None) is not None
        for request in [request for request in self.waiting if request.request_id == request_id]:
            self.waiting.remove(request)
            found = True
        if found:
            counter = self.finished if reason == "stop" else self.aborts
            counter[reason] = counter.get(reason, 0) + 1
        return found

    def waits(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self.waiting)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Output]:
        time.sleep(self.step_seconds)
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            self.running[request.request_id] = Running(request)
            self.prefilled += len(request.prompt_token_ids)
        self.steps += 1
        outputs = [self.advance(running) for running in self.running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.request_id]
                self.finished[output.finish_reason] = self.finished.get(output.finish_reason, 0) + 1
        return outputs

    def advance(self, running: Running) -> Output:
        request, number = running.request, running.num_tokens
        params, prompt = request.params, request.prompt_token_ids
        match params.seed:
            case 9001:
                raise ArithmeticError("told to fail")
            case 9002:
                os.kill(os.getpid(), signal.SIGKILL)
            case 9003 | 9005 if number == 3 or params.seed == NOT_FINITE:
                return Output(request_id=request.request_id, finish_reason="error", error="logits are not finite")
            case 9004:
                time.sleep(STILL_SECONDS)
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if number == 0 and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(score(token, params.prompt_logprobs) for token in prompt[1:])]
        if params.max_tokens == 0:
            return Output(request_id=request.request_id, prompt_logprobs=prompt_logprobs, finish_reason="length")
        token = prompt[number % len(prompt)]
        running.num_tokens += 1
        self.generated += 1
        reason: FinishReason | None = None
        room = self.max_model_len - len(prompt)
        is_end = token in EOS and not params.ignore_eos
        if is_end or token in params.stop_token_ids:
            reason = "stop"
        elif running.num_tokens >= min(room, params.max_tokens or room):
            reason = "length"
        output = Output(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=None if params.logprobs is None else [score(token, params.logprobs)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
            num_cached_tokens=len(prompt) // 2 if number == 0 else 0,
        )
        if params.seed == BURSTS and number and reason is None and running.num_tokens + 2 < (params.max_tokens or room):
            output.token_ids += [prompt[(number + ahead) % len(prompt)] for ahead in (1, 2)]
            output.num_draft_tokens, output.num_accepted_tokens = 3, 2
            running.num_tokens += 2
            self.generated += 2
        return output

    def stats(self) -> Stats:
        usage = CacheUsage(
            blocks_used=2 * len(self.running),
            blocks_cached=0,
            blocks_total=NUM_BLOCKS,
            slots_used=len(self.running),
            slots_cached=0,
            slots_total=NUM_SLOTS,
        )
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            cache=usage,
            steps=self.steps,
            prefilled_tokens=self.prefilled,
            cached_tokens=0,
            generated_tokens=self.generated,
            draft_tokens=0,
            accepted_tokens=0,
            preemptions=0,
            finished=dict(self.finished),
            aborts=dict(self.aborts),
        )

    def close(self) -> None:
        assert not self.running or self.steps, "closed before it ran"


def score(token: int, num_top: int) -> TokenLogprobs:
    """The token is always the likeliest, the next ids follow."""
    top = [(token + i) % VOCAB_SIZE for i in range(num_top)]
    return TokenLogprobs(token, -0.125 - token / 4096, 1, top, [-0.125 - token / 4096 - i for i in range(num_top)])


def make(config: EngineConfig, step_seconds: float) -> tuple[ScriptedEngine, EngineInfo]:
    engine = ScriptedEngine(config, step_seconds)
    return engine, EngineInfo(
        checkpoint=str(BUILTIN),
        vocab_size=VOCAB_SIZE,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.limits("cpu")[0],
        device="cpu",
        dtype="float32",
    )


def fast(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    return make(config, 0.0)


def slow(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    """A step takes ten milliseconds."""
    return make(config, 0.01)


def cramped(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    """Memory for two requests, fewer than there are seats."""
    engine, info = make(config, 0.01)
    engine.max_running = 2
    return engine, info


def refusing(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    raise ValueError(f"model is {config.model}; there is no such model, name another")


def failing(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    raise ArithmeticError("told to fail at the start")


def dying(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def loading(config: EngineConfig) -> tuple[ScriptedEngine, EngineInfo]:
    """Takes longer to come up than anyone waits."""
    time.sleep(STILL_SECONDS)
    return make(config, 0.0)
