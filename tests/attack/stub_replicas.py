"""Stub replicas with faults, and callers that talk ASGI to the gateway in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.cluster.replicas import ReplicaCall, ReplicaLost, ResponseHead

JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
HEALTHY = b'{"status": "ok", "reason": null, "internal_states": [{}]}'
METRICS = b"# HELP foretell:n_total x\n# TYPE foretell:n_total counter\nforetell:n_total 1\n"
Behaviour = Callable[[str, ReplicaCall], AsyncGenerator[ResponseHead | bytes, None]]


def _body(call: ReplicaCall) -> bytes:
    return METRICS if call.path == "/metrics" else HEALTHY


async def healthy(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    yield ResponseHead(name, 200, JSON, _body(call), False)


async def hung(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Takes a request and never answers."""
    await asyncio.Event().wait()
    yield b""


async def dying(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    raise ReplicaLost("killed")
    yield b""


async def erroring(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Lives, and raises what is no part of its interface."""
    raise RuntimeError("a bug in the replica")
    yield b""


async def full(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    yield ResponseHead(name, 429, JSON, b'{"error": {"code": "queue_full"}}', False)


async def streaming(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    yield ResponseHead(name, 200, EVENTS, b"data: 1\n\n", True)
    yield b"data: [DONE]\n\n"


async def hung_midway(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    yield ResponseHead(name, 200, EVENTS, b"data: 1\n\n", True)
    await asyncio.Event().wait()


async def lost_midway(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
    yield ResponseHead(name, 200, EVENTS, b"data: 1\n\n", True)
    raise ReplicaLost("killed")


def slow(seconds: float, status: int = 200) -> Behaviour:
    """Answers after `seconds` with `status`."""

    async def behave(name: str, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        await asyncio.sleep(seconds)
        yield ResponseHead(name, status, JSON, _body(call), False)

    return behave


class StubReplicas:
    """Replicas by name. A call goes to its target, else to the first that it does not avoid."""

    def __init__(self, **behaviours: Behaviour) -> None:
        self.behaviours = behaviours
        self.asked: list[ReplicaCall] = []

    def names(self) -> Sequence[str]:
        return list(self.behaviours)

    async def call(self, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        self.asked.append(call)
        if not self.behaviours:
            await asyncio.Event().wait()  # as Ray Serve: until one runs
        free = [name for name in self.behaviours if name not in call.avoid]
        name = call.target or next(iter(free or self.behaviours))
        async for part in self.behaviours[name](name, call):
            yield part


@dataclass
class Caller:
    """One HTTP request. With `stalls` its body never ends; with `leaves` the caller is gone after so many seconds."""

    path: str = "/v1/completions"
    method: str = "POST"
    key: str = ""
    body: bytes = b"{}"
    stalls: bool = False
    leaves: float | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    reads: int = 0
    sent: list[dict[str, Any]] = field(default_factory=list)

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if self.reads == 1:
            return {"type": "http.request", "body": self.body, "more_body": self.stalls}
        if self.leaves is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.leaves or 0.0)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def call(self, app: Any) -> Caller:
        headers = [(b"host", b"127.0.0.1"), *self.headers]
        if self.key:
            headers.append((b"authorization", b"Bearer " + self.key.encode()))
        scope = {"type": "http", "http_version": "1.1", "method": self.method, "path": self.path, "headers": headers}
        await app({**scope, "query_string": b"", "client": None}, self.receive, self.send)
        return self

    @property
    def status(self) -> int | None:
        """Return the status, or None where nothing was sent; no response may start twice."""
        starts = [message["status"] for message in self.sent if message["type"] == "http.response.start"]
        assert len(starts) <= 1, "one request, one response"
        return starts[0] if starts else None

    @property
    def complete(self) -> bool:
        """Return whether the response was sent to its end."""
        return bool(self.sent) and not self.sent[-1].get("more_body", False)

    @property
    def reply(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def header(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    def json(self) -> Any:
        return json.loads(self.reply)
