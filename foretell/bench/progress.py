"""How far a long run is, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

QUIET = 10.0  # seconds between two lines where each stays to be read
WIDTH = 24  # of the bar, in characters
PARTS = ("", *"▏▎▍▌▋▊▉")


class Progress:
    """A bar that is written over on a terminal; elsewhere now and then a new line."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.stream, self.clock = stream or sys.stderr, clock
        self.began = clock()
        self.said: float | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        now, last = self.clock(), done == total
        line = f"[{done}/{total}] {what}{self._left(now - self.began, done, total)}"
        if self.stream.isatty():
            print(f"\r\x1b[K{bar(done, total)} {line}", end="\n" if last else "", file=self.stream, flush=True)
        elif last or self.said is None or now - self.said >= QUIET:
            self.said = now
            print(line, file=self.stream, flush=True)

    @staticmethod
    def _left(seconds: float, done: int, total: int) -> str:
        if not done or done == total:
            return ""
        left = seconds / done * (total - done)
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


def bar(done: int, total: int) -> str:
    """How much of the whole is done, in eighths of a character."""
    eighths = round(8 * WIDTH * done / total) if total else 8 * WIDTH
    whole, rest = divmod(eighths, 8)
    return str(("█" * whole + PARTS[rest]).ljust(WIDTH, "░"))
