"""Plain steps now and then while guesses pay: what they are weighed against must not be a memory."""

from __future__ import annotations

# Steps with guesses between two without: at first, where costs are known, in the end.
SOONEST, KNOWN, LATEST = 8, 64, 256
LESSONS = 32  # steps after which it is known what steps cost


class Yardstick:
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
