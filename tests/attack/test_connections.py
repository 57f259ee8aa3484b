"""Hostile connections: idle, slow and half-sent ones are closed, and no request is smuggled inside another."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn

from foretell.build.engine_builder import build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.app import create_app
from foretell.server.config import ServerConfig
from foretell.server.http_protocol import timeout_protocol
from foretell.server.service import Service
from tests.server.process import write_server_folder
from tests.waiting import TIMEOUT, wait_for

Address = tuple[str, int]
HOST = b"Host: localhost"

MANY = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server in this process that gives up on a request after half a second."""
    folder = write_server_folder(tmp_path_factory.mktemp("models") / "server")
    engine, speculation = EngineConfig(model=str(folder)), SpeculationConfig(drafter="none")
    config = ServerConfig(body_timeout=0.5, keep_alive=1, allowed_host=("named.example",))
    service = Service(build_engine(engine, speculation), config, engine, speculation)
    protocol = timeout_protocol(config.body_timeout, config.request_timeout)
    settings = uvicorn.Config(create_app(service), http=protocol, log_config=None, timeout_keep_alive=config.keep_alive)
    server = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as port:
        running = threading.Thread(target=server.run, kwargs={"sockets": [port]})
        running.start()
        wait_for(lambda: server.started)
        yield port.getsockname()
        server.should_exit = True
        running.join(TIMEOUT)
        assert not running.is_alive()


def is_healthy(server: Address) -> bool:
    return ask(server, b"GET /health HTTP/1.1", HOST, b"Connection: close").startswith(b"HTTP/1.1 200 ")


def connect(server: Address) -> socket.socket:
    return socket.create_connection(server, TIMEOUT)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server has closed the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


def ask(server: Address, *lines: bytes, body: bytes = b"") -> bytes:
    """Send the lines of a request's head and a body; return all that comes until the server closes."""
    with connect(server) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        return read_all(connection)


BEGINNINGS = {
    "nothing": b"",
    "half a request line": b"GET /hea",
    "half a header": b"GET /health HTTP/1.1\r\nHost: local",
    "no body": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
    "half a body": b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"',
    "half a chunk": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
    "an answered request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_many_idle_and_half_sent_connections_are_closed(server: Address) -> None:
    with ExitStack() as stack:
        opened = []
        for name in list(BEGINNINGS) * (MANY // len(BEGINNINGS)):
            connection = stack.enter_context(connect(server))
            connection.sendall(BEGINNINGS[name])
            opened.append((name, connection))
        assert is_healthy(server)
        for name, connection in opened:
            found = read_all(connection)
            expected = b" 200 " if "answered" in name else b" 408 " if "bod" in name or "chunk" in name else b""
            assert expected in found and bool(found) == bool(expected), (name, found)
        assert is_healthy(server)


@pytest.mark.parametrize("beginning", ["half a header", "half a body"])
def test_a_client_that_sends_byte_by_byte_is_cut_off(server: Address, beginning: str) -> None:
    with connect(server) as connection:
        connection.sendall(BEGINNINGS[beginning])
        until = time.monotonic() + TIMEOUT
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < until:
                connection.sendall(b" ")
                time.sleep(0.01)
    assert is_healthy(server)


CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
FRAMINGS = {
    "length and chunked": (b"Content-Length: 4", CHUNKED),
    "chunked and length": (CHUNKED, b"Content-Length: 4"),
    "length 0 and chunked": (b"Content-Length: 0", CHUNKED),
    "two lengths": (b"Content-Length: 0", b"Content-Length: 44"),
    "two lengths in one": (b"Content-Length: 0, 44",),
    "a signed length": (b"Content-Length: +0",),
    "a negative length": (b"Content-Length: -1",),
    "a space before the colon": (b"Transfer-Encoding : chunked",),
    "chunked twice": (CHUNKED, CHUNKED),
    "another encoding": (b"Transfer-Encoding: xchunked",),
    "a folded encoding": (b"Transfer-Encoding:", b" identity"),
}


@pytest.mark.parametrize("path", ["/tokenize", "/health", "/nowhere"])
@pytest.mark.parametrize("framing", FRAMINGS)
def test_no_request_is_smuggled(server: Address, framing: str, path: str) -> None:
    """One answer, a refusal, and then the connection is closed."""
    head = (b"POST %b HTTP/1.1" % path.encode(), HOST, *FRAMINGS[framing])
    found = ask(server, *head, body=b"0\r\n\r\n" + SMUGGLED)
    assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1 ") == 1, found
    assert b"connection: close" in found.lower() and b"version" not in found


def test_a_body_that_is_not_read_is_not_taken_for_a_request(server: Address) -> None:
    for path in (b"/nowhere", b"/health"):
        head = (b"POST %b HTTP/1.1" % path, HOST, b"Content-Length: %d" % len(SMUGGLED), b"Connection: close")
        found = ask(server, *head, body=SMUGGLED)
        assert found.count(b"HTTP/1.1 ") == 1 and b" 40" in found[:15], found
        found = ask(server, b"GET %b HTTP/1.1" % path, HOST, b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED)
        assert found.count(b"HTTP/1.1 ") == 1 and found.startswith(b"HTTP/1.1 400 "), found


HOSTS = (
    b"[::1]evil.com", b"[::1]:80evil.com", b"[::1", b"::1]", b"localhost:80@evil.com", b"localhost:evil.com",
    b"localhost@evil.com", b"127.0.0.1.evil.com", b"evil.com:80", b"[::1].localhost", b"named.example.evil.com",
)  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_foreign_host_is_refused(server: Address, host: bytes) -> None:
    found = ask(server, b"GET /health HTTP/1.1", b"Host: " + host, b"Connection: close")
    assert found.startswith(b"HTTP/1.1 403 "), found


@pytest.mark.parametrize(
    "host", [b"localhost", b"localhost:", b"[::1]:8000", b"[::1]", b"127.0.0.1:1", b"NAMED.example"]
)
def test_an_own_host_is_let_in(server: Address, host: bytes) -> None:
    found = ask(server, b"GET /health HTTP/1.1", b"Host: " + host, b"Connection: close")
    assert found.startswith(b"HTTP/1.1 200 "), found


def test_two_hosts_are_refused(server: Address) -> None:
    found = ask(server, b"GET /health HTTP/1.1", HOST, b"Host: evil.com")
    assert found.startswith(b"HTTP/1.1 400 "), found
