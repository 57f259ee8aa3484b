"""Ctrl-C that ends the output and keeps what there is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FORCED = 3  # presses of Ctrl-C after which the program ends at once


@contextmanager
def catch_interrupts(on_press: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Collect SIGINTs in a list instead of raising: an exception in the middle of a step can get lost.

    A step of a large model takes long, so the third one raises all the same.
    """
    pressed: list[int] = []

    def handle(number: int, frame: object) -> None:
        pressed.append(number)
        on_press()
        if len(pressed) >= FORCED:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
