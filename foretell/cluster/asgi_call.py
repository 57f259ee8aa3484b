"""An application called in the process it lives in: a request goes in whole, its answer comes out as it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope

from .call import Call, ResponseHead

ASGI = {"version": "3.0", "spec_version": "2.3"}


async def answer(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[ResponseHead | bytes, None]:
    """The head of the answer, then the rest of its body; whoever closes this early has gone away."""
    inside = _Inside(call)
    running = asyncio.ensure_future(app(_scope(call), inside.receive, inside.send))
    running.add_done_callback(lambda done: inside.said.put_nowait(None))
    try:
        start = await inside.heard()
        body = None if start is None else await inside.heard()
        if start is None or body is None:
            await running  # raises what went wrong
            raise RuntimeError("the application ended without an answer")
        more = body.get("more_body", False)
        yield ResponseHead(replica, start["status"], tuple(start.get("headers", ())), body.get("body", b""), more)
        while more:
            parts, more = await inside.heard_since()
            if parts:
                yield parts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _Inside:
    """Both ends of a connection."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._told = False

    async def receive(self) -> Message:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": self.call.body, "more_body": False}
        await asyncio.Event().wait()  # the caller stays until this is cancelled
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.said.put(message)

    async def heard(self) -> Message | None:
        """The next thing said; None at the end."""
        return await self.said.get()

    async def heard_since(self) -> tuple[bytes, bool]:
        """All of the body that was said since, as one: each part on its way costs, and under load they pile up.
        And whether more may come."""
        body, message = b"", await self.heard()
        while message is not None and message.get("more_body", False) and not self.said.empty():
            body += message.get("body", b"")
            message = self.said.get_nowait()
        if message is None:
            return body, False
        return body + message.get("body", b""), message.get("more_body", False)


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": ASGI,
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
    }
