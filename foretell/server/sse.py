"""Server-sent events, and cancellation of requests whose client has disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .http_protocol import DirectConnection, direct_connection

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": still at work\n\n"  # clients skip it; it shows them, and proxies, that the connection lives
PLACEHOLDER = "\0"  # stands for the text in a ChunkTemplate

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClientDisconnected(Exception):
    """The client has closed the connection before its response was complete."""


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnected if the client disconnects first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse_event(value: dict[str, Any]) -> bytes:
    """Encode a value as one server-sent event."""
    return b"data: " + to_json(value).encode() + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """Encode a value as one server-sent event that is named by its `type`."""
    return f"event: {value['type']}\n".encode() + sse_event(value)


def json_line(value: dict[str, Any]) -> bytes:
    """Encode a value as one line of newline-delimited JSON."""
    return to_json(value).encode() + b"\n"


class ChunkTemplate:
    """A chunk that is sent many times with different text; the JSON around the text is encoded once."""

    def __init__(self, chunk: dict[str, Any]) -> None:
        """`chunk` has PLACEHOLDER as its text, and no string equal to it after that."""
        self._before, _, self._after = sse_event(chunk).rpartition(to_json(PLACEHOLDER).encode())

    def event(self, text: str) -> bytes:
        """Return the event with `text` in it."""
        return self._before + to_json(text).encode() + self._after


class EventStreamResponse(Response):
    """Sends events as they are generated; closes their source when the client disconnects."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        attach: Callable[[DirectConnection], None] = lambda connection: None,
        media_type: str = "text/event-stream",
    ) -> None:
        """`close` is called at the end in any case: a generator that was never started runs no `finally`.

        `attach` receives the connection if events can be written to it directly between two from `events`.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events, self._close, self._attach = events, close, attach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = direct_connection(scope)
        if connection is not None:
            self._attach(connection)
        try:
            await cancel_on_disconnect(receive, self._send_events(send))
        except ClientDisconnected:
            return
        finally:
            self._close()

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
