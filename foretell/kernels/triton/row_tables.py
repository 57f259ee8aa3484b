"""Tables that describe the rows of a step to the kernels: int32 on the device, with shapes a CUDA graph can keep."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Protocol

from torch import Tensor

ROW_FIELDS = 6  # tokens, positions, slots, key limits, visible keys, logit rows
TILE_FIELDS = 6  # first row, rows, sequence, keys, first split, position from which keys are read along a path

# A context is split into short pieces at its start, so that one sequence occupies the device and tree nodes have few
# splits that they cannot share, and into longer ones further on.
SHORT = 1024  # keys in splits of 64
MIDDLE = 4096  # keys up to which splits have 256; after it they have 512
CHEAP_ROWS = 96  # rows that take little longer than one
NO_SPLIT = 0  # `StepShape.splits` of a step in which a program reads all keys of its rows


def num_splits(keys: int) -> int:
    """Return the number of splits of a context of `keys` keys."""
    if keys <= SHORT:
        return -(-keys // 64)
    if keys <= MIDDLE:
        return 16 + -(-(keys - SHORT) // 256)
    return 28 + -(-(keys - MIDDLE) // 512)


def full_splits(keys: int) -> int:
    """Return the number of splits that lie entirely within the first `keys` keys."""
    if keys <= SHORT:
        return keys // 64
    if keys <= MIDDLE:
        return 16 + (keys - SHORT) // 256
    return 28 + (keys - MIDDLE) // 512


def split_start(split: int) -> int:
    """Return the first key of a split."""
    if split < 16:
        return split * 64
    return SHORT + (split - 16) * 256 if split < 28 else MIDDLE + (split - 28) * 512


@dataclass(frozen=True)
class StepShape:
    """The shape of a step's tables. Steps of the same shape run the same kernels on the same grids."""

    rows: int
    tiles: int
    tile_height: int  # upper bound of the rows of a tile times the query heads per KV head
    splits: int  # splits of the keys; NO_SPLIT: a program reads them all
    path_length: int = 0  # upper bound of the nodes on a row's path, if a draft is a tree
    nodes: int = 0  # additional tiles of a single node each

    @property
    def table_size(self) -> int:
        """Return the number of integers in the tables."""
        return self.rows * (ROW_FIELDS + self.path_length) + (self.tiles + self.nodes) * TILE_FIELDS

    def covers(self, other: StepShape) -> bool:
        """Return whether a step of shape `other` can be padded to this shape at about the same cost.

        Prefill and decode shapes never cover each other.
        """
        if (self.splits == NO_SPLIT) != (other.splits == NO_SPLIT) or self.rows > max(CHEAP_ROWS, 2 * other.rows):
            return False
        return all(mine >= its for mine, its in zip(astuple(self), astuple(other), strict=True))

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Return a sort key: the smaller of two shapes is cheaper to run."""
        return self.rows, self.nodes, self.splits, self.tiles, self.tile_height, self.path_length


class RowPositions(Protocol):
    """The positions of rows in their sequences and their slots in a KV cache."""

    @property
    def positions(self) -> Tensor:
        """[rows]; the position of each row in its sequence."""

    @property
    def slots(self) -> Tensor:
        """[rows]; the KV slot of each row, -1 for a padded row."""


@dataclass(frozen=True)
class RowTables:
    """The tables of one step.

    A row sees the keys before its limit. The KV of a tree node lies after that of its siblings: from the position that
    its tile states, keys are read along the row's path, in order, as if the path were the sequence.
    """

    shape: StepShape
    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]; -1 for a padded row
    key_limits: Tensor  # [rows] keys that a row sees
    visible_keys: Tensor  # [rows] equal to key_limits; 0 for a finished row, for which nothing is merged
    logit_rows: Tensor  # [rows] indices of the rows whose logits are computed
    tiles: Tensor  # [tiles + nodes, TILE_FIELDS]: rows of one sequence that attend together, then single nodes
    paths: Tensor  # [rows, path_length]: nodes from the root to the row's own
    pages: Tensor  # [sequences, max pages]

    @property
    def is_prefill(self) -> bool:
        """Return whether the rows are a prompt without draft tokens, for which each program reads all keys."""
        return self.shape.splits == 0

    @classmethod
    def over(cls, numbers: Tensor, shape: StepShape, pages: Tensor) -> RowTables:
        """Return views of a flat buffer in the layout of `runner.cuda.tables.fill`."""
        by_row = numbers[: ROW_FIELDS * shape.rows].view(ROW_FIELDS, shape.rows)
        tiles_end = ROW_FIELDS * shape.rows + TILE_FIELDS * (shape.tiles + shape.nodes)
        tiles = numbers[ROW_FIELDS * shape.rows : tiles_end].view(-1, TILE_FIELDS)
        paths = numbers[tiles_end : shape.table_size].view(shape.rows, shape.path_length)
        tokens, positions, slots, key_limits, visible_keys, logit_rows = by_row
        return cls(shape, tokens, positions, slots, key_limits, visible_keys, logit_rows, tiles, paths, pages)
