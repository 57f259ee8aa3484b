"""When a drafter that is not used is tried again."""

from __future__ import annotations


class DrafterExploration:
    """Rarely, and the more rarely the more often it was in vain; never for more than a small share of the time."""

    NODES = 2
    SHARE = 0.01  # of the time
    EVERY, SELDOM = 32, 1024  # steps between two, at the least and in the end

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # the step in which a drafter was last used
        self._wait: dict[str, int] = {}

    def is_rested(self, arm: str, used: bool, step: int) -> bool:
        """Whether it was not used for long enough to be tried in this step, if it costs little."""
        if used or arm not in self._last:
            self._last[arm] = step
        return step - self._last[arm] >= max(self.EVERY, self._wait.get(arm, 0))

    def is_due(self, arm: str, step: int, seconds: float, plain: float) -> bool:
        """Whether a rested one may be tried in this step, which takes `plain` without it; a trial costs `seconds`."""
        return step - self._last[arm] >= self._waits(arm, seconds, plain)

    def begin(self, arm: str, step: int, seconds: float, plain: float) -> None:
        """It is tried in this step."""
        self._wait[arm] = min(2 * self._waits(arm, seconds, plain), self.SELDOM)
        self._last[arm] = step

    def _waits(self, arm: str, seconds: float, plain: float) -> int:
        return max(self.EVERY, int(seconds / (self.SHARE * plain)), self._wait.get(arm, 0))

    def succeeded(self, arm: str) -> None:
        """A guess of it stood: the waiting starts anew."""
        self._wait.pop(arm, None)


# Steps with guesses between two without: at first, where costs are known, in the end.
SOONEST, KNOWN, LATEST = 8, 64, 256
LESSONS = 32  # steps after which it is known what steps cost


class BaselineSteps:
    """Counts steps since one was plain; each that was plain for this reason doubles the wait for the next."""

    def __init__(self) -> None:
        self._since, self._wait = 0, SOONEST

    def wanted(self, lessons: int, gain: float) -> bool:
        """Whether this step should be a plain one, after so many that taught what steps cost; `gain` is what it would
        be faster with guesses, and the more that is, the less likely a plain step changes anything."""
        wait = max(self._wait, KNOWN) if lessons >= LESSONS else self._wait
        if self._since < wait * gain:
            return False
        self._wait = min(2 * wait, LATEST)
        return True

    def note(self, drafted: bool) -> None:
        """A step was decided."""
        self._since = self._since + 1 if drafted else 0
