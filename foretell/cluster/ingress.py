"""The front as Ray Serve runs it: an application whose replicas are behind a handle."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from foretell.server.config import ServerConfig
from foretell.server.middleware import middleware_of, wrapped

from .call import Call, ResponseHead
from .gateway import Gateway
from .replicas import ReplicaLost, Running

GRACE = 10.0  # seconds beyond the request timeout: a replica that ends a request reports it first


class RayReplicas:
    """Replicas behind a handle; the router of `router.py` chooses among them."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    def names(self) -> Sequence[str]:
        return Running.names

    async def ask(self, call: Call) -> AsyncGenerator[ResponseHead | bytes, None]:
        from grpc import RpcError
        from ray.exceptions import RayError, RayTaskError

        parts = self._handle.remote(call)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        except RayTaskError:
            raise  # it lives, and failed
        except (RayError, RpcError) as error:
            ended = True
            raise ReplicaLost(str(error)) from error
        finally:
            if not ended:
                parts.cancel()


class Ingress:
    """Where requests come in."""

    def __init__(self, handle: Any, attempts: int, config: ServerConfig) -> None:
        self.front = Gateway(RayReplicas(handle), attempts, config.request_timeout + GRACE)
        self.guarded = wrapped(self.front, middleware_of(config, self.front.ledger.refusal))

    async def leave(self) -> None:
        """Take nothing new."""
        self.front.leaving = True

    async def ongoing(self) -> int:
        """Requests that are not answered to the end."""
        return self.front.ongoing


def application() -> ASGIApp:
    """What Ray Serve calls for each request, once it has made an Ingress."""
    from ray import serve

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await serve.get_replica_context().servable_object.guarded(scope, receive, send)
            return
        for event in ("startup", "shutdown"):  # of its life; there is nothing to do
            await receive()
            await send({"type": f"lifespan.{event}.complete"})

    return called
