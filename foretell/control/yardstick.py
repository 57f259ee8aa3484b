"""Plain steps now and then while guesses pay: what they are weighed against must not be a memory."""

from __future__ import annotations

SOONEST, LATEST = 4, 128  # steps with guesses between two without


class Yardstick:
    """Counts steps since one was plain. A step is seldom spared where much is known of what steps cost."""

    def __init__(self) -> None:
        self._since = 0

    def wanted(self, lessons: int) -> bool:
        """Whether this step should be a plain one, after so many steps that taught what steps cost."""
        return self._since >= min(max(lessons, SOONEST), LATEST)

    def note(self, drafted: bool) -> None:
        """A step was decided."""
        self._since = self._since + 1 if drafted else 0
