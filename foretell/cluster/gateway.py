"""The gateway in front of the replicas: forwards requests, and retries on another replica if one is lost."""

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
    ReplicaCall,
    ReplicaLost,
    Replicas,
    ResponseHead,
    ResponseParts,
    RunningReplicas,
    call_all,
    start_call,
)
from foretell.server.config import ServerConfig
from foretell.server.dialects import dialect_of
from foretell.server.errors import ApiError, to_api_error
from foretell.server.middleware import build_middleware, client_key, wrap
from foretell.server.sse import ClientDisconnected, cancel_on_disconnect

LOG = logging.getLogger("foretell")
RETRY_STATUSES = (429, 503)  # responses of a replica that another replica may not give
HEALTH_GRACE = 0.5  # seconds /health waits for the others once one replica is well; liveness probes often allow 1 s
LARGE_BODY = 100_000  # bytes; larger bodies are hashed in a thread
RETRY_DELAY = 0.1  # seconds before the first retry, doubled each time
TIMEOUT_GRACE = 10.0  # seconds beyond the request timeout: a replica that aborts a request reports it first
STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
REPLICA_HEADER = b"x-foretell-replica"
LOST = ApiError(502, "the replica that generated this was lost; retry", "server_error", code="replica_lost")
NO_REPLICA = "no replica could take the request; retry later"
DRAINING = "the server is shutting down and takes no new requests"


class Gateway:
    """An ASGI application in front of the replicas of one server."""

    def __init__(self, replicas: Replicas, attempts: int, timeout: float) -> None:
        """`timeout`: seconds until a response must have begun, and between two of its parts."""
        self.replicas, self.attempts, self.timeout = replicas, attempts, timeout
        self.metrics = GatewayMetrics()
        self.ongoing = 0
        self.draining = False
        self._aggregated: dict[str, Callable[[ReplicaCall], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/metrics/replicas": self._metrics,
            "/health": self._health,
            "/ready": self._health,
            "/server_info": self._server_info,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.ongoing += 1
        tracked_send = _TrackedSend(send)
        try:
            call = await _read_call(scope, receive)
            aggregate = self._aggregated.get(call.path) if call.method == "GET" else None
            if aggregate is not None:
                await (await aggregate(call))(scope, receive, tracked_send)
            elif self.draining:
                raise _unavailable(DRAINING)
            else:
                await cancel_on_disconnect(receive, self._forward(call, tracked_send))
        except ClientDisconnected:
            pass
        except Exception as error:
            if not isinstance(error, ApiError):
                LOG.exception("a request to %s failed", scope["path"])
            if tracked_send.started:
                raise  # too late for an error response; the connection is closed
            await self.metrics.error_response(to_api_error(error), scope["path"])(scope, receive, send)
        finally:
            self.ongoing -= 1

    async def _forward(self, call: ReplicaCall, send: Send) -> None:
        head, rest = await self._start(call)
        async with aclosing(rest):
            headers = [*head.headers, (REPLICA_HEADER, head.replica.encode())]
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
            await send({"type": "http.response.body", "body": head.body, "more_body": head.more})
            if head.more:
                await self._forward_rest(call.path, head, rest, send)

    async def _forward_rest(self, path: str, head: ResponseHead, rest: ResponseParts, send: Send) -> None:
        try:
            while (part := await self._next_part(rest)) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (ReplicaLost, TimeoutError) as error:
            self.metrics.cut.inc()
            if not dict(head.headers).get(b"content-type", b"").startswith(STREAM_TYPES):
                raise
            failure = LOST if isinstance(error, ReplicaLost) else to_api_error(error)
            await send(
                {"type": "http.response.body", "body": dialect_of(path).stream_error(failure), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_part(self, rest: ResponseParts) -> ResponseHead | bytes | None:
        """Wait for the next part of a response; None at its end."""
        async with asyncio.timeout(self.timeout):
            return await anext(rest, None)

    async def _start(self, call: ReplicaCall) -> tuple[ResponseHead, ResponseParts]:
        """Return the response head and the parts that follow; up to here a lost replica costs the client nothing.

        A request that timed out gets 504 without Retry-After: the client would only repeat the work.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await self._start_with_retries(call)
        except TimeoutError as error:
            raise (to_api_error(error) if self.replicas.names() else _unavailable(NO_REPLICA)) from None

    async def _start_with_retries(self, call: ReplicaCall) -> tuple[ResponseHead, ResponseParts]:
        for attempt in range(self.attempts):
            if attempt:
                self.metrics.moved.inc()
                await asyncio.sleep(RETRY_DELAY * 2 ** (attempt - 1))
            try:
                head, rest = await start_call(self.replicas, call)
            except ReplicaLost:
                continue
            if head.status not in RETRY_STATUSES or head.replica in call.avoid or attempt == self.attempts - 1:
                return head, rest
            await rest.aclose()
            call = call.avoid_also(head.replica)
        raise _unavailable(NO_REPLICA)

    async def _metrics(self, call: ReplicaCall) -> Response:
        responses = await call_all(self.replicas, replace(call, path="/metrics"))
        texts = {name: body.decode() for name, (status, body) in responses.items() if status == OK}
        return self.metrics.response(texts, per_replica=call.path != "/metrics")

    async def _health(self, call: ReplicaCall) -> Response:
        status, body = merge_health(await call_all(self.replicas, call, HEALTH_GRACE))
        if call.path == "/ready" and self.draining:
            status, body = 503, {**body, "status": "unavailable", "reason": DRAINING}
        return JSONResponse(body, status)

    async def _server_info(self, call: ReplicaCall) -> Response:
        responses = await call_all(self.replicas, call)
        bodies = {name: body for name, (status, body) in responses.items() if status == OK}
        if not bodies:
            raise _unavailable(NO_REPLICA)
        return JSONResponse(merge_server_info(bodies))


class _TrackedSend:
    """Forwards ASGI messages and records whether the response has started."""

    def __init__(self, send: Send) -> None:
        self.send, self.started = send, False

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self.send(message)


async def _read_call(scope: Scope, receive: Receive) -> ReplicaCall:
    """Read the complete request and hash its prompt prefixes."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body, path, api_key = b"".join(parts), scope["path"], client_key(scope)
    if len(body) > LARGE_BODY:
        hashes = await asyncio.to_thread(prefix_hashes, path, api_key, body)
    else:
        hashes = prefix_hashes(path, api_key, body)
    return ReplicaCall(
        method=scope["method"],
        path=path,
        query=scope.get("query_string", b""),
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        body=body,
        client=tuple(scope["client"]) if scope.get("client") else None,
        prefix_hashes=hashes,
    )


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, "server_error", code="unavailable", headers={"Retry-After": "1"})


class RayReplicas:
    """Replicas called through a Ray Serve handle; `router.py` chooses among them."""

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
            raise  # the replica lives; its application failed
        except (RayError, RpcError) as error:
            ended = True
            raise ReplicaLost(str(error)) from error
        finally:
            if not ended:
                parts.cancel()


class Ingress:
    """The Ray Serve deployment of the gateway with its middleware."""

    def __init__(self, handle: Any, attempts: int, config: ServerConfig) -> None:
        self.gateway = Gateway(RayReplicas(handle), attempts, config.request_timeout + TIMEOUT_GRACE)
        # not `app`, which is a property of the class that Ray Serve derives from this one
        self.wrapped_app = wrap(self.gateway, build_middleware(config, self.gateway.metrics.error_response))

    async def drain(self) -> None:
        """Refuse new requests; running ones continue."""
        self.gateway.draining = True

    async def ongoing(self) -> int:
        """Return the number of requests without a complete response."""
        return self.gateway.ongoing


def application() -> ASGIApp:
    """Return the ASGI application that Ray Serve calls for each request once it has created an Ingress."""
    from ray import serve

    async def call_ingress(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await serve.get_replica_context().servable_object.wrapped_app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):  # lifespan events, which need no work here
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return call_ingress
