"""What a device waits for the host between two steps, and whether that is worth a step that can guess nothing."""

from __future__ import annotations

from collections import Counter

PACE = 0.1  # how fast it is learnt, once some were seen
LONGEST = 3.0  # times what is usual: what is longer was a hiccup
HOPE = 0.25  # how fast it is learnt what guesses are worth in steps of late


class Waits:
    """Seconds by how many texts are written, in doublings, for the host looks at each of them; and what guesses have
    been worth of late, which a step that begins before its tokens are known does without."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._seen: Counter[int] = Counter()
        self._hope = 0.0

    def observe(self, texts: int, seconds: float) -> None:
        """A device waited so long before a step of so many texts."""
        size = texts.bit_length()
        usual = self._usual.setdefault(size, seconds)
        self._seen[size] += 1
        self._usual[size] += max(PACE, 1 / self._seen[size]) * (min(seconds, LONGEST * usual) - usual)

    def hope(self, seconds: float) -> None:
        """A step was decided in which guesses should save so much."""
        self._hope += HOPE * (seconds - self._hope)

    def outweigh_guesses(self, texts: int) -> bool:
        """Whether a step should begin early: it saves what the device would wait."""
        return self._hope < self.seconds(texts)

    def seconds(self, texts: int) -> float:
        """What is usual, or what is known of the nearest number of texts; 0 where nobody ever waited."""
        size, known = texts.bit_length(), self._usual
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]
