"""Progress of a long run on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

LINE_SECONDS = 10.0  # seconds between two lines without a terminal
WIDTH = 24  # characters of the bar
EIGHTHS = ("", *"▏▎▍▌▋▊▉")


class ProgressBar:
    """A progress bar that is overwritten on a terminal; elsewhere a new line every `LINE_SECONDS`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.stream, self.clock = stream or sys.stderr, clock
        self.began = clock()
        self.last_line: float | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        now, last = self.clock(), done == total
        line = f"[{done}/{total}] {what}{self._left(now - self.began, done, total)}"
        if self.stream.isatty():
            # The cursor waits at the start of the line, where the report of a stopped run begins.
            print(f"\x1b[K{bar(done, total)} {line}", end="\n" if last else "\r", file=self.stream, flush=True)
        elif last or self.last_line is None or now - self.last_line >= LINE_SECONDS:
            self.last_line = now
            print(line, file=self.stream, flush=True)

    @staticmethod
    def _left(seconds: float, done: int, total: int) -> str:
        if not done or done == total:
            return ""
        left = seconds / done * (total - done)
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


def bar(done: int, total: int) -> str:
    """Draw the finished part in eighths of a character."""
    eighths = round(8 * WIDTH * done / total) if total else 8 * WIDTH
    full, rest = divmod(eighths, 8)
    return str(("█" * full + EIGHTHS[rest]).ljust(WIDTH, "░"))
