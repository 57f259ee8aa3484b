"""A stub server with scripted responses, for what a real one does rarely."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMPLETION = {
    "choices": [{"text": " jumps", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    "speculation": {"seeds": [7]},
}
COMPLETED = (200, json.dumps(COMPLETION))
TOO_MANY_REQUESTS = (429, json.dumps({"error": {"message": "too many requests are waiting"}}))
CLOSES = (0, "")  # closes the connection without a response


@dataclass
class Stub:
    """The scripted responses, of which the last repeats, and the API keys received."""

    responses: list[tuple[int, str]]
    url: str = ""
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def stub(*responses: tuple[int, str]) -> Iterator[Stub]:
    found = Stub(list(responses))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.keys.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = found.responses.pop(0) if len(found.responses) > 1 else found.responses[0]
            if (status, body) == CLOSES:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
