"""How far drafts go and how far they stand, place by place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest


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
