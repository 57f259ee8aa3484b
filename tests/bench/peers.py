"""A scripted server for tests of its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer, ThreadingTCPServer
from threading import Thread
from typing import Any


class Script:
    """What a server answers; `asked` are the bodies it got."""

    def __init__(self, kind: str, **last: Any) -> None:
        self.kind, self.last = kind, last
        self.words = ["one ", "two ", "three ", "four"]
        self.usage: dict[str, int] | None = {"completion_tokens": 8}
        self.metrics = ""
        self.counted = 0  # accepted draft tokens in its metrics
        self.status = 200
        self.params: list[dict[str, Any]] = []

    def page(self, path: str) -> tuple[int, str]:
        if path == "/v1/models" and self.status != 200:
            return self.status, json.dumps({"error": {"message": "no", "code": self.status}})
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "folder/m.gguf", "owned_by": self.kind}]})
        if path == "/metrics" and self.metrics:
            return 200, self.metrics.format(accepted=self.counted)
        return 404, '{"error": "there is no such page"}'

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        self.params.append(body)
        self.counted += 4
        for word in self.words:
            yield json.dumps({"choices": [{"text": word} if "prompt" in body else {"delta": {"content": word}}]})
        yield json.dumps({"choices": [], **({"usage": self.usage} if self.usage else {}), **self.last})
        yield "[DONE]"


@contextmanager
def speaking(words: bytes) -> Iterator[str]:
    """Yield the address of a server that sends the same bytes for every request."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has disconnected
                self.request.sendall(words)
                self.request.recv(1 << 16)

    with _running(ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a server that keeps to a script."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*script.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(200, "".join(f"data: {event}\n\n" for event in script.stream(body)))

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with _running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(server: TCPServer) -> Iterator[int]:
    """A server's port, while it serves."""
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
