"""What a device waits for the host between two steps, and whether that is worth a step that can guess nothing."""

from __future__ import annotations

from collections import deque
from statistics import median_low

SEEN = 9  # waits of late, whose middle one is what is usual
KNOWN = 3  # of them after which it is known: one that was odd is not the middle one
SOON, SELDOM = 16, 256  # steps that begin early until one does not, so that a wait is seen: at first, and later
HOPE = 0.25  # how fast it is learnt what guesses are worth in steps of late


class HostGap:
    """Seconds by how many texts are written, in doublings, for the host looks at each of them; and what guesses have
    been worth of late, which a step that begins before its tokens are known does without."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], deque[float]] = {}
        self._usual: dict[bool, dict[int, float]] = {False: {}, True: {}}
        self._hope, self._early = 0.0, 0

    def observe(self, texts: int, seconds: float, guessing: bool = False) -> None:
        """A device waited so long before a step of so many texts, or, `guessing`, before guesses that it makes itself:
        their check is sent meanwhile, so it waits for less."""
        size = texts.bit_length()
        seen = self._seen.setdefault((size, guessing), deque(maxlen=SEEN))
        seen.append(seconds)
        self._usual[guessing][size] = median_low(seen)

    def hope(self, seconds: float) -> None:
        """A step was decided in which guesses should save so much."""
        self._hope += HOPE * (seconds - self._hope)

    def outweigh_guesses(self, texts: int) -> bool:
        """Whether a step should begin early: it saves what the device would wait. Asked once a step; what is never seen
        again would be believed for ever, so now and then one does not."""
        if self._hope >= self.seconds(texts):
            return False
        self._early += 1
        known = len(self._seen.get((texts.bit_length(), False), ())) >= KNOWN
        if self._early < (SELDOM if known else SOON):
            return True
        self._early = 0
        return False

    def seconds(self, texts: int) -> float:
        """What is usual, or what is known of the nearest number of texts, or of other steps; 0 where nobody waited."""
        size, known = texts.bit_length(), self._usual[False] or self._usual[True]
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]

    def hidden(self, texts: int) -> float:
        """What of that guesses do not wait for that a device makes itself; 0 until both were seen with as many."""
        size = texts.bit_length()
        plain, guessed = self._usual[False].get(size), self._usual[True].get(size)
        return 0.0 if plain is None or guessed is None else plain - guessed
