"""What is recorded by sizes, and what serves where it is not: a larger recording does the same work, filled up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

OFTEN = 64  # times that sizes were wished for and others served, before they are worth a recording
SHARE = 0.01  # of the time, at most, that recordings of one kind take while texts are written

FREELY = ContextVar("FREELY", default=False)  # of a thread


class Fillable(Hashable, Protocol):
    """Sizes that work can be filled up to."""

    def covers(self, other: Any) -> bool:
        """Whether the work of the others can be done in these, and not at many times its price."""

    @property
    def price(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run, the dearest first."""


Sizes = TypeVar("Sizes", bound=Fillable)
Kept = TypeVar("Kept")


@contextmanager
def freely() -> Iterator[None]:
    """In here all sizes that come are recorded at once: nobody waits."""
    before = FREELY.set(True)
    try:
        yield
    finally:
        FREELY.reset(before)


class Watch:
    """Hears of what happens in it: whether something took longer than it will take again, as it was recorded, or ran
    plainly and will be."""

    odd = False

    def __enter__(self) -> Watch:
        self._before = WATCH.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        WATCH.reset(self._before)


WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)


def note_odd() -> None:
    """Tell whoever watches."""
    if (watch := WATCH.get()) is not None:
        watch.odd = True


class Stock(Generic[Sizes, Kept]):
    """Recordings of one kind. Which of them does a piece of work hangs on what was asked for before, never on what is
    guessed or drawn, and changes nothing but the time it takes."""

    def __init__(self, shares: bool = True, clock: Callable[[], float] = perf_counter) -> None:
        """`shares`: whether one may serve for another. Where not, several processes record the same work at the same
        time, and whether anybody waits is known to one of them alone."""
        self.kept: dict[Sizes, Kept | None] = {}  # None: it ran once
        self.wishes: Counter[Sizes] = Counter()
        self._shares, self._clock = shares, clock
        self._serving: dict[Sizes, Sizes] = {}
        self._rests_until = 0.0

    def serving(self, wanted: Sizes) -> Sizes:
        """The sizes to be run: the wanted ones, or the cheapest that are recorded and cover them. So a text waits for a
        recording where nothing serves, and else no more often than it is worth."""
        if not self._shares or self.kept.get(wanted) is not None or FREELY.get():
            return wanted
        found = self._serving.get(wanted)
        if found is None or self.kept.get(found) is None:
            able = [sizes for sizes, kept in self.kept.items() if kept is not None and sizes.covers(wanted)]
            if not able:
                return wanted
            found = self._serving[wanted] = min(able, key=lambda sizes: sizes.price)
        self.wishes[wanted] += 1
        return wanted if self.wishes[wanted] >= OFTEN and self._clock() >= self._rests_until else found

    def is_due(self, sizes: Sizes) -> bool:
        """Whether what is run plainly now is to be recorded: nobody waits, it comes again, or it was wished for."""
        return (self._shares and FREELY.get()) or sizes in self.kept or self.wishes[sizes] >= OFTEN

    def keep(self, sizes: Sizes, kept: Kept | None, began: float) -> None:
        """What came of a plain run, and of a recording if it was due."""
        self.kept[sizes] = kept
        if kept is not None:
            self._serving.clear()
        if self.wishes.pop(sizes, 0) or kept is not None:
            now = self._clock()
            self._rests_until = now + (now - began) / SHARE
