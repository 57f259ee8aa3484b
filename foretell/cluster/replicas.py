"""The replicas as the gateway sees them: one answers a request, or all of them answer it at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ReplicaCall:
    """One HTTP request, whole. `marks` are the hashes of its prompt's prefixes, `avoid` the replicas to try last;
    `target`: the replica that should answer, while it runs."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    prefix_hashes: tuple[bytes, ...] = ()
    avoid: tuple[str, ...] = ()
    target: str | None = None

    def avoid_also(self, replica: str) -> ReplicaCall:
        """The same, for another replica if there is one."""
        return self if replica in self.avoid else replace(self, avoid=(*self.avoid, replica))


@dataclass(frozen=True)
class ResponseHead:
    """The beginning of an answer: who answers, the status, and the first of the body. `more`: bytes follow."""

    replica: str
    status: int
    headers: Headers
    body: bytes
    more: bool


LOG = logging.getLogger("foretell")
LIMIT = 5.0  # seconds that each replica has to answer a request that goes to all
RETRY = 0.1  # seconds between attempts to reach any replica
OK, FAILED, UNAVAILABLE = 200, 500, 503

Parts = AsyncGenerator[ResponseHead | bytes, None]
Answers = dict[str, tuple[int, bytes]]  # replica -> status, body


class ReplicaLost(Exception):
    """A replica went away before the end of its answer."""


class RunningReplicas:
    """The replicas that this process's router knows. Ray Serve copies the router with its module, hence not there."""

    names: ClassVar[tuple[str, ...]] = ()


class Replicas(Protocol):
    """Replicas of one server."""

    def names(self) -> Sequence[str]:
        """Return the replicas that are known to run; none are known before the first request."""

    def call(self, call: ReplicaCall) -> Parts:
        """Yield the head of an answer, then the rest of its body; raise ReplicaLost."""


async def start_call(replicas: Replicas, call: ReplicaCall) -> tuple[ResponseHead, Parts]:
    """Wait for the head of an answer; return it with the parts that follow."""
    parts = replicas.call(call)
    try:
        head = await anext(parts)
    except BaseException:
        await parts.aclose()
        raise
    assert isinstance(head, ResponseHead), "an answer begins with its head"
    return head, parts


async def call_all(replicas: Replicas, call: ReplicaCall, settle: float | None = None) -> Answers:
    """Send a request to all replicas at the same time and return their answers.

    A replica that does not answer within LIMIT counts as unavailable; one that was lost is left out. Once a replica has
    answered with 200, the others have `settle` seconds more, where it is given.
    """
    names = replicas.names()
    if names:
        return await _answers(replicas, [replace(call, target=name) for name in names], settle)
    found = await _answers(replicas, [call], settle)  # the first request: with its answer the others are known
    others = [replace(call, target=name) for name in replicas.names() if name not in found]
    return found | await _answers(replicas, others, settle)


async def _answers(replicas: Replicas, calls: Sequence[ReplicaCall], settle: float | None) -> Answers:
    loop = asyncio.get_running_loop()
    # Each in a context of its own: Ray Serve takes a request's id from there and cannot route two with one id.
    asked = {loop.create_task(_answer(replicas, call), context=Context()): call for call in calls}
    deadline, waiting, found = loop.time() + LIMIT, set(asked), Answers()
    try:
        while waiting and (left := deadline - loop.time()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found |= task.result()
            if settle is not None and any(status == OK for status, _ in found.values()):
                deadline = min(deadline, loop.time() + settle)
    finally:
        for task in waiting:
            task.cancel()  # not awaited: a replica that hangs may hang here too
    late = [target for task in waiting if (target := asked[task].target) is not None]
    return found | dict.fromkeys(late, (UNAVAILABLE, b'{"reason": "the replica did not answer in time"}'))


async def _answer(replicas: Replicas, call: ReplicaCall) -> Answers:
    while True:
        try:
            head, rest = await start_call(replicas, call)
            async with aclosing(rest):
                body = head.body + b"".join([part async for part in rest if isinstance(part, bytes)])
            return {head.replica: (head.status, body)}
        except ReplicaLost:
            if call.target is not None:
                return {}
            await asyncio.sleep(RETRY)
        except Exception:
            LOG.exception("a replica failed to answer %s", call.path)
            return {} if call.target is None else {call.target: (FAILED, b'{"reason": "the replica failed"}')}
