"""Interrupts of long commands: what is finished is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[..., Any]
FORCED = 3  # presses of Ctrl-C after which an output ends in the middle of a step


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

    with _handled((signal.SIGINT,), handle):
        yield pressed


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, which `timeout` sends, as Ctrl-C, so that results so far are reported."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM,), stop):
        yield


@contextmanager
def deferred_interrupt(log: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM came; a second one interrupts at once."""
    came = threading.Event()

    def note(*_: Any) -> None:
        if came.is_set():
            raise KeyboardInterrupt
        came.set()
        log("stopping after this step; Ctrl-C again stops at once and keeps only the last checkpoint")

    with _handled((signal.SIGINT, signal.SIGTERM), note):
        yield came.is_set


@contextmanager
def _handled(signals: tuple[signal.Signals, ...], handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = {each: signal.signal(each, handler) for each in signals}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
