"""What the target has run of a text and a head has not read yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foretell.types import Outcome

Rows = tuple[Tensor, int, int]  # of a step's states, from one row to another


@dataclass
class Trail:
    """States of a text that the head has not read yet: of the places from `start` on."""

    start: int
    states: list[Rows] = field(default_factory=list)
    stop: int = 0
    gap: bool = False  # whether places before are missing for good: a step failed


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
