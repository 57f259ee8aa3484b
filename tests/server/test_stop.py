"""Signals: the first drains, the second stops at once."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import httpx

from tests.server.process import CONTEXT, ServerProcess
from tests.waiting import TIMEOUT, wait_for

LONG = {"prompt": "The quick brown fox", "max_tokens": CONTEXT // 2, "ignore_eos": True, "stream": True}
PLAIN = {"speculative": False}  # a token a step, of which each can be slowed


def open_stream(server: ServerProcess, into: list[str], begun: threading.Event) -> threading.Thread:
    def read() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
            client.stream("POST", "/v1/completions", json=LONG | PLAIN) as reply,
        ):
            try:
                for line in reply.iter_lines():
                    into.append(line)
                    begun.set()
            except httpx.RemoteProtocolError:
                into.append("cut off")

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(TIMEOUT)
    return thread


def test_the_first_signal_drains(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with ServerProcess(folder, slowed=tmp_path / "slowed") as server:
        with server.slowly():
            reading = open_stream(server, lines, threading.Event())
            server.process.send_signal(signal.SIGTERM)
            refused = refusal(server)
        reading.join(TIMEOUT)
        assert server.process.wait(TIMEOUT) == 0
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert lines[-2:] == ["data: [DONE]", ""], "the text was finished"
    last = json.loads(lines[-4].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"


def refusal(server: ServerProcess) -> httpx.Response:
    """Return the response to a new request while the server drains."""
    wait_for(lambda: server.http.get("/ready").status_code == 503)
    assert server.http.get("/health").status_code == 200
    return server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})


def test_the_second_signal_does_not_wait(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with ServerProcess(folder, slowed=tmp_path / "slowed") as server, server.slowly():
        reading = open_stream(server, lines, threading.Event())
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "draining" in server.log.read_text())
        assert server.stop(signal.SIGTERM) == 1
        reading.join(TIMEOUT)
    assert "data: [DONE]" not in lines
