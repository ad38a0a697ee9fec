"""What comes back for requests that were submitted together, batch by batch. Belongs to one asyncio loop.

Knows requests by their ids; no process, no socket and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deltaserve.core.request import Output


class EngineStoppedError(RuntimeError):
    """The engine process has ended, or is about to."""


class StreamClosedError(RuntimeError):
    """Whoever wanted the outputs has gone away."""


class Stream:
    """The outputs of some requests that were submitted together, in batches: whatever came since the last look."""

    def __init__(self, request_ids: list[str], cancel: Callable[[list[str], str], object]) -> None:
        """`cancel` ends requests, with a reason."""
        self._cancel = cancel
        self._request_ids = request_ids
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._batch: list[tuple[int, Output]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[tuple[int, Output]]:
        """Waits for outputs; each comes with its request's place in the submission.

        Raises ValueError when the engine refuses a request, EngineStoppedError, and StreamClosedError after `close`.
        """
        if not self._batch and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._batch:
            batch, self._batch = self._batch, []
            return batch
        assert self._error is not None, "a stream was woken for nothing"
        raise self._error

    def cancel(self, index: int, reason: str) -> None:
        """Ends one request; what has come of it stays, nothing more comes. Harmless when it has ended."""
        request_id = self._request_ids[index]
        if request_id in self._open:
            self._open.discard(request_id)
            self._cancel([request_id], reason)

    def close(self, reason: str = "abort") -> None:
        """Ends all that still runs, wakes whoever waits. May be called at any time, and again."""
        if self._open:
            self._cancel(list(self._open), reason)
            self._open.clear()
        self.fail(StreamClosedError("the stream was closed"))

    def put(self, output: Output) -> None:
        """For the client: one more output. The waiter runs after the whole step has been put."""
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._batch.append((self._index[output.request_id], output))
        self._wake()

    def fail(self, error: Exception) -> None:
        """For the client: nothing more will come. The first error stays."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
