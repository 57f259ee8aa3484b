"""What the target has run of a text and a head has not read yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foretell.runner.native_reading import Reading, addresses_of
from foretell.types import Outcome, Sequence

Rows = tuple[Tensor, int, int]  # of a step's states, from one row to another


@dataclass
class Trail:
    """States of a text that the head has not read yet: of the places from `start` on."""

    start: int
    states: list[Rows] = field(default_factory=list)
    stop: int = 0
    gap: bool = False  # whether positions before are missing: a step failed
    pages: list[int] = field(default_factory=list)  # the sequence's own list, a new one each time it is admitted

    def take(self, seq: Sequence, whole: bool) -> Reading:
        """What is still to be read of the text; it counts as read from now on. `whole`: states need not be cut out."""
        states = [] if whole else [rows[begin:end] for rows, begin, end in self.states]
        found = WholeReading(seq, self.start, self.stop, states, self.states)
        self.start, self.states = self.stop, []
        return found


class Trails(dict[int, Trail]):
    """The trails of all sequences by id, and the pages with positions that the head could not read."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.unread: set[int] = set()  # pages

    def continued(self, seq: Sequence, start: int) -> Trail:
        """Return the trail of a sequence whose next step begins at `start`.

        A sequence that is new here, or was preempted and admitted again, has its first positions from the prefix
        cache: the head has read these for another sequence, unless that failed.
        """
        trail = self.get(seq.id)
        if trail is None or (trail.pages is not seq.pages and start != trail.stop) or start < trail.stop:
            trail = self[seq.id] = Trail(start, stop=start)
            trail.gap = bool(self.unread) and not self.unread.isdisjoint(seq.pages[: self._pages_for(start)])
        trail.pages = seq.pages
        return trail

    def rewrite(self, seq: Sequence, start: int) -> None:
        """Note that a step has written the pages after position `start` from their first position on."""
        if self.unread:
            self.unread.difference_update(seq.pages[self._pages_for(start) : self._pages_for(seq.cached)])

    def miss(self, outcomes: list[Outcome]) -> None:
        """Note that positions of these sequences were not read: drafts without them would be noise."""
        for outcome in outcomes:
            seq = outcome.share.seq
            self.unread.update(seq.pages[outcome.share.start // self.page_size : self._pages_for(seq.cached)])
            self[seq.id] = Trail(seq.cached, stop=seq.cached, gap=True, pages=seq.pages)
            if seq.finish is not None:
                del self[seq.id]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class WholeReading(Reading):
    """The same, told by rows of steps: to cut those out takes torch as long as the library takes to read them."""

    runs: list[Rows]

    def rows(self) -> list[int]:
        found: list[int] = []
        for states, begin, end in self.runs:
            found += addresses_of(states, begin, end)
        return found


def of_the_text(outcome: Outcome, first: int, places: int) -> list[Rows]:
    """The states of a step's rows that are the text's now, what was pending and the accepted path, from place `first`
    of them on: in pieces, for an index would have to be brought to where they are."""
    assert outcome.features is not None, "the target taps what a head wants"
    take, path = outcome.share.take, () if outcome.verdict is None else outcome.verdict.path
    stop = min(places, take)
    start = min(first, stop)
    runs: list[tuple[int, int]] = []
    for node in path[max(0, first - take) : max(0, places - take)]:
        if take + node != stop:
            runs.append((start, stop))
            start = take + node
        stop = take + node + 1
    return [(outcome.features, begin, end) for begin, end in (*runs, (start, stop)) if begin < end]
