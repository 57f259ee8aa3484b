"""What stands before the replicas: takes a request, has it answered, and turns to another replica where one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretell.cluster.gateway_metrics import GatewayMetrics, merge_health, merge_server_info
from foretell.cluster.prefix_affinity import prefix_hashes
from foretell.cluster.replicas import (
    OK,
    Parts,
    ReplicaCall,
    ReplicaLost,
    Replicas,
    ResponseHead,
    RunningReplicas,
    call_all,
    start_call,
)
from foretell.server.config import ServerConfig
from foretell.server.errors import ApiError, to_api_error
from foretell.server.middleware import bearer_key, build_middleware, wrap
from foretell.server.sse import DONE, ClientDisconnected, cancel_on_disconnect, sse_event

LOG = logging.getLogger("foretell")
ELSEWHERE = (429, 503)  # answers of a replica that another one may not give
SETTLE = 0.5  # seconds /health waits for the others once one replica is well; liveness probes often allow 1 s
LARGE = 100_000  # bytes of a body that is read beside the event loop
PAUSE = 0.1  # seconds before a request goes to another replica, doubled each time
SHOWN = b"x-foretell-replica"
LOST = ApiError(502, "the replica that wrote this was lost; send it again", "server_error", code="replica_lost")
NOBODY = "no replica could take the request; come back later"
LEAVING = "the server is about to stop and takes nothing new"


class Gateway:
    """An ASGI application over replicas of one server."""

    def __init__(self, replicas: Replicas, attempts: int, patience: float) -> None:
        """`patience`: seconds until an answer must have begun, and between two of its parts."""
        self.replicas, self.attempts, self.timeout = replicas, attempts, patience
        self.metrics = GatewayMetrics()
        self.ongoing = 0
        self.draining = False
        self._together: dict[str, Callable[[ReplicaCall], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/metrics/replicas": self._metrics,
            "/health": self._standing,
            "/ready": self._standing,
            "/server_info": self._info,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.ongoing += 1
        sent = _Sent(send)
        try:
            call = await _read(scope, receive)
            together = self._together.get(call.path) if call.method == "GET" else None
            if together is not None:
                await (await together(call))(scope, receive, sent)
            elif self.draining:
                raise _later(LEAVING)
            else:
                await cancel_on_disconnect(receive, self._forward(call, sent))
        except ClientDisconnected:
            pass
        except Exception as error:
            if not isinstance(error, ApiError):
                LOG.exception("a request to %s failed", scope["path"])
            if sent.begun:
                raise  # nothing can be said any more but that it broke off
            await self.metrics.error_response(to_api_error(error))(scope, receive, send)
        finally:
            self.ongoing -= 1

    async def _forward(self, call: ReplicaCall, send: Send) -> None:
        head, rest = await self._begin(call)
        async with aclosing(rest):
            headers = [*head.headers, (SHOWN, head.replica.encode())]
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
            await send({"type": "http.response.body", "body": head.body, "more_body": head.more})
            if head.more:
                await self._pass_on(head, rest, send)

    async def _pass_on(self, head: ResponseHead, rest: Parts, send: Send) -> None:
        try:
            while (part := await self._next(rest)) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (ReplicaLost, TimeoutError) as error:
            self.metrics.cut.inc()
            if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            failure = LOST if isinstance(error, ReplicaLost) else to_api_error(error)
            await send({"type": "http.response.body", "body": sse_event(failure.body()) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, rest: Parts) -> ResponseHead | bytes | None:
        """Wait for the next part of an answer; None at its end."""
        async with asyncio.timeout(self.timeout):
            return await anext(rest, None)

    async def _begin(self, call: ReplicaCall) -> tuple[ResponseHead, Parts]:
        """How an answer begins and where its rest comes from; until it does, a lost replica costs nothing.

        A request that ran too long gets 504 and no Retry-After: the client would only repeat the work.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await self._try(call)
        except TimeoutError as error:
            raise (to_api_error(error) if self.replicas.names() else _later(NOBODY)) from None

    async def _try(self, call: ReplicaCall) -> tuple[ResponseHead, Parts]:
        for attempt in range(self.attempts):
            if attempt:
                self.metrics.moved.inc()
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                head, rest = await start_call(self.replicas, call)
            except ReplicaLost:
                continue
            if head.status not in ELSEWHERE or head.replica in call.avoid or attempt == self.attempts - 1:
                return head, rest
            await rest.aclose()
            call = call.avoid_also(head.replica)
        raise _later(NOBODY)

    async def _metrics(self, call: ReplicaCall) -> Response:
        found = await call_all(self.replicas, replace(call, path="/metrics"))
        pages = {name: body.decode() for name, (status, body) in found.items() if status == OK}
        return self.metrics.response(pages, each=call.path != "/metrics")

    async def _standing(self, call: ReplicaCall) -> Response:
        status, said = merge_health(await call_all(self.replicas, call, SETTLE))
        if call.path == "/ready" and self.draining:
            status, said = 503, {**said, "status": "unavailable", "reason": LEAVING}
        return JSONResponse(said, status)

    async def _info(self, call: ReplicaCall) -> Response:
        found = await call_all(self.replicas, call)
        well = {name: body for name, (status, body) in found.items() if status == OK}
        if not well:
            raise _later(NOBODY)
        return JSONResponse(merge_server_info(well))


class _Sent:
    """Passes on what is sent and notes that something was."""

    def __init__(self, send: Send) -> None:
        self.send, self.begun = send, False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self.send(message)


async def _read(scope: Scope, receive: Receive) -> ReplicaCall:
    """The request, whole."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body, key = b"".join(parts), bearer_key(scope)
    large = len(body) > LARGE
    marks = (
        await asyncio.to_thread(prefix_hashes, scope["path"], key, body)
        if large
        else prefix_hashes(scope["path"], key, body)
    )
    return ReplicaCall(
        scope["method"],
        scope["path"],
        scope.get("query_string", b""),
        tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        body,
        tuple(scope["client"]) if scope.get("client") else None,
        marks,
    )


def _later(words: str) -> ApiError:
    return ApiError(503, words, "server_error", code="unavailable", headers={"Retry-After": "1"})


GRACE = 10.0  # seconds beyond the request timeout: a replica that ends a request reports it first


class RayReplicas:
    """Replicas behind a handle; the router of `router.py` chooses among them."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    def names(self) -> Sequence[str]:
        return RunningReplicas.names

    async def call(self, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
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
        self.gateway = Gateway(RayReplicas(handle), attempts, config.request_timeout + GRACE)
        self.guarded = wrap(self.gateway, build_middleware(config, self.gateway.metrics.error_response))

    async def drain(self) -> None:
        """Take nothing new."""
        self.gateway.draining = True

    async def ongoing(self) -> int:
        """Requests that are not answered to the end."""
        return self.gateway.ongoing


def application() -> ASGIApp:
    """What Ray Serve calls for each request, once it has made an Ingress."""
    from ray import serve

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await serve.get_replica_context().servable_object.guarded(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):  # of its life; there is nothing to do
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return called
