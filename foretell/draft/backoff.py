"""Exponential back-off for drafters that fail: a pause after failures in a row, then another attempt."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

LOG = logging.getLogger("foretell")

TOLERATED = 2  # failures in a row of one method before the first pause
FIRST_PAUSE = 1.0  # seconds; each further failure in a row doubles it
LONGEST_PAUSE = 300.0  # seconds
LOG_INTERVAL = 60.0  # seconds between two tracebacks of one drafter
BOOKKEEPING = ("update_kv", "observe", "forget")  # keep a drafter up to date while its drafts pause

Answer = TypeVar("Answer")


class Backoff:
    """Failures in a row, and the time of the next attempt."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        tolerated: int = TOLERATED,
        first: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ) -> None:
        self._clock, self._tolerated, self._first, self._longest = clock, tolerated, first, longest
        self._retry_at = 0.0
        self.failures = 0  # in a row

    def fail(self) -> float:
        """Count a failure and return the seconds until the next attempt."""
        self.failures += 1
        doublings = self.failures - self._tolerated - 1
        if doublings < 0:
            return 0.0
        pause = min(self._longest, self._first * 2.0 ** min(doublings, 64))
        self._retry_at = self._clock() + pause
        return pause

    def succeed(self) -> None:
        self.failures = 0

    @property
    def waiting(self) -> bool:
        return self.failures > self._tolerated and self._clock() < self._retry_at


class Supervisor:
    """Calls the methods of drafters. A failure costs the result of one call; failures in a row pause the drafter.

    Each method has a back-off of its own, which a success of this method resets. While one of them waits, the drafter
    is disabled: the engine asks it for no drafts. Its bookkeeping goes on, except for a method that waits itself.
    `follow` and `forget` never wait, because a drafter that misses one of them is no longer up to date.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failing: dict[tuple[str, str], Backoff] = {}  # by drafter and method: failures without a success since
        self._logged: dict[str, float] = {}  # by drafter: time of the last traceback
        self.failures: Counter[str] = Counter()  # by drafter, since the start

    @property
    def disabled(self) -> frozenset[str]:
        """The drafters that pause now."""
        if not self._failing:
            return frozenset()
        failing = list(self._failing.items())  # metrics ask in another thread
        return frozenset(name for (name, _), backoff in failing if backoff.waiting)

    def call(self, name: str, method: str, do: Callable[[], Answer], otherwise: Answer, always: bool = False) -> Answer:
        """Return the result of `do`, or `otherwise` where it fails or the drafter pauses; `always`: never pause."""
        if self._failing and not always and self._pauses(name, method):
            return otherwise
        try:
            result = do()
        except BaseException as error:
            if comes_from_signal(error):
                raise
            self.fail(name, method, error)
            return otherwise
        if self._failing:
            self.succeed(name, method)
        return result

    def _pauses(self, name: str, method: str) -> bool:
        if method not in BOOKKEEPING:
            return name in self.disabled
        backoff = self._failing.get((name, method))
        return backoff is not None and backoff.waiting

    def fail(self, name: str, method: str, error: BaseException) -> None:
        """Count a failure; a traceback is logged once in LOG_INTERVAL, a pause always."""
        self.failures[name] += 1
        backoff = self._failing.setdefault((name, method), Backoff(self._clock))
        pause = 0.0 if backoff.waiting else backoff.fail()  # a pause is not prolonged, whatever fails during it
        words = f"{type(error).__name__}: {error}"
        if pause:
            count = backoff.failures
            LOG.warning(
                "drafter %s is disabled for %.0f s: %s failed %d times in a row: %s", name, pause, method, count, words
            )
        now = self._clock()
        if name not in self._logged or now - self._logged[name] >= LOG_INTERVAL:
            self._logged[name] = now
            LOG.error("drafter %s failed in %s; the step runs without its drafts", name, method, exc_info=error)

    def succeed(self, name: str, method: str) -> None:
        """Reset the back-off of one method."""
        backoff = self._failing.pop((name, method), None)
        if backoff is not None and backoff.failures > TOLERATED and name not in self.disabled:
            LOG.warning("drafter %s is enabled again: %s succeeded", name, method)


def comes_from_signal(error: BaseException) -> bool:
    """Return whether an exception ends the program rather than a drafter's call.

    Python runs signal handlers in the main thread, between any two instructions. So Ctrl-C during a drafter's call is
    a KeyboardInterrupt there, and what a handler of the program raises has passed the handler's frame.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or _passed_handler(error)


def _passed_handler(error: BaseException) -> bool:
    """Return whether a frame of an installed signal handler is in the traceback."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
