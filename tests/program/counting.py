"""How many forwards an engine made, with all texts in its inbox before the first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foretell import program as fp

PATIENCE = 30  # seconds


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
    inner, gate = engine._engine, threading.Event()
    inner._inbox.put(lambda: gate.wait(PATIENCE) and None)

    def open_gate() -> None:
        until = time.monotonic() + PATIENCE
        while inner.texts < texts and time.monotonic() < until:
            time.sleep(0.001)
        gate.set()

    watcher = threading.Thread(target=open_gate)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()
