"""Counting of an engine's forwards, with all requests queued before the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foretell import program as fp
from tests.waiting import TIMEOUT, wait_for


@dataclass
class Count:
    """The number of forwards, set when the context ends."""

    made: int = 0


@contextmanager
def forwards(engine: fp.Engine) -> Iterator[Count]:
    """Count the forwards made inside the context."""
    stats, count = engine.llm.engine.stats, Count()
    before = stats.forwards
    yield count
    count.made = stats.forwards - before


@contextmanager
def all_at_once(engine: fp.Engine, requests: int) -> Iterator[None]:
    """Hold the engine's thread until this many requests are queued, so that nothing depends on timing."""
    inner, held, gate = engine._engine, threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(TIMEOUT)

    def open_gate() -> None:
        try:  # a submitted request may not be in the inbox yet
            wait_for(lambda: inner._inbox.qsize() >= requests)
        finally:
            gate.set()

    inner._inbox.put(hold)
    assert held.wait(TIMEOUT)
    watcher = threading.Thread(target=open_gate)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()
