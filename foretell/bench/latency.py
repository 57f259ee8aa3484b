"""How long readers wait: quantiles of many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

CURVE = 41  # quantiles, evenly from the least to the most: enough to draw


@dataclass(frozen=True)
class Latency:
    """Of so many times in seconds the median, what nine in ten and 99 in 100 do not exceed, and the curve of all."""

    count: int
    p50: float
    p90: float
    p99: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency | None:
        ranked = sorted(seconds)
        if not ranked:
            return None
        middle, most, nearly_all = (quantile(ranked, share) for share in (0.5, 0.9, 0.99))
        curve = tuple(quantile(ranked, place / (CURVE - 1)) for place in range(CURVE))
        return cls(len(ranked), middle, most, nearly_all, curve)


def quantile(ranked: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed, of values in order."""
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def token_times(pace: Iterable[tuple[float, int]]) -> list[float]:
    """Seconds of each token: a step that brings several shares its time among them, so steps and tokens cannot be
    taken for each other."""
    return [seconds / count for seconds, count in pace for _ in range(count)]


@dataclass(frozen=True)
class AcceptanceByDepth:
    """By place behind a text's end: the drafts that reached it, and of them those that stood up to it."""

    reached: tuple[int, ...] = ()
    stood: tuple[int, ...] = ()

    @classmethod
    def counted(cls, drafts: Mapping[tuple[int, int], int]) -> AcceptanceByDepth:
        """Of drafts by how far they went and how far they stood."""
        return cls.total(cls((count,) * went, (count,) * stood) for (went, stood), count in drafts.items())

    @classmethod
    def total(cls, several: Iterable[AcceptanceByDepth]) -> AcceptanceByDepth:
        reached: tuple[int, ...] = ()
        stood: tuple[int, ...] = ()
        for each in several:
            reached, stood = _added(reached, each.reached), _added(stood, each.stood)
        return cls(reached, stood)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the drafts that reached a place, the share that stood up to it."""
        return tuple(stood / reached for reached, stood in zip_longest(self.reached, self.stood, fillvalue=0))


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
