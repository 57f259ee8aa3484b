"""How many forwards an engine made, with all texts in its inbox before the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foretell import program as fp
from tests.waiting import TIMEOUT, wait_for


@dataclass
class Count:
    """What was counted, once that is over."""

    made: int = 0


@contextmanager
def forwards(engine: fp.Engine) -> Iterator[Count]:
    """Those made in between."""
    stats, count = engine.llm.engine.stats, Count()
    before = stats.forwards
    yield count
    count.made = stats.forwards - before


@contextmanager
def all_at_once(engine: fp.Engine, texts: int) -> Iterator[None]:
    """Holds the engine's thread until so many texts were asked for: then nothing depends on who is quicker."""
    inner, held, gate = engine._engine, threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(TIMEOUT)

    def open_gate() -> None:
        try:  # a text that is counted may not lie in the inbox yet
            wait_for(lambda: inner._inbox.qsize() >= texts)
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
