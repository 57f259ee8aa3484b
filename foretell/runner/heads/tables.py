"""Texts a head guesses for as a table of whole numbers of fixed size, brought to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COLUMNS = (512, 1024, 2048, 4096)  # places of text that sizes are made for; behind, powers of two
MOST_PLACES = 1 << 17  # of all texts of a pass together; a single text that has more is not recorded
FEW = 8  # texts whose levels have as many branches as there may be: that many rows cost what one costs
WIDTHS = (1, 2, 5)  # branches that are followed in a level of more texts; more are filled up likewise
DEEPER = 2  # times as deep as a draft has to be is what it may be filled up to: each level is a step of the head

TOKEN, PLACE, BEFORE, WIDE, HEAT, FIELDS = range(6)
Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftRow:
    """A text to be guessed for: its last token and that one's place, the slot of the place before, and its pages."""

    token: int
    place: int
    before: int
    pages: list[int]
    wide: int = 1  # branches to be followed in a level
    heat: float = 0.0  # what logits are divided by before a guess is drawn; 0: nothing is drawn
    keys: Whole = field(default_factory=lambda: np.zeros(0, np.int64))  # of the noise, by depth; none: nothing is drawn


@dataclass(frozen=True)
class DraftShape:
    """Drafts of the same sizes are one graph."""

    texts: int  # filled up
    columns: int  # places of a text that may be seen, filled up
    depth: int
    wide: int = 0  # branches that are followed in a level, filled up; 0: a chain
    drawn: bool = False  # whether noise decides

    @property
    def is_small(self) -> bool:
        """Whether what it works with may be held on to."""
        return self.texts * self.columns <= MOST_PLACES

    def covers(self, other: DraftShape) -> bool:
        """Whether a draft of the others can be filled up to these: of a deeper one the beginning is the same."""
        alike = (self.wide > 0, self.drawn) == (other.wide > 0, other.drawn)
        room = self.texts >= other.texts and self.columns >= other.columns and self.wide >= other.wide
        return alike and room and other.depth <= self.depth <= DEEPER * other.depth

    @property
    def price(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run."""
        return self.depth, self.texts, self.columns, self.wide


def sizes_of(texts: list[DraftRow], depth: int, most_wide: int = 0) -> DraftShape:
    """What these texts are filled up to; `most_wide`: for trees, the most branches that can be followed."""
    drawn = any(text.heat > 0 for text in texts)
    wide = min(most_wide, max(text.wide for text in texts))
    if wide:
        widths = WIDTHS if len(texts) > FEW else ()
        wide = min(most_wide, next((width for width in widths if wide <= width), most_wide))
    return DraftShape(power(len(texts)), columns_for(max(text.place for text in texts)), depth, wide, drawn)


def columns_for(places: int) -> int:
    """What so many places of a text are filled up to."""
    return next((size for size in COLUMNS if places <= size), power(places))


def passes(texts: list[DraftRow]) -> list[slice]:
    """The texts in their order, cut so that what a pass works with has its bounds; one too long for them is alone."""
    starts, longest = [0], 0
    for at, text in enumerate(texts):
        longest = max(longest, text.place)
        if at > starts[-1] and power(at + 1 - starts[-1]) * columns_for(longest) > MOST_PLACES:
            starts.append(at)
            longest = text.place
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(texts)], strict=True)]


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class DraftTable:
    """A row for each text: fields, a key of noise for each depth, and its pages. Rows that fill up see nothing."""

    def __init__(self, sizes: DraftShape, guesses: int, page_size: int, device: torch.device) -> None:
        """`guesses`: rows of a draft that are remembered for those behind them."""
        self.sizes, self.guesses, self.device = sizes, guesses, device
        self.shown = -(-sizes.columns // page_size)  # pages of text; behind them stand places for the guesses
        self.columns = self.shown * page_size
        width = FIELDS + sizes.depth + self.shown + -(-guesses // page_size)
        self._rows = torch.zeros(sizes.texts, width, dtype=torch.int64, device=device)
        self._host = torch.zeros(sizes.texts, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Whole = self._host.numpy()
        self._known: list[list[int]] = [[]] * sizes.texts

    def send(self, texts: list[DraftRow]) -> None:
        """Of these texts; the host has seen the end of what was done with the last ones."""
        numbers, behind = self._numbers, FIELDS + self.sizes.depth
        fields = [(text.token, text.place, text.before, text.wide) for text in texts]
        numbers[: len(texts), :HEAT] = fields
        numbers[: len(texts), HEAT] = np.array([text.heat for text in texts]).view(np.int64)
        numbers[len(texts) :, :FIELDS] = 0
        for row, text in enumerate(texts):
            if len(text.keys):
                numbers[row, FIELDS : FIELDS + len(text.keys)] = text.keys  # deeper than it guesses any will do
            pages = text.pages[: self.shown]
            if pages != self._known[row]:
                numbers[row, behind : behind + len(pages)] = pages
                self._known[row] = pages
        self._rows.copy_(self._host, non_blocking=True)

    def field(self, which: int) -> Tensor:
        """[texts]."""
        return self._rows[:, which]

    @property
    def heats(self) -> Tensor:
        """[texts, 1], in float32."""
        return self._rows[:, HEAT : HEAT + 1].view(torch.float64).float()

    @property
    def keys(self) -> Tensor:
        """[texts, depth]."""
        return self._rows[:, FIELDS : FIELDS + self.sizes.depth]

    @property
    def pages(self) -> Tensor:
        """[texts, pages]."""
        return self._rows[:, FIELDS + self.sizes.depth :]
