"""Signals: the first lets texts finish and takes nothing new, the second does not wait."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import httpx

from tests.server.process import CONTEXT, ServerProcess

LONG = {"prompt": "The quick brown fox", "max_tokens": CONTEXT // 2, "ignore_eos": True, "stream": True}


def open_stream(server: ServerProcess, into: list[str], begun: threading.Event) -> threading.Thread:
    def read() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=LONG) as reply,
        ):
            try:
                for line in reply.iter_lines():
                    into.append(line)
                    begun.set()
            except httpx.RemoteProtocolError:
                into.append("cut off")

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


def test_the_first_signal_drains(folder: Path) -> None:
    lines: list[str] = []
    with ServerProcess(folder) as server:
        reading = open_stream(server, lines, threading.Event())
        server.process.send_signal(signal.SIGTERM)
        refused = wait_for_refusal(server)
        reading.join(60)
        assert server.process.wait(30) == 0
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert lines[-2:] == ["data: [DONE]", ""], "the text was finished"
    last = json.loads(lines[-4].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"


def wait_for_refusal(server: ServerProcess) -> httpx.Response:
    """What a new request is told while the server drains."""
    for _ in range(1000):
        if server.http.get("/ready").status_code == 503:
            assert server.http.get("/health").status_code == 200
            return server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        time.sleep(0.002)
    raise AssertionError("it goes on as if nothing had been said")


def test_the_second_signal_does_not_wait(folder: Path) -> None:
    lines: list[str] = []
    with ServerProcess(folder) as server:
        reading = open_stream(server, lines, threading.Event())
        server.process.send_signal(signal.SIGINT)
        while "finished first" not in server.log.read_text():
            time.sleep(0.01)
        assert server.stop(signal.SIGTERM) == 1
        reading.join(30)
    assert "data: [DONE]" not in lines
