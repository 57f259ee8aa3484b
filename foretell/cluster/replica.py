"""One copy of the server in a process of its own, asked by calls instead of connections."""

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

    def __init__(self, call: ReplicaCall) -> None:
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
    """Ray Serve makes it, asks it how it is, and ends it."""

    async def __init__(self, served: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        from ray import serve

        set_up_logs(served.server.log_format)
        self.name: str = serve.get_replica_context().replica_id.unique_id
        server = replace(served.server, cors_origin=())  # the gateway adds these headers
        self.service = load(server, served.engine, served.speculation)
        self.app = create_app(self.service)
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()

    async def call_app(self, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        """What the server says to a request."""
        async for part in call_app(self.app, call, self.name):
            yield part

    async def check_health(self) -> None:
        """Raises where the engine has failed or a step is stuck; Ray Serve then puts another replica in its place."""
        if self.service.unhealthy_reason is not None:
            raise RuntimeError(self.service.unhealthy_reason)

    async def __del__(self) -> None:  # Ray Serve awaits it, when every answer is finished
        await self._life.__aexit__(None, None, None)
