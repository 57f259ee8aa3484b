"""Clients in a closed loop while replicas are killed and updated, with the outcome of each request."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

REPLICA = b"ray::ServeReplica:%s:replica"  # how Ray names the process
RANK = b"foretell.tensor_parallel.worker"


@dataclass
class Load:
    """Concurrent closed-loop clients; every other request is a stream."""

    url: str
    callers: int = 4
    tokens: int = 40
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what was neither answered nor cut midway
    times: list[tuple[float, float]] = field(default_factory=list)  # when asked, and seconds until answered
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._call, args=(i,), daemon=True) for i in range(self.callers)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _call(self, caller: int) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            number = 0
            while not self._over.is_set():
                began = time.monotonic()
                outcome = self._ask(http, caller, number)
                self.times.append((began, time.monotonic() - began))
                self.outcomes[outcome] += 1
                number += 1

    def _ask(self, http: httpx.Client, caller: int, number: int) -> str:
        prompt = f"Caller {caller} asks for the {number}th time about the quick brown fox that jumps over the lazy dog."
        body = {"prompt": prompt, "max_tokens": self.tokens, "seed": number, "stream": number % 2 == 1}
        try:
            return self._stream(http, body) if body["stream"] else self._whole(http, body)
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return "failed"

    def _whole(self, http: httpx.Client, body: dict[str, Any]) -> str:
        reply = http.post("/v1/completions", json=body)
        if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"]:
            return "whole"
        self.wrong.append(f"{reply.status_code} {reply.text}")
        return "failed"

    def _stream(self, http: httpx.Client, body: dict[str, Any]) -> str:
        heard = 0
        try:
            with http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    self.wrong.append(f"{reply.status_code} {reply.read().decode()}")
                    return "failed"
                lines = []
                for line in reply.iter_lines():
                    heard += bool(line)
                    lines.append(line)
        except httpx.HTTPError:
            if heard:
                return "broken"
            raise
        events = [line.removeprefix("data: ") for line in lines if line]
        if events[-1:] != ["[DONE]"]:
            self.wrong.append(f"a stream without an end: {events[-1:]}")
            return "failed"
        return "cut" if "error" in json.loads(events[-2]) else "streamed"


def replica_pids(under: int, name: str = "foretell") -> list[int]:
    """Return the processes of an application's replicas below the process `under`."""
    return [pid for pid, words in command_lines(under) if words.startswith(REPLICA % name.encode())]


def rank_pids(under: int) -> list[int]:
    """Return the worker processes of a replica's tensor-parallel group."""
    return [pid for pid, words in command_lines(under) if RANK in words]


def command_lines(under: int) -> Iterator[tuple[int, bytes]]:
    """Return the matching processes below a process."""
    for pid in sorted(family(under)):
        with suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes()


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def wait_for(what: Any, seconds: float = 60.0) -> float:
    """Wait until `what()` holds; return the seconds it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it did not come about in time"
        time.sleep(0.1)
    return time.monotonic() - began


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
