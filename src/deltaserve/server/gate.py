"""What stands before every route: keys, the size and time of bodies, and no work for a server that shuts down.

Plain ASGI, so that a stream's chunks pass without a detour. Knows paths and headers, nothing of bodies' meaning.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaserve.server.errors import ApiError, shutting_down, timed_out

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""Probes and scrapers bring no key."""
WORK_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What a server that shuts down does not begin."""


class Gate:
    """Lets a request through, or answers it."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_request_bytes: int,
        body_timeout: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_request_bytes, self._body_timeout = max_request_bytes, body_timeout
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # what GET answers; the HTTP server keeps the body to itself
            scope = {**scope, "method": "GET"}
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._keys and path not in OPEN_PATHS and not self._knows(headers.get("authorization", "")):
            return ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_request_bytes:
            return self._too_large(f"the body has {length} bytes")
        if path in WORK_PATHS and self._is_draining():
            return shutting_down()
        return None

    def _knows(self, authorization: str) -> bool:
        """In the same time for every wrong key of a length."""
        scheme, _, key = authorization.partition(" ")
        sent = key.strip().encode()
        known = [hmac.compare_digest(sent, ours) for ours in self._keys]
        return scheme.lower() == "bearer" and any(known)

    def _counted(self, receive: Receive) -> Receive:
        """The body in parts, as long as it stays within the limits."""
        total, is_whole = 0, False
        end = asyncio.get_running_loop().time() + self._body_timeout

        async def count() -> Message:
            nonlocal total, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                raise timed_out(f"the body has not come within {self._body_timeout:g} s") from None
            is_whole = not message.get("more_body", False)
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._max_request_bytes:
                    raise self._too_large("the body is longer")
            return message

        return count

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            413,
            f"{what}, and the limit is {self._max_request_bytes}; send less, or raise --max-request-bytes",
            code="request_too_large",
            headers={"Connection": "close"},  # what is left of the body is nobody's
        )
