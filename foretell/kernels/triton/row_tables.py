"""What the kernels know of a step's rows: whole numbers on the device, of sizes that a recorded graph can keep."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Protocol

from torch import Tensor

ROW_FIELDS = 6  # tokens, positions, slots, limits, reaches, wanted
TILE_FIELDS = 6  # first row, rows, sequence, keys, first part of the keys, place from which keys are those of a path

# Short parts where there are few keys, so that one text keeps the device busy, and the nodes of a tree have few that
# they cannot share; long ones where there are many.
SHORT, MIDDLE = 1024, 4096  # up to here parts of 64 keys, up to here of 256, behind of 512
CHEAP_ROWS = 96  # rows that take little longer than one
NO_PARTS = 0  # `Sizes.splits` of a step whose programs read all keys


def parts(keys: int) -> int:
    """How many parts so many keys are cut into."""
    if keys <= SHORT:
        return -(-keys // 64)
    if keys <= MIDDLE:
        return 16 + -(-(keys - SHORT) // 256)
    return 28 + -(-(keys - MIDDLE) // 512)


def whole_parts(keys: int) -> int:
    """How many parts end before so many keys do, or with them."""
    if keys <= SHORT:
        return keys // 64
    if keys <= MIDDLE:
        return 16 + (keys - SHORT) // 256
    return 28 + (keys - MIDDLE) // 512


def begin(part: int) -> int:
    """Where a part begins."""
    if part < 16:
        return part * 64
    return SHORT + (part - 16) * 256 if part < 28 else MIDDLE + (part - 28) * 512


@dataclass(frozen=True)
class Sizes:
    """How large a step's tables are: steps of the same sizes run the same kernels on the same grids."""

    rows: int
    tiles: int
    height: int  # rows of a tile times the query heads that share a key head, at most
    splits: int  # parts the keys are cut into; 0: one program reads them all
    deep: int = 0  # nodes of a row's path, at most, where some draft is a tree
    nodes: int = 0  # further tiles, of a single node each

    @property
    def numbers(self) -> int:
        """How many whole numbers the tables hold."""
        return self.rows * (ROW_FIELDS + self.deep) + (self.tiles + self.nodes) * TILE_FIELDS

    def covers(self, other: Sizes) -> bool:
        """Whether a step of the others can be filled up to these and takes about as long; what is read and what is
        written are apart."""
        if (self.splits == NO_PARTS) != (other.splits == NO_PARTS) or self.rows > max(CHEAP_ROWS, 2 * other.rows):
            return False
        return all(mine >= its for mine, its in zip(astuple(self), astuple(other), strict=True))

    @property
    def cost(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run."""
        return self.rows, self.nodes, self.splits, self.tiles, self.height, self.deep


class Places(Protocol):
    """Where rows stand: in the text, and in a cache."""

    @property
    def positions(self) -> Tensor:
        """[rows]."""

    @property
    def slots(self) -> Tensor:
        """[rows]; -1: a row that is only there to fill up."""


@dataclass(frozen=True)
class RowTables:
    """A row sees the keys before its limit. Those of a tree's node lie behind its siblings': where a tile says so, keys
    from a place on are the ones of the row's path, in its order, as if its path were the text."""

    sizes: Sizes
    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]; -1: a row that is only there to fill up
    limits: Tensor  # [rows] keys that a row sees
    reaches: Tensor  # [rows] the same; 0: a row that has ended, of which nothing is joined
    wanted: Tensor  # [rows] the rows whose logits are wanted
    tiles: Tensor  # [tiles + nodes, TILE_FIELDS]: rows of one sequence that are attended together; then single nodes
    paths: Tensor  # [rows, deep]: nodes from the root to the row's own
    pages: Tensor  # [sequences, most pages]

    @property
    def reads(self) -> bool:
        """Whether these rows are a prompt's: nothing was guessed, and each program reads all keys."""
        return self.sizes.splits == 0

    @classmethod
    def over(cls, numbers: Tensor, sizes: Sizes, pages: Tensor) -> RowTables:
        """The tables in a flat buffer, as `cuda_tables.fill` lays them out."""
        by_row = numbers[: ROW_FIELDS * sizes.rows].view(ROW_FIELDS, sizes.rows)
        behind = ROW_FIELDS * sizes.rows + TILE_FIELDS * (sizes.tiles + sizes.nodes)
        tiles = numbers[ROW_FIELDS * sizes.rows : behind].view(-1, TILE_FIELDS)
        paths = numbers[behind : sizes.numbers].view(sizes.rows, sizes.deep)
        tokens, positions, slots, limits, reaches, wanted = by_row
        return cls(sizes, tokens, positions, slots, limits, reaches, wanted, tiles, paths, pages)
