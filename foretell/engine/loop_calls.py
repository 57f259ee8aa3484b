"""What a thread has to tell an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_WAITING = 32  # calls that have time, after which the loop is woken all the same


class LoopCalls:
    """Calls for the loop to make, in their order. It is woken once for all that wait, and not at all for those that
    have time: they go with the next one that has none."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._woken = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before anything is put in."""
        self._loop = loop

    def put(self, call: Callable[[], None], hurry: bool = True) -> None:
        """From the thread; RuntimeError where the loop has closed."""
        self._waiting.append(call)
        if hurry or len(self._waiting) >= MOST_WAITING:
            self._wake()

    def deliver(self) -> None:
        """On the loop: make the calls that wait."""
        self._woken = False  # before they are looked at: what comes meanwhile is seen now or wakes again
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # a call failed; the others are made all the same
                self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)
