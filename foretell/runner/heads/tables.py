"""Texts a head guesses for as a table of whole numbers of fixed size, brought to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CAPTURE_CONTEXTS = (512, 1024, 2048, 4096)  # places of text that sizes are made for; behind, powers of two
MAX_POSITIONS = 1 << 17  # of all texts of a pass together; a single text that has more is not recorded
SMALL_BATCH = 8  # texts whose levels have as many branches as there may be: that many rows cost what one costs
CAPTURE_WIDTHS = (1, 2, 5)  # branches that are followed in a level of more texts; more are filled up likewise
MAX_DEPTH_PADDING = (
    2  # times as deep as a draft has to be is what it may be filled up to: each level is a step of the head
)

TOKEN, POSITION, PREVIOUS_SLOT, WIDTH, TEMPERATURE, FIELDS = range(6)
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftRow:
    """A text to be guessed for: its last token and that one's place, the slot of the place before, and its pages."""

    token: int
    position: int
    previous_slot: int
    pages: list[int]
    width: int = 1  # branches to be followed in a level
    temperature: float = 0.0  # what logits are divided by before a guess is drawn; 0: nothing is drawn
    noise_keys: Int64Array = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # of the noise, by depth; none: nothing is drawn


@dataclass(frozen=True)
class DraftShape:
    """Drafts of the same sizes are one graph."""

    sequences: int  # filled up
    columns: int  # places of a text that may be seen, filled up
    depth: int
    width: int = 0  # branches that are followed in a level, filled up; 0: a chain
    sampled: bool = False  # whether noise decides

    @property
    def is_small(self) -> bool:
        """Whether what it works with may be held on to."""
        return self.sequences * self.columns <= MAX_POSITIONS

    def covers(self, other: DraftShape) -> bool:
        """Whether a draft of the others can be filled up to these: of a deeper one the beginning is the same."""
        alike = (self.width > 0, self.sampled) == (other.width > 0, other.sampled)
        room = self.sequences >= other.sequences and self.columns >= other.columns and self.width >= other.width
        return alike and room and other.depth <= self.depth <= MAX_DEPTH_PADDING * other.depth

    @property
    def cost(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run."""
        return self.depth, self.sequences, self.columns, self.width


def draft_shape(texts: list[DraftRow], depth: int, most_wide: int = 0) -> DraftShape:
    """What these texts are filled up to; `most_wide`: for trees, the most branches that can be followed."""
    drawn = any(text.temperature > 0 for text in texts)
    wide = min(most_wide, max(text.width for text in texts))
    if wide:
        widths = CAPTURE_WIDTHS if len(texts) > SMALL_BATCH else ()
        wide = min(most_wide, next((width for width in widths if wide <= width), most_wide))
    return DraftShape(
        next_power_of_2(len(texts)), padded_context(max(text.position for text in texts)), depth, wide, drawn
    )


def padded_context(places: int) -> int:
    """What so many places of a text are filled up to."""
    return next((size for size in CAPTURE_CONTEXTS if places <= size), next_power_of_2(places))


def split_batch(texts: list[DraftRow]) -> list[slice]:
    """The texts in their order, cut so that what a pass works with has its bounds; one too long for them is alone."""
    starts, longest = [0], 0
    for at, text in enumerate(texts):
        longest = max(longest, text.position)
        if at > starts[-1] and next_power_of_2(at + 1 - starts[-1]) * padded_context(longest) > MAX_POSITIONS:
            starts.append(at)
            longest = text.position
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(texts)], strict=True)]


def next_power_of_2(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class DraftTable:
    """A row for each text: fields, a key of noise for each depth, and its pages. Rows that fill up see nothing."""

    def __init__(self, sizes: DraftShape, guesses: int, page_size: int, device: torch.device) -> None:
        """`guesses`: rows of a draft that are remembered for those behind them."""
        self.shape, self.draft_rows, self.device = sizes, guesses, device
        self.context_pages = -(-sizes.columns // page_size)  # pages of text; behind them stand places for the guesses
        self.columns = self.context_pages * page_size
        width = FIELDS + sizes.depth + self.context_pages + -(-guesses // page_size)
        self._rows = torch.zeros(sizes.sequences, width, dtype=torch.int64, device=device)
        self._host = torch.zeros(sizes.sequences, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Int64Array = self._host.numpy()
        self._current: list[list[int]] = [[]] * sizes.sequences

    def upload(self, texts: list[DraftRow]) -> None:
        """Of these texts; the host has seen the end of what was done with the last ones."""
        numbers, behind = self._numbers, FIELDS + self.shape.depth
        fields = [(text.token, text.position, text.previous_slot, text.width) for text in texts]
        numbers[: len(texts), :TEMPERATURE] = fields
        numbers[: len(texts), TEMPERATURE] = np.array([text.temperature for text in texts]).view(np.int64)
        numbers[len(texts) :, :FIELDS] = 0
        for row, text in enumerate(texts):
            if len(text.noise_keys):
                numbers[row, FIELDS : FIELDS + len(text.noise_keys)] = (
                    text.noise_keys
                )  # deeper than it guesses any will do
            pages = text.pages[: self.context_pages]
            if pages != self._current[row]:
                numbers[row, behind : behind + len(pages)] = pages
                self._current[row] = pages
        self._rows.copy_(self._host, non_blocking=True)

    def field(self, which: int) -> Tensor:
        """[texts]."""
        return self._rows[:, which]

    @property
    def temperatures(self) -> Tensor:
        """[texts, 1], in float32."""
        return self._rows[:, TEMPERATURE : TEMPERATURE + 1].view(torch.float64).float()

    @property
    def noise_keys(self) -> Tensor:
        """[texts, depth]."""
        return self._rows[:, FIELDS : FIELDS + self.shape.depth]

    @property
    def pages(self) -> Tensor:
        """[texts, pages]."""
        return self._rows[:, FIELDS + self.shape.depth :]
