"""What was decided and why, to be shown."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

LOG = logging.getLogger("foretell")

PACE = 0.06  # how fast the share of late steps that drafted is followed
OFF, ON = 0.05, 0.2  # drafting is off below the one and on again above the other: apart, so that it does not flap

NO_GUESS, LOW_ACCEPT, NOT_ASKED, UNKNOWN = "no_guess", "low_accept", "not_asked", "no_costs"


class Decisions:
    """Counts steps of texts by what was decided, and says in the log when drafting goes off or on."""

    def __init__(self) -> None:
        self.drafted = 0
        self.skipped: Counter[str] = Counter()
        self.on = True
        self.reason = ""
        self.switches = 0
        self._share = 1.0

    def note(self, drafted: int, skipped: Counter[str], reason: Callable[[], str]) -> None:
        """A step was decided; `reason` tells why in words, if that is to be said."""
        self.drafted += drafted
        self.skipped.update(skipped)
        self._share += PACE * ((drafted > 0) - self._share)
        on = self._share > (OFF if self.on else ON)
        if on != self.on:
            self.on, self.reason = on, reason()
            self.switches += 1
            LOG.info("drafting is %s: %s", "on" if on else "off", self.reason)


def advice(batch: int, samples: bool) -> str:
    """What would help where guesses do not pay."""
    found = ["a closer draft"]
    if batch > 1:
        found.append("fewer texts at once")
    if samples:
        found.append("a lower temperature")
    return "what would help: " + ", ".join(found)
