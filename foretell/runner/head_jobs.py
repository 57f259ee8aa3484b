"""What a head is asked to do, in whole numbers: what the first of several ranks tells the others, and does itself."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate

Numbers = list[int]


@dataclass(frozen=True)
class Job:
    """Fields are numbers and lists of numbers, and nothing else."""


@dataclass(frozen=True)
class ReadPlaces(Job):
    """Remember places of some texts, whose features are kept already."""

    starts: Numbers
    stops: Numbers
    tokens: Numbers  # of all these places but the first of a text; or of each place those that a head looks back at
    pages: Numbers  # of all texts, one after the other
    counts: Numbers  # how many each has


@dataclass(frozen=True)
class StepRows(Job):
    """One step of a head that guesses a token after another; as many rows for each text."""

    tokens: Numbers
    places: Numbers
    before: Numbers  # where the feature before each row is: in a first step a slot, then a row wanted of the last step
    wanted: Numbers  # rows that count; the others fill up
    text: Numbers  # of each text the places that all its rows see
    seen: Numbers  # [texts, rows, guesses]: which of the guesses behind its text each row sees
    reach: Numbers  # how far behind its text each row of a text stands
    top: int  # how many of the likeliest tokens are looked at; 0: all
    columns: int = 0  # places of a text, guesses included; what follows is told in a first step only
    pages: Numbers = field(default_factory=list)
    counts: Numbers = field(default_factory=list)


@dataclass(frozen=True)
class PassBlocks(Job):
    """Run a block behind each text, to `depth` guesses; what comes of it is asked for level by level."""

    anchors: Numbers
    text: Numbers  # places before each anchor
    depth: int
    pages: Numbers
    counts: Numbers


@dataclass(frozen=True)
class LevelRows(Job):
    """Of the last pass the guesses at one depth, each of one of its texts and behind one token."""

    depth: int
    owners: Numbers
    before: Numbers
    top: int
    judges: int  # whether the head is to say how sure it is


@dataclass(frozen=True)
class SeeAhead(Job):
    """Guess as many places at once from the states kept in some slots."""

    slots: Numbers
    depth: int
    top: int


JOBS: tuple[type[Job], ...] = (ReadPlaces, StepRows, PassBlocks, LevelRows, SeeAhead)


def flat(texts: Several[Several[int]]) -> tuple[Numbers, Numbers]:
    """Pages of all texts one after the other, and how many each has."""
    return [page for pages in texts for page in pages], [len(pages) for pages in texts]


def by_text(pages: Numbers, counts: Numbers) -> list[Numbers]:
    """What `flat` was given."""
    return [pages[stop - count : stop] for count, stop in zip(counts, accumulate(counts), strict=True)]
