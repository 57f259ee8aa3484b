"""A replica: the server's application in a process of its own, called through Ray instead of HTTP connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.types import ASGIApp, Message, Scope

from foretell.cluster.replica_spec import ReplicaSpec
from foretell.cluster.replicas import ReplicaCall, ResponseHead
from foretell.server.app import create_app
from foretell.server.run import load, set_up_logs

ASGI = {"version": "3.0", "spec_version": "2.3"}


async def call_app(app: ASGIApp, call: ReplicaCall, replica: str) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Call an ASGI application; yield the response head, then the rest of the body. Closing early disconnects."""
    connection = _InProcessConnection(call)
    running = asyncio.ensure_future(app(_scope(call), connection.receive, connection.send))
    running.add_done_callback(lambda done: connection.sent.put_nowait(None))
    try:
        start = await connection.next_message()
        body = None if start is None else await connection.next_message()
        if start is None or body is None:
            await running  # raises the application's exception
            raise RuntimeError("the application ended without a response")
        more = body.get("more_body", False)
        yield ResponseHead(replica, start["status"], tuple(start.get("headers", ())), body.get("body", b""), more)
        while more:
            part, more = await connection.next_body()
            if part:
                yield part
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _InProcessConnection:
    """The ASGI receive and send channels of one call."""

    def __init__(self, call: ReplicaCall) -> None:
        self.call = call
        self.sent: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the application has ended
        self._received = False

    async def receive(self) -> Message:
        if not self._received:
            self._received = True
            return {"type": "http.request", "body": self.call.body, "more_body": False}
        await asyncio.Event().wait()  # the client stays connected until this is cancelled
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.sent.put(message)

    async def next_message(self) -> Message | None:
        return await self.sent.get()

    async def next_body(self) -> tuple[bytes, bool]:
        """Return all body parts sent since the last call as one, and whether more may follow.

        Each part costs a message between processes; under load they accumulate.
        """
        body, message = b"", await self.next_message()
        while message is not None and message.get("more_body", False) and not self.sent.empty():
            body += message.get("body", b"")
            message = self.sent.get_nowait()
        if message is None:
            return body, False
        return body + message.get("body", b""), message.get("more_body", False)


def _scope(call: ReplicaCall) -> Scope:
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


class ReplicaServer:
    """The Ray Serve deployment of one replica: Ray creates it, checks its health and stops it."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        from ray import serve

        set_up_logs(spec.server.log_format)
        self.name: str = serve.get_replica_context().replica_id.unique_id
        # The gateway adds the headers of CORS. A later request may reach another replica, so none stores responses.
        server = replace(spec.server, cors_origin=(), response_store_bytes=0)
        self.service = load(server, spec.engine, spec.speculation)
        self.app = create_app(self.service)
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the response to a call: its head, then the rest of the body."""
        async for part in call_app(self.app, call, self.name):
            yield part

    async def check_health(self) -> None:
        """Raise if the engine has failed or a step is stuck; Ray Serve then replaces the replica."""
        if self.service.unhealthy_reason is not None:
            raise RuntimeError(self.service.unhealthy_reason)

    async def __del__(self) -> None:  # Ray Serve awaits it after the last response is complete
        await self._lifespan.__aexit__(None, None, None)
