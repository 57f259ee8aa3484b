"""What a device waits for the host between two steps, where a plain step could have been sent ahead."""

from __future__ import annotations

PACE = 0.1  # how fast it is learnt
LONGEST = 3.0  # times what is usual: what is longer was a hiccup


class Waits:
    """Seconds by how many texts are written, in doublings: the host looks at each of them."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}

    def observe(self, texts: int, seconds: float) -> None:
        """A device waited so long before a step of so many texts."""
        size = texts.bit_length()
        usual = self._usual.get(size)
        if usual is None:
            self._usual[size] = seconds
        else:
            self._usual[size] += PACE * (min(seconds, LONGEST * usual) - usual)

    def seconds(self, texts: int) -> float:
        """What is usual, or what is known of the nearest number of texts; 0 where nobody ever waited."""
        size, known = texts.bit_length(), self._usual
        if size in known or not known:
            return known.get(size, 0.0)
        return known[min(known, key=lambda other: abs(other - size))]
