"""The few sizes that steps are filled up to on a CUDA device; known without Triton."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.kernels.attention import Span
from foretell.kernels.triton.row_tables import NO_SPLIT, SHORT, StepShape, num_splits
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.split_prefill import CATCH_UP, readers, single
from foretell.runner.cuda.tables import Tiles, make_tiles

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # sizes steps are filled up to; more rows run unrecorded
KEYS = (512, 1024, 2048, 4096)  # contexts the grids are made for; behind, powers of two
DEEP = (32, 256)  # levels that tables of trees have room for: room costs nothing, and each is a kernel of its own
LOW, HIGH, WHOLE = 16, 32, 64  # heights of a tile: for a few rows a sequence, for many, for prompts
CROWDED = 48  # rows of one sequence that make low tiles enough to keep a device busy, each with all of its keys
ROWS_OF_A_TILE = 4  # on an average, at least, where there are several texts
FEW = CATCH_UP + 1  # tokens of a text that a chain begins with; where there are more, they are read like a prompt
LONGER = 2  # times as long as a chain has to be is what it may be filled up to: each token is a step of the model


@dataclass(frozen=True)
class ChainSizes:
    """Steps of the same sizes are one graph."""

    first: StepShape  # of the rows that are still to be read
    height: int  # of a tile of one row
    splits: int  # for the longest text at its end
    sequences: int  # filled up
    steps: int
    vocab: int  # tokens that may be guessed
    drawn: bool = False  # whether any sequence draws; its kernel takes longer than one that looks for the likeliest

    @property
    def following(self) -> StepShape:
        """One row a sequence."""
        return StepShape(self.sequences, self.sequences, self.height, self.splits)

    def covers(self, other: ChainSizes) -> bool:
        """Whether a chain of the others can be filled up to these: of a longer one the beginning is the same."""
        room = self.first.covers(other.first) and self.following.covers(other.following)
        alike = (self.vocab, self.drawn) == (other.vocab, other.drawn)
        return room and alike and other.steps <= self.steps <= LONGER * other.steps

    @property
    def price(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run."""
        return self.steps, *self.first.price, self.sequences, self.splits


def fit(packed: BatchLayout, share: int) -> tuple[StepShape, Tiles | None]:
    """The sizes a step is filled up to, and its tiles; none where each sequence is one."""
    if single(packed):
        rows = next((size for size in ROWS if packed.rows <= size), packed.rows)
        keys = _keys(max([span.start for span in packed.spans]) + 1)
        return StepShape(rows, power(packed.rows), max(LOW, power(share)), num_splits(keys)), None
    rows = next((size for size in ROWS if packed.rows <= size), packed.rows)
    whole = all(readers(packed))
    low = max(LOW, power(share))
    if whole:  # many rows: there the library's products add up alike, however many
        rows, height = max(rows, ROWS[-1]), max(WHOLE, power(share))
    else:
        height = _height(packed.spans, low, share)
    tiles = make_tiles(packed, height // share, whole)
    deep = levels_for(tiles.deep)
    splits = NO_SPLIT if whole else num_splits(_keys(max(span.stop for span in packed.spans)))
    nodes = min(rows, power(len(tiles.nodes))) if deep else 0
    # Several texts share their rows in any way: how many tiles that makes is no size of its own.
    several = power(rows) // ROWS_OF_A_TILE if len(packed.spans) > 1 else 1
    return StepShape(rows, max(several, power(len(tiles.together))), height, splits, deep, nodes), tiles


def fit_chain(
    packed: BatchLayout, first: StepShape, share: int, steps: int, vocab: int, drawn: bool = False
) -> ChainSizes:
    """The sizes of a chain's steps, behind a first one of these. That has room for two rows a text, because where all
    guesses stood the last one is still to be read, and for what a text has to catch up with that others guessed for
    meanwhile: so one recording serves for both, and a few rows more in one step cost next to nothing."""
    texts, height = len(packed.spans), max(HIGH, power(share))
    if first.splits != NO_SPLIT:
        rows = max(first.rows, next((size for size in ROWS if max(2 * texts, FEW) <= size), 0))
        tiles = rows if texts > 1 else -(-FEW // (height // share))  # several texts share their rows in any way
        first = StepShape(rows, max(first.tiles, power(tiles)), max(first.tile_height, height), first.splits)
    keys = _keys(max(span.stop for span in packed.spans) + steps)
    sequences = min(first.rows, power(texts))  # the first step has a row for each
    return ChainSizes(first, max(LOW, power(share)), num_splits(keys), sequences, steps, vocab, drawn)


def _height(spans: list[Span], low: int, share: int) -> int:
    """Of tiles for these rows, by measurement on an H200: high ones where a sequence has many rows, unless there are so
    many that low ones have all of their keys to themselves, which those of trees never have."""
    rows, keys = max(span.rows for span in spans), max(span.stop for span in spans)
    alone = rows >= CROWDED and keys <= SHORT and not any(span.parents for span in spans)
    return low if alone or rows <= low // share else max(HIGH, low)


def levels_for(deep: int) -> int:
    """What so many levels of a tree are filled up to."""
    return next((size for size in (0, *DEEP) if deep <= size), power(deep))


def _keys(keys: int) -> int:
    """The context a grid is made for."""
    return next((size for size in KEYS if keys <= size), power(keys))


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
