"""What stands before every route: keys, the size of bodies, and refusal of work while the server shuts down.

Plain ASGI, so that a stream's chunks pass without a detour. Knows paths and headers, nothing of bodies' meaning.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaserve.server.errors import ApiError, unavailable

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""Probes and scrapers bring no key."""
WORK_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What a server that shuts down does not begin."""


class Gate:
    """Lets a request through, or answers it."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], max_request_bytes: int, is_draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_request_bytes = max_request_bytes
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
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
            return unavailable("the server is shutting down and takes no new work", "shutting_down")
        return None

    def _knows(self, authorization: str) -> bool:
        """In the same time for every wrong key of a length."""
        scheme, _, key = authorization.partition(" ")
        sent = key.strip().encode()
        known = [hmac.compare_digest(sent, ours) for ours in self._keys]
        return scheme.lower() == "bearer" and any(known)

    def _counted(self, receive: Receive) -> Receive:
        """The body in parts, as long as it stays within the limit."""
        total = 0

        async def count() -> Message:
            nonlocal total
            message = await receive()
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
