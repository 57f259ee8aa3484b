"""What was decided and why, to be shown."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

LOG = logging.getLogger("foretell")

PACE = 0.06  # how fast the share of late steps that drafted is followed
OFF, ON = 0.05, 0.2  # drafting is off below the one and on again above the other: apart, so that it does not flap

DRAFTED, SKIPPED = "drafted", "skipped"
PAYS, TRIAL, FIXED, HURRY = "pays", "trial", "fixed", "hurry"  # why a drafter was let guess
NO_GUESS, LOW_ACCEPT, OUTDONE, NOT_ASKED, UNKNOWN = "no_guess", "low_accept", "outdone", "not_asked", "no_costs"
COMPARED = "compared"  # it would have paid, but a plain step was wanted to compare with
LATE = "late"  # it would have paid, but the step was under way before its text was looked at

Decision = tuple[str, str, str]  # a drafter, whether it was let guess, and why


class DecisionLog:
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
        beaten = why if why in (COMPARED, LATE) else LOW_ACCEPT
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
            self.on = on
            self.reason = reason()
            self.switches += 1
            LOG.info("drafting is %s: %s", "on" if on else "off", self.reason)

    def seldom_guesses(self, arms: Collection[str]) -> bool:
        """Whether these drafters mostly had no guess when they were asked."""
        asked, without = 0, 0
        for (arm, _, reason), count in self._counts.items():
            if arm in arms and reason != UNKNOWN:
                asked += count
                without += count * (reason == NO_GUESS)
        return 2 * without > asked


@dataclass(frozen=True)
class Situation:
    """What else is to be said of a switch: how many write, whether any of them samples, what drafts must have."""

    batch: int
    samples: bool = False
    on: bool = True
    seldom: bool = False  # whether there is mostly no guess
    shortest: int = 0  # the fewest nodes a draft may have


def in_words(rates: dict[str, tuple[float, float]], now: Situation) -> str:
    """For each drafter how often a guess stands and how often it must, and what would help where none pays."""
    said = [
        f"{arm} acceptance {have:.2f} {'>=' if have >= need else '<'} break-even {need:.2f}"
        for arm, (have, need) in rates.items()
    ]
    told = f"{', '.join(said)} at batch {now.batch}"
    if now.on:
        return told
    if any(have >= need for have, need in rates.values()):
        cause = "there is seldom a guess" if now.seldom else "looking for guesses takes more than they save"
        return f"{told}, but {cause}; what would help: a drafter that guesses more"
    helps = {
        "a closer draft": True,
        "shorter drafts": now.shortest > 1,
        "fewer texts at once": now.batch > 1,
        "a lower temperature": now.samples,
    }
    return f"{told}; what would help: {', '.join(words for words, holds in helps.items() if holds)}"


Seconds = Callable[[int, int], float]  # of a step, or a draft, by texts and nodes each

RATES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Prices:
    """Seconds of a step with so many texts and nodes each, and of drafting those nodes."""

    step: Seconds
    draft: Seconds

    def speedup(self, texts: int, nodes: int, rate: float) -> float:
        """How much faster than plain, where each guess stands as often as `rate` if those before it did."""
        expected = sum(rate**depth for depth in range(nodes + 1))
        return expected * self.step(texts, 0) / (self.step(texts, nodes) + self.draft(texts, nodes))

    def break_even(self, texts: int, nodes: int) -> float | None:
        """How often a guess must stand for a draft of `nodes` to cost nothing; None where it never does."""
        if self.speedup(texts, nodes, 1.0) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(texts, nodes, middle) >= 1 else (middle, high)
        return high

    def best(self, texts: int, rate: float, most: int, margin: float) -> tuple[int, float]:
        """The length that is fastest, and how much; 0 where none wins clearly."""
        nodes = max(range(most + 1), key=lambda count: self.speedup(texts, count, rate))
        gain = self.speedup(texts, nodes, rate)
        return (nodes, gain) if gain > 1 + margin else (0, 1.0)
