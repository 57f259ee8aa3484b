"""What was decided and why, to be shown."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

LOG = logging.getLogger("foretell")

PACE = 0.06  # how fast the share of late steps that drafted is followed
OFF, ON = 0.05, 0.2  # drafting is off below the one and on again above the other: apart, so that it does not flap

DRAFTED, SKIPPED = "drafted", "skipped"
PAYS, TRIAL, FIXED, HURRY = "pays", "trial", "fixed", "hurry"  # why a drafter was let guess
NO_GUESS, LOW_ACCEPT, OUTDONE, NOT_ASKED, UNKNOWN = "no_guess", "low_accept", "outdone", "not_asked", "no_costs"
COMPARED = "compared"  # it would have paid, but a plain step was wanted to compare with

Decision = tuple[str, str, str]  # a drafter, whether it was let guess, and why


class Decisions:
    """Counts steps of texts by what was decided for each drafter, and says in the log when drafting goes off or on."""

    def __init__(self) -> None:
        self.on = True
        self.reason = ""
        self.switches = 0
        self._share = 1.0
        self._counts: Counter[Decision] = Counter()
        self._asleep: Counter[tuple[str, ...]] = Counter()  # by the drafters of a text that was not looked at

    @property
    def counts(self) -> dict[Decision, int]:
        """Steps of texts by (drafter, "drafted" or "skipped", reason); a copy, to be read from any thread."""
        found = Counter(dict(self._counts))
        for arms, count in dict(self._asleep).items():
            found.update(dict.fromkeys(((arm, SKIPPED, NOT_ASKED) for arm in arms), count))
        return dict(found)

    def note(self, arm: str, decision: str, reason: str) -> None:
        """A drafter was let guess for a text in this step, or was not."""
        self._counts[arm, decision, reason] += 1

    def note_all(self, arms: tuple[str, ...], guessed: Collection[str], taken: str, why: str) -> str:
        """Of a text's drafters `taken` guesses, because of `why`, or none does; returns why none does."""
        beaten = COMPARED if why == COMPARED else LOW_ACCEPT
        lost = OUTDONE if taken else beaten
        for arm in arms:
            if arm == taken:
                self.note(arm, DRAFTED, why)
            else:
                self.note(arm, SKIPPED, lost if arm in guessed else NO_GUESS)
        return "" if taken else beaten if guessed else NO_GUESS

    def left_alone(self, texts: list[tuple[str, ...]]) -> None:
        """Texts, by their drafters, that nobody looked at in this step."""
        for arms in texts:
            self._asleep[arms] += 1

    def step(self, drafted: bool, reason: Callable[[], str]) -> None:
        """A step was decided; `reason` tells why in words, if that is to be said."""
        self._share += PACE * (drafted - self._share)
        on = self._share > (OFF if self.on else ON)
        if on != self.on:
            self.on, self.reason = on, reason()
            self.switches += 1
            LOG.info("drafting is %s: %s", "on" if on else "off", self.reason)


def in_words(rates: dict[str, tuple[float, float]], batch: int, samples: bool) -> str:
    """For each drafter how often a guess stands and how often it must, and what would help where none pays."""
    said = [
        f"{arm} acceptance {have:.2f} {'>=' if have >= need else '<'} break-even {need:.2f}"
        for arm, (have, need) in rates.items()
    ]
    told = f"{', '.join(said)} at batch {batch}"
    if any(have >= need for have, need in rates.values()):
        return told
    helps = ["a closer draft", *(["fewer texts at once"] if batch > 1 else []), *(["a lower temperature"] * samples)]
    return f"{told}; what would help: {', '.join(helps)}"
