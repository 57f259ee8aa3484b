"""Middleware, HTTP protocol and background tasks: hosts, counters, connections that are not read."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from foretell.build.engine_builder import Assembly
from foretell.server.background_tasks import repeat
from foretell.server.http_protocol import timeout_protocol
from foretell.server.middleware import BODY_PATHS, is_loopback
from foretell.server.openai.requests import GenerationRequest
from foretell.server.request_log import RequestLog
from foretell.server.run import Server
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.waiting import wait_for

HOSTS = {
    "localhost": True, "localhost:8000": True, "LOCALHOST": True, "127.0.0.1:8000": True, "127.9.9.9": True,
    "[::1]:8000": True, "box.localhost": True, "named.example:80": True, "evil.example": False,
    "[::1]": True, "localhost:": True, "[::1]evil.example": False, "localhost:80@evil.example": False, "[::1": False,
    "127.0.0.1.evil.example": False, "localhost.evil.example": False, "10.0.0.7": False, "": False,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_other_host_names_are_rejected(assembly: Assembly, host: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/v1/models", "/"):
            reply = await client.get(path, headers={"Host": host})
            assert (reply.status_code == 200) == HOSTS[host], reply.text
            assert HOSTS[host] or "--allowed-host" in reply.json()["error"]["message"]

    run_app(assembly, play, allowed_host=("Named.example",))


@pytest.mark.parametrize("settings", [{"api_key": ("k",)}, {"host": "0.0.0.0"}])
def test_a_server_that_others_may_reach_has_any_name(assembly: Assembly, settings: dict[str, Any]) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.get("/health", headers={"Host": "any.example"})).status_code == 200

    run_app(assembly, play, **settings)


def test_addresses_of_this_machine() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("192.168.1.1") and not is_loopback("example.com")


def test_rejected_requests_are_counted(assembly: Assembly) -> None:
    async def slowly() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        key = {"Authorization": "Bearer k", "content-type": "application/json"}
        replies = [
            await client.get("/v1/models"),
            await client.post("/v1/completions", content=b" " * 2000, headers=key),
            await client.post("/v1/completions", content=slowly(), headers=key),
        ]
        assert [reply.status_code for reply in replies] == [401, 413, 408]
        text = (await client.get("/metrics")).text
        for code in ("invalid_api_key", "body_too_large", "body_timeout"):
            assert f'foretell:request_failures_total{{code="{code}",model_name="tiny"}} 1.0' in text, text

    run_app(assembly, play, api_key=("k",), max_body_bytes=1000, body_timeout=0.05)


@pytest.mark.parametrize("sent", ["utf-8", "latin-1"])
def test_a_key_beyond_ascii_matches_in_either_encoding(assembly: Assembly, sent: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for key, status in (("clé-ü", 200), ("clé-u", 401)):
            reply = await client.get("/v1/models", headers={b"Authorization": b"Bearer " + key.encode(sent)})
            assert reply.status_code == status

    run_app(assembly, play, api_key=("clé-ü",))


def test_every_endpoint_with_a_body_is_known_to_the_guard(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        bodies = {(method, path) for path, each in paths.items() for method in each if "requestBody" in each[method]}
        assert bodies == {("post", path) for path in BODY_PATHS}

    run_app(assembly, play)


def test_bodies_held_at_once_are_bounded(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    step = assembly.engine.step
    monkeypatch.setattr(assembly.engine, "step", lambda: release.wait(60) and step())

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": 1, "user": "x" * 600}  # alone it may exceed the total when parsed
        first = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not service.engine.num_sequences:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        release.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200, "the room is free again"

    run_app(assembly, play, max_body_bytes=1000, max_held_bytes=1000)


def test_the_ways_to_the_engine_are_bounded_too(assembly: Assembly) -> None:
    """Requests in preprocessing count against the queue limit."""
    release = threading.Event()

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        most = service.engine.max_sequences
        waiting = [asyncio.ensure_future(service.run_in_worker(release.wait, 60)) for _ in range(most)]
        await asyncio.sleep(0)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            reply = await client.post(path, json=body)
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1, reply.text
        release.set()
        await asyncio.gather(*waiting)
        assert service.num_preprocessing == 0
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200

    run_app(assembly, play, max_queue=1)


def test_preprocessing_has_a_timeout(assembly: Assembly) -> None:
    release = threading.Event()

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        service.config.__dict__["request_timeout"] = 60.0
        busy = [asyncio.ensure_future(service.run_in_worker(release.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        service.config.__dict__["request_timeout"] = 0.05
        for path in ("/v1/completions", "/tokenize"):
            assert (await client.post(path, json={"prompt": "a"})).status_code == 504
        release.set()
        await asyncio.gather(*busy)

    run_app(assembly, play)


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that writes more than any buffer holds."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100_000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


async def dawdling(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that never ends and writes little."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass


@contextmanager
def unread(
    app: Any, kind: Callable[[uvicorn.Config], uvicorn.Server], idle: float = 60, longest: float = 60
) -> Iterator[uvicorn.Server]:
    """Run a server with a client that sends a request and does not read."""
    settings = uvicorn.Config(app, http=timeout_protocol(idle, longest), log_config=None, lifespan="off")
    server = kind(settings)
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket() as lazy:
        running = threading.Thread(target=server.run, kwargs={"sockets": [port]})
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(port.getsockname())
        lazy.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        running.start()  # what was asked lies there: however slow this thread is, it is not given up for its silence
        assert lazy.recv(1) == b"H", "the answer has begun"
        try:
            yield server
        finally:
            server.should_exit = True
            running.join(60)
            assert not running.is_alive()


@pytest.mark.parametrize(("app", "longest"), [(endless, 60), (dawdling, 0.3)])
def test_a_connection_whose_response_is_not_read_is_aborted(app: Any, longest: float) -> None:
    with unread(app, uvicorn.Server, 0.1, longest) as server:
        wait_for(lambda: not server.server_state.connections)


class Wire:
    """A transport whose client reads on demand, and a loop whose clock is set by hand."""

    def __init__(self, longest: float = 60) -> None:
        self.now, self.unsent, self.closing, self.aborted = 0.0, 0, False, False
        self.timers: list[Callable[[], None]] = []
        loop: Any = SimpleNamespace(time=lambda: self.now, call_later=self._later)
        settings: Any = {"config": uvicorn.Config(endless, log_config=None), "server_state": ServerState()}
        self.protocol = timeout_protocol(10, longest)(app_state={}, _loop=loop, **settings)
        self.protocol.connection_made(self)

    def _later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: None)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def poll(self, unsent: int) -> bool:
        """Let ten seconds pass with the client having read down to `unsent`; return whether the connection lives."""
        self.now, self.unsent = self.now + 10, unsent
        self.timers.pop()()
        return not self.aborted


@pytest.mark.parametrize("complete", [False, True], ids=["streaming", "complete"])
@pytest.mark.parametrize("closing", [False, True], ids=["open", "closing"])
def test_a_slow_reader_is_not_cut_off(complete: bool, closing: bool) -> None:
    """The connection lives while the client reads anything; a new pause starts from a new buffer size."""
    wire = Wire(longest=1000)
    wire.protocol.cycle = SimpleNamespace(response_complete=complete)
    wire.closing = closing
    wire.protocol.pause_writing()
    assert all(wire.poll(unsent) for unsent in (1_000_000, 900_000, 899_999, 500_000, 499_999))
    wire.protocol.resume_writing()
    wire.protocol.pause_writing()
    assert wire.poll(700_000) and wire.poll(600_000)
    assert not wire.poll(600_000), "nothing was read for a whole interval"


def test_a_client_that_reads_byte_by_byte_has_a_deadline() -> None:
    wire = Wire(longest=45)
    wire.protocol.cycle = SimpleNamespace(response_complete=True)
    assert [wire.poll(1000 - i) for i in range(6)] == [True] * 5 + [False]


def test_an_idle_connection_is_closed_once_its_answer_is_sent() -> None:
    wire = Wire()
    wire.protocol.cycle = SimpleNamespace(response_complete=True)
    assert wire.poll(5000) and wire.poll(4000) and not wire.closing
    assert wire.poll(0) and wire.closing


def test_a_client_that_does_not_read_cannot_block_shutdown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain(timeout: float) -> bool:
        return True

    engine = SimpleNamespace(drain=drain, num_sequences=0)
    service: Any = SimpleNamespace(engine=engine, config=SimpleNamespace(drain_timeout=0.5))
    monkeypatch.setattr("foretell.server.run.Server._announce", lambda *parts: None)
    with unread(endless, lambda settings: Server(settings, service)) as server:
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: not server.started or server.should_exit)
    assert isinstance(server, Server) and server.has_cut_off
    assert "1 responses were not read in time" in caplog.text


def test_a_request_that_cannot_be_logged_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full")
    for _ in range(3):
        log.write("a", "tiny", GenerationRequest(), [])
    log.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once, however many are lost"
    assert "--log-requests" in caplog.text and "space" in caplog.text


def test_writing_again_reports_how_many_requests_were_lost(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "requests.jsonl"))
    log.write("a", "\ud800", GenerationRequest(), [])
    log.write("b", "tiny", GenerationRequest(), [])
    log.close()
    assert "writing again; 1 requests were not written" in caplog.text
    assert (tmp_path / "requests.jsonl").read_text().count("\n") == 1


def test_background_tasks_continue_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    async def do() -> None:
        calls.append(1)
        if len(calls) != 4:
            raise ValueError("planted")

    async def scene() -> None:
        task = asyncio.ensure_future(repeat("the work", 0.001, do))
        while len(calls) < 6 and not task.done():
            await asyncio.sleep(0.001)
        assert not task.done()
        task.cancel()

    with caplog.at_level(logging.ERROR, "foretell"):
        asyncio.run(scene())
    assert caplog.text.count("the work failed") == 2, "again only after it had worked"
