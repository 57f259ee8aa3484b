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

from foretell.cluster.gateway_metrics import GatewayMetrics, server_info, standing
from foretell.cluster.prefix_affinity import marks_of
from foretell.cluster.replicas import OK, Call, Parts, ReplicaLost, Replicas, ResponseHead, Running, ask_all, opened
from foretell.server.config import ServerConfig
from foretell.server.errors import ApiError, failure_of
from foretell.server.middleware import middleware_of, shown_key, wrapped
from foretell.server.sse import DONE, ClientDisconnected, event, unless_gone

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
        self.replicas, self.attempts, self.patience = replicas, attempts, patience
        self.ledger = GatewayMetrics()
        self.ongoing = 0
        self.leaving = False
        self._together: dict[str, Callable[[Call], Awaitable[Response]]] = {
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
            elif self.leaving:
                raise _later(LEAVING)
            else:
                await unless_gone(receive, self._forward(call, sent))
        except ClientDisconnected:
            pass
        except Exception as error:
            if not isinstance(error, ApiError):
                LOG.exception("a request to %s failed", scope["path"])
            if sent.begun:
                raise  # nothing can be said any more but that it broke off
            await self.ledger.refusal(failure_of(error))(scope, receive, send)
        finally:
            self.ongoing -= 1

    async def _forward(self, call: Call, send: Send) -> None:
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
            self.ledger.cut.inc()
            if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            failure = LOST if isinstance(error, ReplicaLost) else failure_of(error)
            await send({"type": "http.response.body", "body": event(failure.body()) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, rest: Parts) -> ResponseHead | bytes | None:
        """Wait for the next part of an answer; None at its end."""
        async with asyncio.timeout(self.patience):
            return await anext(rest, None)

    async def _begin(self, call: Call) -> tuple[ResponseHead, Parts]:
        """How an answer begins and where its rest comes from; until it does, a lost replica costs nothing.

        A request that ran too long gets 504 and no Retry-After: the client would only repeat the work.
        """
        try:
            async with asyncio.timeout(self.patience):
                return await self._try(call)
        except TimeoutError as error:
            raise (failure_of(error) if self.replicas.names() else _later(NOBODY)) from None

    async def _try(self, call: Call) -> tuple[ResponseHead, Parts]:
        for attempt in range(self.attempts):
            if attempt:
                self.ledger.moved.inc()
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                head, rest = await opened(self.replicas, call)
            except ReplicaLost:
                continue
            if head.status not in ELSEWHERE or head.replica in call.avoid or attempt == self.attempts - 1:
                return head, rest
            await rest.aclose()
            call = call.avoiding(head.replica)
        raise _later(NOBODY)

    async def _metrics(self, call: Call) -> Response:
        found = await ask_all(self.replicas, replace(call, path="/metrics"))
        pages = {name: body.decode() for name, (status, body) in found.items() if status == OK}
        return self.ledger.page(pages, each=call.path != "/metrics")

    async def _standing(self, call: Call) -> Response:
        status, said = standing(await ask_all(self.replicas, call, SETTLE))
        if call.path == "/ready" and self.leaving:
            status, said = 503, {**said, "status": "unavailable", "reason": LEAVING}
        return JSONResponse(said, status)

    async def _info(self, call: Call) -> Response:
        found = await ask_all(self.replicas, call)
        well = {name: body for name, (status, body) in found.items() if status == OK}
        if not well:
            raise _later(NOBODY)
        return JSONResponse(server_info(well))


class _Sent:
    """Passes on what is sent and notes that something was."""

    def __init__(self, send: Send) -> None:
        self.send, self.begun = send, False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self.send(message)


async def _read(scope: Scope, receive: Receive) -> Call:
    """The request, whole."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body, key = b"".join(parts), shown_key(scope)
    large = len(body) > LARGE
    marks = await asyncio.to_thread(marks_of, scope["path"], key, body) if large else marks_of(scope["path"], key, body)
    return Call(
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
        for phase in ("startup", "shutdown"):  # of its life; there is nothing to do
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return called
