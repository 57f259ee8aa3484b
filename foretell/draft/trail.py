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
    gap: bool = False  # whether places before are missing for good: a step failed

    def take(self, seq: Sequence, whole: bool) -> Reading:
        """What is still to be read of the text; it counts as read from now on. `whole`: states need not be cut out."""
        states = [] if whole else [rows[begin:end] for rows, begin, end in self.states]
        found = WholeReading(seq, self.start, self.stop, states, self.states)
        self.start, self.states = self.stop, []
        return found


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
