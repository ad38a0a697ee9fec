"""The routes: what each path takes and answers. Knows how the parts of the server fit together, and no policy."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

import deltaserve
from deltaserve.core.request import SamplingParams
from deltaserve.engine.client import EngineClient
from deltaserve.engine.metrics import CONTENT_TYPE, Metrics
from deltaserve.engine.tokenizer import GenerationDefaults, Tokenizer
from deltaserve.server import chat, errors
from deltaserve.server.config import ServerConfig
from deltaserve.server.errors import ApiError, bad_request, shutting_down, unavailable
from deltaserve.server.gate import Gate
from deltaserve.server.generation import Backend, Generation, Prompt
from deltaserve.server.params import chat_params, completion_params
from deltaserve.server.prompts import count_prompts, encode_prompts, need, off_loop, read_prompts
from deltaserve.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Read,
    SamplingFields,
    TokenizeRequest,
    UnknownFields,
    parse,
    read_json,
)
from deltaserve.server.replies import ChatStyle, CompletionStyle, Style, Wishes
from deltaserve.server.stream import EventStream, whole

LARGE_BODY = 64 << 10
"""Bytes from which reading a body would hold up other requests for too long."""


@dataclass
class Service:
    """What the routes share."""

    config: ServerConfig
    model: str
    """The model's name in the API."""
    backend: Backend
    defaults: GenerationDefaults
    chat_template: str | None
    """A template's source that replaces the checkpoint's."""
    started: float = field(default_factory=time.time)
    draining: bool = False
    """No new work: the server is shutting down."""
    unknown: UnknownFields = field(default_factory=UnknownFields)

    @property
    def max_model_len(self) -> int:
        return self.backend.client.info.max_model_len

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here; this server has {self.model!r}",
                "model",
                "model_not_found",
            )

    async def read(self, kind: type[Read], request: Request) -> tuple[Read, int]:
        """A request's fields, and the size of its body. Raises ApiError."""
        body = await request.body()

        def read() -> Read:
            return parse(kind, read_json(body), self.unknown)

        return (await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()), len(body)

    async def render(self, messages: list[Message], ask: ChatRequest | TokenizeRequest, size: int) -> list[int]:
        """A conversation as token ids. `size` is that of the whole request."""
        tokenizer = need(self.backend.tokenizer)

        def render() -> list[int]:
            text = chat.render(
                tokenizer,
                messages,
                chat_template=self.chat_template,
                add_generation_prompt=ask.add_generation_prompt is not False,
                continue_final_message=bool(ask.continue_final_message),
                kwargs=ask.chat_template_kwargs,
            )
            return tokenizer.encode(text, add_special_tokens=False)

        return await off_loop(size, render, "messages")

    def check_count(self, num_prompts: int, n: int) -> None:
        """Refuses what could never be taken, before it costs anything."""
        most = self.backend.client.max_open
        if num_prompts * n > most:
            raise bad_request(
                f"{num_prompts} prompts times n {n} are {num_prompts * n} sequences; at most {most} can be taken at "
                "once: send them in several requests, or raise --max-waiting",
                "prompt",
            )

    async def answer(
        self,
        request: Request,
        ask: SamplingFields,
        style: Style,
        prompts: list[Prompt],
        params: SamplingParams,
        began: float,
    ) -> Response:
        if self.draining:  # since the request was let in
            raise shutting_down()
        skip = ask.skip_special_tokens is not False
        generation = Generation(self.backend, style.response_id, prompts, params, skip, ask.cache_salt, began)
        return EventStream(generation, style) if ask.stream else await whole(generation, style, request.receive)

    def style(self, kind: type[Style], prefix: str, ask: SamplingFields, logprobs: bool) -> Style:
        """Without a tokenizer there is no text, and the token ids are the answer."""
        wishes = Wishes(
            logprobs=logprobs,
            token_ids=bool(ask.return_token_ids) or self.backend.tokenizer is None,
            usage=ask.stream_options is not None and bool(ask.stream_options.include_usage),
        )
        return kind(f"{prefix}-{uuid.uuid4().hex}", self.model, wishes)


def make_service(
    client: EngineClient, config: ServerConfig, model: str, checkpoint: Path, chat_template: str | None = None
) -> Service:
    """Around a started client. Raises ValueError for a checkpoint whose files cannot be read."""
    metrics = Metrics(lambda: client.stats)
    client.on_begin = metrics.observe_queue
    backend = Backend(client, Tokenizer.load(checkpoint), metrics)
    return Service(config, model, backend, GenerationDefaults.load(checkpoint), chat_template)


def make_app(service: Service) -> FastAPI:
    """An ASGI app around a running engine."""
    app = FastAPI(
        title="deltaserve", version=deltaserve.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    errors.install(app)
    app.include_router(generating_routes(service))
    app.include_router(tokenizing_routes(service))
    app.include_router(describing_routes(service))
    app.add_middleware(
        Gate,
        api_keys=service.config.api_key,
        max_request_bytes=service.config.max_request_bytes,
        body_timeout=service.config.body_timeout,
        is_draining=lambda: service.draining,
    )
    return app


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def generating_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        began = time.monotonic()
        ask, size = await service.read(CompletionRequest, request)
        service.check_model(ask.model)
        params = completion_params(ask, service.defaults.sampling, service.max_model_len)
        service.check_count(count_prompts(ask.prompt), params.n)
        given = await off_loop(size, lambda: read_prompts(ask.prompt), "prompt")
        special = ask.add_special_tokens is not False
        prompts = await encode_prompts(service.backend.tokenizer, given, special, bool(ask.echo))
        style = service.style(CompletionStyle, "cmpl", ask, ask.logprobs is not None)
        return await service.answer(request, ask, style, prompts, params, began)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        began = time.monotonic()
        ask, size = await service.read(ChatRequest, request)
        service.check_model(ask.model)
        params = chat_params(ask, service.defaults.sampling, service.max_model_len)
        prompt = Prompt(await service.render(ask.messages, ask, size))
        style = service.style(ChatStyle, "chatcmpl", ask, bool(ask.logprobs))
        try:
            return await service.answer(request, ask, style, [prompt], params, began)
        except ApiError as fault:
            if fault.param == "prompt":  # which a chat has not: it is made of the messages
                fault.param = "messages"
            raise

    return router


def tokenizing_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        ask, size = await service.read(TokenizeRequest, request)
        service.check_model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if ask.messages is not None:
            tokens = await service.render(ask.messages, ask, size)
        else:
            special = ask.add_special_tokens is not False
            (prompt,) = await encode_prompts(service.backend.tokenizer, [ask.prompt or ""], special, echo=False)
            tokens = prompt.token_ids
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        ask, _ = await service.read(DetokenizeRequest, request)
        service.check_model(ask.model)
        tokenizer = need(service.backend.tokenizer)
        vocab_size = service.backend.client.info.vocab_size
        for token in ask.tokens:
            if not 0 <= token < vocab_size:
                raise bad_request(f"tokens has id {token}; the vocabulary has ids 0 to {vocab_size - 1}", "tokens")
        skip = bool(ask.skip_special_tokens)
        text = await off_loop(len(ask.tokens), lambda: tokenizer.decode(ask.tokens, skip), "tokens")
        return json_response({"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = need(service.backend.tokenizer)
        names = ("eos_token", "bos_token", "pad_token")
        tokens = {name: tokenizer.special_tokens.get(name) for name in names}
        return json_response({**tokens, "chat_template": service.chat_template or tokenizer.chat_template})

    return router


def describing_routes(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.backend.client

    def card() -> dict[str, Any]:
        return {
            "id": service.model,
            "object": "model",
            "created": int(service.started),
            "owned_by": "deltaserve",
            "max_model_len": service.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(card())

    @router.get("/health")
    async def health() -> Response:
        trouble = await client.trouble(service.config.health_timeout)
        if trouble is None and not service.draining:
            return json_response({"status": "ok"})
        raise unavailable(trouble or "the server is shutting down", "unhealthy")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.backend.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": deltaserve.__version__})

    return router
