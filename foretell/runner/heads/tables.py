"""Sequences that a head drafts for, as a padded table of integers that is copied to the device in one transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.runner.cuda.graph_shapes import next_power_of_2

CAPTURE_CONTEXTS = (512, 1024, 2048, 4096)  # positions that contexts are padded to; longer ones to powers of 2
MAX_POSITIONS = 1 << 17  # padded positions of a batch; a single sequence with more runs without a CUDA graph
SMALL_BATCH = 8  # sequences up to which trees are padded to the largest width: so few rows cost as much as one
CAPTURE_WIDTHS = (1, 2, 5)  # widths that trees of larger batches are padded to; beyond them to the largest
MAX_DEPTH_PADDING = 2  # a draft is padded to at most this many times its depth: each level is a step of the head

TOKEN, POSITION, PREVIOUS_SLOT, WIDTH, TEMPERATURE, FIELDS = range(6)
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftRow:
    """A sequence to draft for."""

    token: int  # the last one
    position: int  # of that token
    previous_slot: int  # of the position before it
    pages: list[int]
    width: int = 1  # branches to expand per level
    temperature: float = 0.0  # 0: argmax
    noise_keys: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))  # by depth; empty: no sampling


@dataclass(frozen=True)
class DraftShape:
    """Padded shape of a batch of drafts; batches of one shape share a CUDA graph."""

    sequences: int  # padded
    columns: int  # context positions per sequence, padded
    depth: int
    width: int = 0  # branches expanded per level, padded; 0: a chain
    sampled: bool = False

    @property
    def is_small(self) -> bool:
        """Return whether a CUDA graph may hold on to the memory of this shape."""
        return self.sequences * self.columns <= MAX_POSITIONS

    def covers(self, other: DraftShape) -> bool:
        """Return whether a draft of the other shape can be padded to this one: it equals the start of a deeper one."""
        same_kind = (self.width > 0, self.sampled) == (other.width > 0, other.sampled)
        fits = self.sequences >= other.sequences and self.columns >= other.columns and self.width >= other.width
        return same_kind and fits and other.depth <= self.depth <= MAX_DEPTH_PADDING * other.depth

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Return a key that orders shapes by the time they take."""
        return self.depth, self.sequences, self.columns, self.width


def draft_shape(rows: list[DraftRow], depth: int, max_width: int = 0) -> DraftShape:
    """Return the shape that a batch is padded to; `max_width` is the largest width of trees, 0 for chains."""
    sampled = any(row.temperature > 0 for row in rows)
    width = min(max_width, max(row.width for row in rows))
    if width:
        widths = CAPTURE_WIDTHS if len(rows) > SMALL_BATCH else ()
        width = min(max_width, next((each for each in widths if width <= each), max_width))
    columns = padded_context(max(row.position for row in rows))
    return DraftShape(next_power_of_2(len(rows)), columns, depth, width, sampled)


def padded_context(positions: int) -> int:
    """Return the number of positions that a context is padded to."""
    return next((size for size in CAPTURE_CONTEXTS if positions <= size), next_power_of_2(positions))


def split_batch(rows: list[DraftRow]) -> list[slice]:
    """Split a batch into slices of at most `MAX_POSITIONS` padded positions; a longer sequence is alone."""
    starts, longest = [0], 0
    for at, row in enumerate(rows):
        longest = max(longest, row.position)
        if at > starts[-1] and next_power_of_2(at + 1 - starts[-1]) * padded_context(longest) > MAX_POSITIONS:
            starts.append(at)
            longest = row.position
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]


class DraftTable:
    """A row per sequence: its fields, a noise key for each depth, and its pages. Padded rows attend to nothing."""

    def __init__(self, shape: DraftShape, draft_rows: int, page_size: int, device: torch.device) -> None:
        """`draft_rows`: rows of a draft whose KV later rows attend to."""
        self.shape, self.draft_rows, self.device = shape, draft_rows, device
        self.context_pages = -(-shape.columns // page_size)  # the pages after them hold draft tokens
        self.columns = self.context_pages * page_size
        width = FIELDS + shape.depth + self.context_pages + -(-draft_rows // page_size)
        self._rows = torch.zeros(shape.sequences, width, dtype=torch.int64, device=device)
        self._host = torch.zeros(shape.sequences, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Int64Array = self._host.numpy()
        self._current: list[list[int]] = [[]] * shape.sequences  # pages

    def upload(self, rows: list[DraftRow]) -> None:
        """Write these sequences and copy them to the device; the previous draft has to be finished."""
        numbers, pages_at = self._numbers, FIELDS + self.shape.depth
        fields = [(row.token, row.position, row.previous_slot, row.width) for row in rows]
        numbers[: len(rows), :TEMPERATURE] = fields
        numbers[: len(rows), TEMPERATURE] = np.array([row.temperature for row in rows]).view(np.int64)
        numbers[len(rows) :, :FIELDS] = 0
        for at, row in enumerate(rows):
            if len(row.noise_keys):
                numbers[at, FIELDS : FIELDS + len(row.noise_keys)] = row.noise_keys  # unused beyond its depth
            pages = row.pages[: self.context_pages]
            if pages != self._current[at]:
                numbers[at, pages_at : pages_at + len(pages)] = pages
                self._current[at] = pages
        self._rows.copy_(self._host, non_blocking=True)

    def field(self, which: int) -> Tensor:
        """Return a field of all sequences, [sequences]."""
        return self._rows[:, which]

    @property
    def temperatures(self) -> Tensor:
        """Return the temperatures as float32, [sequences, 1]."""
        return self._rows[:, TEMPERATURE : TEMPERATURE + 1].view(torch.float64).float()

    @property
    def noise_keys(self) -> Tensor:
        """Return the noise keys, [sequences, depth]."""
        return self._rows[:, FIELDS : FIELDS + self.shape.depth]

    @property
    def pages(self) -> Tensor:
        """Return the pages, [sequences, pages]."""
        return self._rows[:, FIELDS + self.shape.depth :]
