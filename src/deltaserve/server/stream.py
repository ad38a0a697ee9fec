"""A generation over HTTP: whole or as server-sent events, and over at once when the client goes away.

Knows ASGI's messages and nothing of what the bytes say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltaserve.engine.stream import StreamClosedError
from deltaserve.server.errors import CLIENT_GONE, ApiError, api_error
from deltaserve.server.generation import Delta, Generation
from deltaserve.server.replies import Style

logger = logging.getLogger(__name__)

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@asynccontextmanager
async def watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Closes the generation when the client disconnects, and in any case at the end.

    What fails takes along whatever else was asked for by the same request.
    """
    watcher = asyncio.ensure_future(_until_gone(receive))
    watcher.add_done_callback(lambda _: generation.close())
    try:
        yield
    except Exception:
        generation.close("error")
        raise
    finally:
        watcher.cancel()
        generation.close()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def whole(generation: Generation, style: Style, receive: Receive) -> Response:
    """Waits for all answers. Raises what `Generation.next` raises, with a refusal of the engine's as ApiError."""
    deltas: list[list[Delta]] = [[] for _ in range(generation.num_answers)]
    async with watched(generation, receive):
        try:
            await generation.collect(lambda delta: deltas[delta.index].append(delta))
        except StreamClosedError:
            return Response(status_code=CLIENT_GONE)
        except ValueError as refusal:
            raise _shaped(refusal) from None
    return Response(style.reply(deltas, generation.usage), media_type="application/json")


def _shaped(failure: Exception) -> ApiError:
    """Any failure as the API tells it."""
    error = api_error(failure)
    if error is not None:
        return error
    logger.error("a stream failed", exc_info=failure)
    return ApiError(500, "an error inside the server; its log has more", code="internal_error")


class EventStream(Response):
    """Server-sent events. The status waits for the first news, so that a refusal still has its own status.

    An error later than that is an event of its own, and the last one.
    """

    def __init__(self, generation: Generation, style: Style) -> None:
        super().__init__(headers=EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation, self._style = generation, style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._generation, receive):
            try:
                deltas = await self._generation.next()
            except StreamClosedError:
                return
            except ValueError as refusal:
                raise _shaped(refusal) from None
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            body = self._style.begin(self._generation.num_answers)
            try:
                while deltas:
                    body += b"".join([self._style.chunk(delta) for delta in deltas])
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
                    deltas = await self._generation.next()
                body = self._style.end(self._generation.usage)
            except StreamClosedError:
                return
            except Exception as failure:
                logger.debug("a stream ends early", exc_info=failure)
                self._generation.close("error")
                body = b"data: " + _shaped(failure).body() + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})
