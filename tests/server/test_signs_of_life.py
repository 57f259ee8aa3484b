"""Streams without output: headers, first events and signs of life after a while, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from foretell.build.engine_builder import Assembly
from foretell.config import EngineConfig, SpeculationConfig
from foretell.engine.streams import StepFailed, Stream, StreamItem
from foretell.errors import RequestError
from foretell.server.app import create_app
from foretell.server.config import ServerConfig
from foretell.server.http_protocol import CONNECTION_KEY
from foretell.server.service import Service
from foretell.server.sse import COMMENT
from tests.virtual_time import now, run

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOKENS = 6
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": TOKENS},
    "/v1/completions": {"prompt": "Hello", "max_tokens": TOKENS},
    "/v1/messages": {"messages": HELLO, "max_tokens": TOKENS},
    "/v1/responses": {"input": "Hello", "max_output_tokens": TOKENS},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": TOKENS, "temperature": 0}},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": TOKENS, "temperature": 0}},
    "/completion": {"prompt": "Hello", "n_predict": TOKENS},
}
PLAIN = {"temperature": 0, "speculative": False}  # one token in each item
SIGNS = {
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "/api/chat": b'"message":{"role":"assistant","content":""},"done":false}\n',
    "/api/generate": b'"response":"","done":false}\n',
}
OPENINGS = {"/v1/messages": b"event: message_start\n", "/v1/responses": b"event: response.created\n"}


@dataclass
class Call:
    """A request of a client, and what it has received, with times."""

    app: Any
    path: str
    body: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    started: float = -1.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    async def run(self) -> None:
        sent = json.dumps({**self.body, "stream": True}).encode()
        messages = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Event().wait() and {}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status, self.started = message["status"], now()
            elif message["body"]:
                self.parts.append((now(), message["body"]))

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": self.path, "query_string": b""}
        more = {"headers": headers, "scheme": "http", "server": ("localhost", 1), "state": self.state}
        await self.app({**scope, **more, "root_path": "", "raw_path": self.path.encode()}, receive, send)

    @property
    def text(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    @property
    def times(self) -> list[float]:
        return [time for time, _ in self.parts]


def scene(
    assembly: Assembly,
    path: str,
    arrivals: list[float],
    failure: tuple[float, Exception] | None = None,
    state: dict[str, Any] | None = None,
    **settings: Any,
) -> Call:
    """Return a call whose items arrive at these times; the last ones arrive with the last of them."""

    async def play() -> Call:
        service = Service(assembly, ServerConfig(**settings), EngineConfig(model="tiny"), SpeculationConfig())
        loop = asyncio.get_running_loop()

        def deliver(stream: Stream, items: list[StreamItem]) -> None:
            for item in items:
                stream.unfinished -= item.delta.finish_reason is not None
                stream.put(item)

        async def submit(preprocess: Callable[..., Any], body: Any, client: Any, deadline: float) -> Any:
            job = preprocess(body, client)
            stream, items = Stream(job.requests), generated(assembly, job.requests)
            assert len(items) >= len(arrivals)
            for i, time in enumerate(arrivals):
                loop.call_at(time, deliver, stream, items[i : None if i + 1 == len(arrivals) else i + 1])
            if failure is not None:
                loop.call_at(failure[0], stream.fail, failure[1])
            return job, stream

        service.submit = submit  # type: ignore[method-assign]
        more = {"speculative": False} if path.startswith("/api/") else PLAIN
        call = Call(create_app(service), path, BODIES[path] | more, state or {})
        await call.run()
        await service.close()
        return call

    return run(play())


def generated(assembly: Assembly, requests: list[Any]) -> list[StreamItem]:
    """Return the output as the engine's thread would deliver it, one item for each token."""
    (request,) = requests
    state, items = assembly.engine.add(request, None), []
    while assembly.engine.busy:
        for delta in assembly.engine.step():
            items.append(StreamItem(delta, state, not items))
    return items


@pytest.mark.parametrize("path", BODIES)
def test_an_output_that_comes_in_time_has_no_signs_of_life(assembly: Assembly, path: str) -> None:
    quick = scene(assembly, path, [9.0, 18.0, 27.0], max_n=2)
    assert quick.status == 200 and quick.times[-1] == 27.0
    assert quick.started == (0.0 if path == "/completion" else 9.0), "llama.cpp's has no first events"
    sign = SIGNS.get(path, COMMENT)
    assert quick.text.count(sign) == (1 if path == "/v1/messages" else 0), "a message begins with a ping"


@pytest.mark.parametrize("path", BODIES)
def test_a_late_output_is_preceded_by_headers_and_signs_of_life(assembly: Assembly, path: str) -> None:
    quick, late = scene(assembly, path, [0.0]), scene(assembly, path, [95.0] * 4 + [130.0], stream_keepalive=15.0)
    assert late.status == 200 and late.started == (0.0 if path == "/completion" else 15.0)
    assert list(dict.fromkeys(late.times)) == [15.0, 30.0, 45.0, 60.0, 75.0, 90.0, 95.0, 110.0, 125.0, 130.0]
    sign, opening = SIGNS.get(path, COMMENT), OPENINGS.get(path, b"")
    assert late.parts[0][1].startswith(opening) and late.text.count(opening or b"\0") == bool(opening)
    for time, part in late.parts[1:]:
        assert part.endswith(sign) == (time not in (95.0, 130.0)), time
    assert content(late) == content(quick) and len(content(quick)) > 0


def content(call: Call) -> str:
    """Return the text of all events; comments and other lines are skipped as clients do."""
    found = []
    for line in call.text.decode().splitlines():
        data = line if call.path.startswith("/api/") else line.partition("data: ")[2]
        event = json.loads(data) if data.startswith("{") else {}
        choice = (event.get("choices") or [{}])[0]
        message = event.get("message") or {}
        delta = event.get("delta")
        texts = (
            choice.get("text"), (choice.get("delta") or {}).get("content"), event.get("response"),
            delta.get("text") if isinstance(delta, dict) else delta, event.get("content"), message.get("content"),
        )  # fmt: skip
        found += [text for text in texts if isinstance(text, str)]
    return "".join(found)


def test_events_of_responses_are_numbered_without_a_gap(assembly: Assembly) -> None:
    late = scene(assembly, "/v1/responses", [25.0, 26.0])
    events = [json.loads(line[6:]) for line in late.text.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert late.parts[0][0] == 10.0 and late.parts[1] == (20.0, COMMENT)


def test_tokens_of_a_late_message_are_counted_at_the_end(assembly: Assembly) -> None:
    late = scene(assembly, "/v1/messages", [25.0])
    events = [json.loads(line[6:]) for line in late.text.decode().splitlines() if line.startswith("data: ")]
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert first["input_tokens"] > 0 == first["output_tokens"] and last["output_tokens"] == TOKENS
    assert first["input_tokens"] == last["input_tokens"] + last["cache_read_input_tokens"]


ERRORS: dict[str, Callable[[list[bytes]], bool]] = {
    "/v1/chat/completions": lambda events: b'"code":"step_failed"' in events[-2] and events[-1] == b"data: [DONE]",
    "/v1/completions": lambda events: b'"code":"step_failed"' in events[-2] and events[-1] == b"data: [DONE]",
    "/v1/messages": lambda events: events[-1].startswith(b'event: error\ndata: {"type":"error","error"'),
    "/v1/responses": lambda events: events[-1].startswith(b"event: response.failed\n"),
    "/api/chat": lambda events: events[-1] == b'{"error":"planted"}',
    "/api/generate": lambda events: events[-1] == b'{"error":"planted"}',
    "/completion": lambda events: b'"code":"step_failed"' in events[-1],
}


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_has_a_status_before_the_headers_and_is_an_event_after_them(assembly: Assembly, path: str) -> None:
    for time in (5.0, 35.0):
        call = scene(assembly, path, [], (time, StepFailed("planted")))
        has_status = time < 10.0 and path != "/completion"
        assert call.status == (500 if has_status else 200) and call.times[-1] == time
        if not has_status:
            end = b"\n" if path.startswith("/api/") else b"\n\n"
            assert ERRORS[path](call.text.removesuffix(end).split(end)), call.text


def test_signs_of_life_can_be_turned_off(assembly: Assembly) -> None:
    for seconds in (0.0, -1.0):
        call = scene(assembly, "/v1/messages", [500.0, 590.0], stream_keepalive=seconds)
        assert call.started == 500.0 and call.times == [500.0, 590.0]
    with pytest.raises(RequestError, match="stream_keepalive"):
        ServerConfig(stream_keepalive=float("nan"))


class Connection:
    """A connection that events are written to directly."""

    def __init__(self) -> None:
        self.written: list[float] = []

    def can_write(self) -> bool:
        return True

    def write(self, part: bytes) -> None:
        self.written.append(now())


def test_output_that_is_written_directly_puts_the_next_sign_off(assembly: Assembly) -> None:
    connection = Connection()
    call = scene(assembly, "/v1/completions", [3.0, 9.0, 15.0, 40.0], state={CONNECTION_KEY: connection})
    assert connection.written[:2] == [9.0, 15.0]
    assert [time for time, part in call.parts if part == COMMENT] == [25.0, 35.0] and call.times[-1] == 40.0
