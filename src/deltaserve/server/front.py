"""Answers while the model is being loaded, and hands over to the real app afterwards."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deltaserve.server.errors import unavailable


class Front:
    """The app that the HTTP server is started with."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        """Set when the engine can serve."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await unavailable("the model is being loaded", "loading").response()(scope, receive, send)
