"""What stands before the replicas: takes a request, has it answered, and turns to another replica where one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol

from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from foretell.server.failures import Failure, failure_of
from foretell.server.guards import shown_key
from foretell.server.wire import DONE, CallerGone, event, unless_gone

from .call import Call, Head
from .gathered import server_info, standing
from .ledger import Ledger
from .marks import marks_of

LOG = logging.getLogger("foretell")
ELSEWHERE = (429, 503)  # answers of a replica that another one may not give
LOOK = 5.0  # seconds that replicas have to say how they are
LARGE = 100_000  # bytes of a body that is read beside the event loop
PAUSE = 0.1  # seconds before a request goes to another replica, doubled each time
SHOWN = b"x-foretell-replica"
LOST = Failure(502, "the replica that wrote this was lost; send it again", "server_error", code="replica_lost")
NOBODY = "no replica could take the request; come back later"
LEAVING = "the server is about to stop and takes nothing new"
Told = dict[str, tuple[Head, bytes]]


class ReplicaLost(Exception):
    """A replica went away before it had answered to the end."""


class Replicas(Protocol):
    """Who answers."""

    def ask(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """The head of an answer and the rest of it; raises ReplicaLost."""


class Front:
    """An ASGI application over replicas of one server."""

    def __init__(self, replicas: Replicas, attempts: int, patience: float) -> None:
        """`patience`: seconds until an answer must have begun."""
        self.replicas, self.attempts, self.patience = replicas, attempts, patience
        self.ledger = Ledger()
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
        except CallerGone:
            pass
        except Exception as error:
            if not isinstance(error, Failure):
                LOG.exception("a request to %s failed", scope["path"])
            if sent.begun:
                raise  # nothing can be said any more but that it broke off
            await failure_of(error).response()(scope, receive, send)
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

    async def _pass_on(self, head: Head, rest: AsyncGenerator[Head | bytes, None], send: Send) -> None:
        try:
            async for part in rest:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ReplicaLost:
            self.ledger.cut.inc()
            if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            await send({"type": "http.response.body", "body": event(LOST.body()) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, call: Call) -> tuple[Head, AsyncGenerator[Head | bytes, None]]:
        """How an answer begins and where its rest comes from; until it does, a lost replica costs nothing."""
        try:
            async with asyncio.timeout(self.patience):
                return await self._try(call)
        except TimeoutError:
            raise _later(NOBODY) from None

    async def _try(self, call: Call) -> tuple[Head, AsyncGenerator[Head | bytes, None]]:
        for attempt in range(self.attempts):
            if attempt:
                self.ledger.moved.inc()
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                head, rest = await self._open(call)
            except ReplicaLost:
                continue
            if head.status not in ELSEWHERE or head.replica in call.avoid or attempt == self.attempts - 1:
                return head, rest
            await rest.aclose()
            call = call.avoiding(head.replica)
        raise _later(NOBODY)

    async def _open(self, call: Call) -> tuple[Head, AsyncGenerator[Head | bytes, None]]:
        """One replica's answer, once it has begun."""
        parts = self.replicas.ask(call)
        try:
            head = await anext(parts)
        except BaseException:
            await parts.aclose()
            raise
        assert isinstance(head, Head), "an answer begins with its head"
        return head, parts

    async def _each(self, call: Call) -> Told:
        """What every replica says to the same request: each is asked, until one comes for the second time."""
        found: Told = {}
        call = replace(call, patient=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                while True:
                    try:
                        head, body = await self._whole(call)
                    except ReplicaLost:
                        await asyncio.sleep(PAUSE)
                        continue
                    if head.replica in found:
                        break
                    found[head.replica] = head, body
                    call = call.avoiding(head.replica)
        return found

    async def _whole(self, call: Call) -> tuple[Head, bytes]:
        head, rest = await self._open(call)
        async with aclosing(rest):
            return head, head.body + b"".join([part async for part in rest if isinstance(part, bytes)])

    async def _metrics(self, call: Call) -> Response:
        told = await self._each(replace(call, path="/metrics"))
        pages = {name: body.decode() for name, (head, body) in told.items() if head.status == 200}
        return self.ledger.page(pages, each=call.path != "/metrics")

    async def _standing(self, call: Call) -> Response:
        found = {name: (head.status, body) for name, (head, body) in (await self._each(call)).items()}
        status, said = standing(found)
        if call.path == "/ready" and self.leaving:
            status, said = 503, {**said, "status": "unavailable", "reason": LEAVING}
        return JSONResponse(said, status)

    async def _info(self, call: Call) -> Response:
        found = await self._each(call)
        if not found:
            raise _later(NOBODY)
        for head, body in found.values():
            if head.status != 200:
                return Response(body, head.status, {"content-type": "application/json"})
        return JSONResponse(server_info({name: body for name, (_, body) in found.items()}))


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
            raise CallerGone
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


def _later(words: str) -> Failure:
    return Failure(503, words, "server_error", code="unavailable", headers={"Retry-After": "1"})
