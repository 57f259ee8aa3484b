"""The gateway's view of the replicas: calls to one replica, and calls to all of them at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

LOG = logging.getLogger("foretell")
CALL_ALL_TIMEOUT = 5.0  # seconds each replica has to answer a call to all
RETRY_SECONDS = 0.1  # between attempts to reach any replica
OK, FAILED, UNAVAILABLE = 200, 500, 503

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ReplicaCall:
    """One complete HTTP request for a replica."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    prefix_hashes: tuple[bytes, ...] = ()
    avoid: tuple[str, ...] = ()  # replicas to try last
    target: str | None = None  # the replica to call, as long as it runs

    def avoid_also(self, replica: str) -> ReplicaCall:
        """Return the call with one more replica to avoid."""
        return self if replica in self.avoid else replace(self, avoid=(*self.avoid, replica))


@dataclass(frozen=True)
class ResponseHead:
    """The replica, status, headers and first body part of a response; `more`: further parts follow."""

    replica: str
    status: int
    headers: Headers
    body: bytes
    more: bool


ResponseParts = AsyncGenerator[ResponseHead | bytes, None]
Responses = dict[str, tuple[int, bytes]]  # replica -> status, body


class ReplicaLost(Exception):
    """A replica died or became unreachable before the end of its response."""


class RunningReplicas:
    """The replicas known to this process's router. Ray Serve copies the router with its module, hence kept here."""

    names: ClassVar[tuple[str, ...]] = ()


class Replicas(Protocol):
    """The replicas of one server, as the gateway calls them."""

    def names(self) -> Sequence[str]:
        """Return the replicas known to run; none are known before the first request."""

    def call(self, call: ReplicaCall) -> ResponseParts:
        """Yield the response head, then the rest of the body; raise ReplicaLost."""


async def start_call(replicas: Replicas, call: ReplicaCall) -> tuple[ResponseHead, ResponseParts]:
    """Wait for the response head; return it with the parts that follow."""
    parts = replicas.call(call)
    try:
        head = await anext(parts)
    except BaseException:
        await parts.aclose()
        raise
    assert isinstance(head, ResponseHead), "a response begins with its head"
    return head, parts


async def call_all(replicas: Replicas, call: ReplicaCall, grace: float | None = None) -> Responses:
    """Send a request to all replicas at the same time and return their responses.

    A replica that does not answer within CALL_ALL_TIMEOUT counts as unavailable; a lost one is left out. With `grace`,
    the others have that many more seconds once a replica has answered with 200.
    """
    names = replicas.names()
    if names:
        return await _call_each(replicas, [replace(call, target=name) for name in names], grace)
    responses = await _call_each(replicas, [call], grace)  # after the first response the others are known
    others = [replace(call, target=name) for name in replicas.names() if name not in responses]
    return responses | await _call_each(replicas, others, grace)


async def _call_each(replicas: Replicas, calls: Sequence[ReplicaCall], grace: float | None) -> Responses:
    loop = asyncio.get_running_loop()
    # Each in a context of its own: Ray Serve takes the request id from the context and cannot route two with one id.
    tasks = {loop.create_task(_call_one(replicas, call), context=Context()): call for call in calls}
    deadline, waiting, responses = loop.time() + CALL_ALL_TIMEOUT, set(tasks), Responses()
    try:
        while waiting and (left := deadline - loop.time()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                responses |= task.result()
            if grace is not None and any(status == OK for status, _ in responses.values()):
                deadline = min(deadline, loop.time() + grace)
    finally:
        for task in waiting:
            task.cancel()  # not awaited: a replica that hangs may hang here too
    late = [target for task in waiting if (target := tasks[task].target) is not None]
    return responses | dict.fromkeys(late, (UNAVAILABLE, b'{"reason": "the replica did not answer in time"}'))


async def _call_one(replicas: Replicas, call: ReplicaCall) -> Responses:
    while True:
        try:
            head, rest = await start_call(replicas, call)
            async with aclosing(rest):
                body = head.body + b"".join([part async for part in rest if isinstance(part, bytes)])
            return {head.replica: (head.status, body)}
        except ReplicaLost:
            if call.target is not None:
                return {}
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            LOG.exception("a replica failed to answer %s", call.path)
            return {} if call.target is None else {call.target: (FAILED, b'{"reason": "the replica failed"}')}
