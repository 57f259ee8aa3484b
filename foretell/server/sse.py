"""Getting replies to callers, and noticing when they have gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .http_protocol import DirectConnection, direct

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
BLANK = "\0"  # where a form has its words

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClientDisconnected(Exception):
    """Nobody waits for the reply any more."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is broken off when the caller goes away."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnected
        return doing.result()
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value).encode() + b"\n\n"


class ChunkTemplate:
    """An event that comes again and again with other words: all else is written once."""

    def __init__(self, value: dict[str, Any]) -> None:
        """`value` has BLANK for its words, and behind them nothing that looks like it."""
        self._before, _, self._after = event(value).rpartition(to_json(BLANK).encode())

    def event(self, words: str) -> bytes:
        """The event with these words."""
        return self._before + to_json(words).encode() + self._after


class EventStream(Response):
    """Sends events as they come; when the caller goes away their source is closed at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        shorten: Callable[[DirectConnection], None] = lambda connection: None,
    ) -> None:
        """`close` is called at the end, however it comes: events that were never asked for cannot close anything.
        `shorten` is given the connection, if events can be written to it directly while the next one is waited for."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._shorten = events, close, shorten

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = direct(scope)
        if connection is not None:
            self._shorten(connection)
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientDisconnected:
            return
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for each in events:
                if each:
                    await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
