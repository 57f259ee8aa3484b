"""The gateway over stub replicas, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from foretell.cluster import gateway as module
from foretell.cluster import replicas as asking
from foretell.cluster.gateway import Gateway
from foretell.cluster.replica import call_app
from foretell.cluster.replicas import ReplicaCall, ReplicaLost, ResponseHead
from tests.waiting import TIMEOUT

EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON = ((b"content-type", b"application/json"),)
WELL = b'{"status": "ok", "reason": null}'
Play = Callable[[ReplicaCall], AsyncGenerator[ResponseHead | bytes, None]]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_DELAY", 0.0)


class Cast:
    """Stub replicas by name; a call goes to its target, else to the first it does not avoid, else to the first."""

    def __init__(self, **plays: Play) -> None:
        self.plays = plays
        self.asked: list[tuple[str, ReplicaCall]] = []

    def names(self) -> list[str]:
        return list(self.plays) if self.asked else []

    async def call(self, call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        names = list(self.plays)
        if not names:
            await asyncio.Event().wait()
        name = call.target or next((name for name in names if name not in call.avoid), names[0])
        self.asked.append((name, call))
        async for part in self.plays[name](call):
            yield part

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.asked]


def says(name: str, body: bytes = WELL, status: int = 200) -> Play:
    async def play(call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        yield ResponseHead(name, status, JSON, body, False)

    return play


def streams(name: str, *parts: bytes, dies: bool = False) -> Play:
    async def play(call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        yield ResponseHead(name, 200, EVENTS, parts[0], True)
        for part in parts[1:]:
            yield part
        if dies:
            raise ReplicaLost

    return play


def dies_once(cast: Cast, name: str) -> None:
    """A replica that is lost at its first request."""

    async def play(call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        del cast.plays[name]
        raise ReplicaLost
        yield b""

    cast.plays = {name: play, **cast.plays}


def ask(front: Gateway, path: str = "/v1/completions", method: str = "POST", **more: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.request(method, path, **more)

    return asyncio.run(go())


def value(page: httpx.Response, name: str) -> float:
    return next(float(line.split()[-1]) for line in page.text.splitlines() if line.startswith(name))


def test_a_request_goes_through_as_it_is() -> None:
    cast = Cast(a=says("a", b'{"x": 1}', 201))
    reply = ask(Gateway(cast, 3, 9), "/v1/completions?y=2", json={"prompt": "p" * 100}, headers={"x-own": "1"})
    (call,) = [call for _, call in cast.asked]
    assert (reply.status_code, reply.json(), reply.headers["x-foretell-replica"]) == (201, {"x": 1}, "a")
    assert (call.method, call.path, call.query) == ("POST", "/v1/completions", b"y=2")
    assert json.loads(call.body)["prompt"] == "p" * 100 and (b"x-own", b"1") in call.headers
    assert call.prefix_hashes


def test_a_stream_goes_through_untouched() -> None:
    reply = ask(Gateway(Cast(a=streams("a", b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n")), 3, 9))
    assert reply.content == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert reply.headers["content-type"].startswith("text/event-stream")


def test_a_replica_lost_before_the_first_byte_costs_nothing() -> None:
    cast = Cast(b=says("b"))
    dies_once(cast, "a")
    front = Gateway(cast, 3, 9)
    assert ask(front).headers["x-foretell-replica"] == "b"
    assert cast.order == ["a", "b"]
    assert b"foretell:requests_moved_total 1.0" in bytes(front.metrics.response({}, per_replica=False).body)


def test_a_request_that_kills_replicas_is_not_given_to_all() -> None:
    cast = Cast()
    for name in "abcdefgh":
        dies_once(cast, name)
    reply = ask(Gateway(cast, 3, 9))
    assert (reply.status_code, reply.json()["error"]["code"], len(cast.plays)) == (503, "unavailable", 5)
    assert reply.headers["retry-after"]


def test_a_loss_has_the_shape_of_the_api_that_was_called() -> None:
    def last(path: str) -> str:
        reply = ask(Gateway(Cast(a=streams("a", b"first\n\n", dies=True)), 3, 9), path)
        return reply.text.removeprefix("first\n\n")

    event, data = last("/v1/messages").rstrip().split("\n")
    assert event == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"
    assert json.loads(last("/v1/responses").split("data: ")[1])["code"] == "replica_lost"
    assert "was lost" in json.loads(last("/api/chat"))["error"]
    refused = ask(Gateway(Cast(a=says("a", b"{}", 503)), 1, 9), "/v1/messages")
    assert refused.status_code == 503


def test_a_replica_lost_midway_is_reported_in_the_last_event() -> None:
    reply = ask(Gateway(Cast(a=streams("a", b"data: 1\n\n", dies=True)), 3, 9))
    events = reply.content.split(b"\n\n")
    assert events[0] == b"data: 1" and json.loads(events[1][6:])["error"]["code"] == "replica_lost"
    assert events[2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_replica_is_skipped(status: int) -> None:
    cast = Cast(a=says("a", status=status), b=says("b"))
    assert ask(Gateway(cast, 3, 9)).status_code == 200
    assert cast.order == ["a", "b"]


def test_when_all_are_full_that_is_the_answer() -> None:
    cast = Cast(a=says("a", b'{"error": 1}', 429), b=says("b", b'{"error": 1}', 429))
    reply = ask(Gateway(cast, 5, 9))
    assert (reply.status_code, reply.json(), cast.order) == (429, {"error": 1}, ["a", "b", "a"])


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_other_refusals_are_the_answer(status: int) -> None:
    cast = Cast(a=says("a", status=status), b=says("b"))
    assert ask(Gateway(cast, 3, 9)).status_code == status
    assert cast.order == ["a"]


def test_without_a_replica_callers_wait_no_longer_than_they_must() -> None:
    reply = ask(Gateway(Cast(), 3, 0.01))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_metrics_of_all() -> None:
    text = b"# HELP foretell:n_total x\n# TYPE foretell:n_total counter\nforetell:n_total %d\n"
    cast = Cast(a=says("a", text % 3), b=says("b", text % 4))
    front = Gateway(cast, 3, 9)
    page = ask(front, "/metrics", "GET")
    assert (value(page, "foretell:n_total"), value(page, "foretell:replicas")) == (7, 2)
    assert value(ask(front, "/metrics/replicas", "GET"), 'foretell:n_total{replica="b"}') == 4
    assert {call.path for _, call in cast.asked} == {"/metrics"}
    del cast.plays["a"]
    assert value(ask(front, "/metrics", "GET"), "foretell:n_total") == 7


def test_health_is_that_of_the_best_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = says("a", b'{"status": "unavailable", "reason": "a step has taken 200 seconds"}', 503)
    found = ask(Gateway(Cast(a=sick, b=says("b")), 3, 9), "/health", "GET")
    assert found.status_code == 200 and found.json()["replicas"]["a"]["status"] == "unavailable"
    found = ask(Gateway(Cast(a=sick), 3, 9), "/health", "GET")
    assert (found.status_code, found.json()["reason"]) == (503, "a step has taken 200 seconds")
    monkeypatch.setattr(asking, "CALL_ALL_TIMEOUT", 0.01)
    found = ask(Gateway(Cast(), 3, 9), "/health", "GET")
    assert (found.status_code, found.json()["reason"]) == (503, "no replica runs")


def test_info_has_the_states_of_all() -> None:
    def info(running: int) -> bytes:
        return json.dumps({"version": "1", "internal_states": [{"running": running}]}).encode()

    found = ask(Gateway(Cast(a=says("a", info(1)), b=says("b", info(2))), 3, 9), "/server_info", "GET").json()
    assert found["replicas"] == ["a", "b"] and found["version"] == "1"
    assert found["internal_states"] == [{"replica": "a", "running": 1}, {"replica": "b", "running": 2}]
    failed = ask(Gateway(Cast(a=says("a", b'{"error": 1}', 500)), 3, 9), "/server_info", "GET")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "unavailable")


def test_a_draining_gateway_takes_no_new_requests() -> None:
    front = Gateway(Cast(a=says("a")), 3, 9)
    front.draining = True
    assert ask(front).status_code == ask(front, "/ready", "GET").status_code == 503
    assert ask(front, "/health", "GET").status_code == 200
    assert front.ongoing == 0


def test_a_disconnected_client_cancels_the_response() -> None:
    closed = asyncio.Event()

    async def endless(call: ReplicaCall) -> AsyncGenerator[ResponseHead | bytes, None]:
        try:
            yield ResponseHead("a", 200, EVENTS, b"data: 1\n\n", True)
            await asyncio.Event().wait()
        finally:
            closed.set()

    class Caller:
        """A client that disconnects after the first bytes."""

        def __init__(self) -> None:
            self.heard, self.first = asyncio.Event(), True

        async def receive(self) -> Any:
            if self.first:
                self.first = False
                return {"type": "http.request", "body": b"{}", "more_body": False}
            await self.heard.wait()
            return {"type": "http.disconnect"}

        async def send(self, message: Any) -> None:
            if message.get("body"):
                self.heard.set()

    async def go() -> None:
        caller = Caller()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": None}
        await asyncio.wait_for(Gateway(Cast(a=endless), 3, 9)(scope, caller.receive, caller.send), TIMEOUT)
        await asyncio.wait_for(closed.wait(), TIMEOUT)

    asyncio.run(go())
    assert closed.is_set()


def test_an_application_is_called_where_it_lives() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 203, "headers": [(b"a", scope["query_string"])]})
        for part in (body, b"", b"2", b"3"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"3"})

    async def go() -> list[ResponseHead | bytes]:
        return [part async for part in call_app(app, ReplicaCall("POST", "/x", b"q", (), b"1"), "r")]

    head, *rest = asyncio.run(go())
    assert head == ResponseHead("r", 203, ((b"a", b"q"),), b"1", True)
    assert rest == [b"23"], "what was said meanwhile comes as one"


def test_an_application_is_cancelled_when_its_caller_closes() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        try:
            await receive()
        finally:
            ended.set()

    async def go() -> None:
        parts = call_app(app, ReplicaCall("GET", "/"), "r")
        assert isinstance(await anext(parts), ResponseHead)
        await parts.aclose()
        assert ended.is_set()

    asyncio.run(go())
    assert ended.is_set()


def test_an_application_failure_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("wrong")

    async def go() -> None:
        with pytest.raises(ValueError, match="wrong"):
            await anext(call_app(app, ReplicaCall("GET", "/"), "r"))

    asyncio.run(go())
