"""One copy of the server in a process of its own, asked by calls instead of connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from foretell.server.app import create_app
from foretell.server.logs import set_up_logs
from foretell.server.run import load

from .asgi_call import answer
from .call import Call, ResponseHead
from .replica_spec import ReplicaSpec


class Replica:
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

    async def answer(self, call: Call) -> AsyncGenerator[ResponseHead | bytes, None]:
        """What the server says to a request."""
        async for part in answer(self.app, call, self.name):
            yield part

    async def check_health(self) -> None:
        """Raises where the engine has failed or a step is stuck; Ray Serve then puts another replica in its place."""
        if self.service.problem is not None:
            raise RuntimeError(self.service.problem)

    async def __del__(self) -> None:  # Ray Serve awaits it, when every answer is finished
        await self._life.__aexit__(None, None, None)
