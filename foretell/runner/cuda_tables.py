"""A step's rows as flat whole numbers, and the pages of its sequences, brought to the device without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.attention import Span
from foretell.kernels.triton.attention import begin, whole_parts
from foretell.kernels.triton.tables import ROW_FIELDS, TILE_FIELDS, Sizes

from .pack import Packed

Numbers = npt.NDArray[np.int32]
Tile = tuple[int, int, int, int, int, int]
TOKENS, POSITIONS, SLOTS, LIMITS, REACHES, WANTED = range(ROW_FIELDS)


@dataclass(frozen=True)
class Tiles:
    """What programs attend to."""

    together: Numbers  # [tiles, TILE_FIELDS]: rows of one sequence
    nodes: Numbers  # [nodes, TILE_FIELDS]: nodes of trees, each over what its own path is part of


def make_tiles(spans: list[Span], most: int, whole: bool = False) -> Tiles:
    """At most `most` rows are attended together; `whole`: keys are not cut into parts."""
    together: list[Tile] = []
    nodes: list[Tile] = []
    for sequence, span in enumerate(spans):
        straight = span.rows - len(span.parents)
        for at in range(0, straight, most):
            rows = min(most, straight - at)
            together.append((span.first + at, rows, sequence, keys := span.start + at + rows, 0, keys))
        if span.parents:
            shared, single = _tree_tiles(span, sequence, most, whole)
            together += shared
            nodes += single
    return Tiles(*(np.array(some, np.int32).reshape(-1, TILE_FIELDS) for some in (together, nodes)))


def _tree_tiles(span: Span, sequence: int, most: int, whole: bool) -> tuple[list[Tile], list[Tile]]:
    """Nodes together over the parts before their tree, and each by itself over the rest."""
    count = len(span.parents)
    first, base = span.first + span.rows - count, span.stop - count
    before = 0 if whole else whole_parts(base)
    shared: list[Tile] = []
    if before:
        keys = begin(before)
        shared = [(first + at, min(most, count - at), sequence, keys, 0, keys) for at in range(0, count, most)]
    depths = enumerate(depths_of(span.parents))
    return shared, [(first + node, 1, sequence, base + deep, before, base) for node, deep in depths]


def depths_of(parents: tuple[int, ...]) -> list[int]:
    """Of each node how many lie on its path, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def fill(numbers: Numbers, packed: Packed, tiles: Tiles | None, sizes: Sizes) -> None:
    """Lay a step's tables out in a flat buffer; rows and tiles that are only there to fill up do nothing.

    Without tiles each sequence has one row, and is a tile by itself.
    """
    if tiles is None:
        _fill_single(numbers, packed, sizes)
        return
    n, wanted = packed.rows, len(packed.wanted)
    rows = numbers[: ROW_FIELDS * sizes.rows].reshape(ROW_FIELDS, sizes.rows)
    rows[:3, :n] = packed.table
    rows[LIMITS, :n] = rows[REACHES, :n] = packed.table[POSITIONS] + 1
    rows[:, n:] = 0
    rows[SLOTS, n:] = -1
    rows[WANTED, :wanted] = packed.wanted
    rows[WANTED, wanted:] = 0
    behind = ROW_FIELDS * sizes.rows + TILE_FIELDS * (sizes.tiles + sizes.nodes)
    every = numbers[ROW_FIELDS * sizes.rows : behind].reshape(-1, TILE_FIELDS)
    for own, room in ((tiles.together, every[: sizes.tiles]), (tiles.nodes, every[sizes.tiles :])):
        room[: len(own)] = own
        room[len(own) :] = 0
    if sizes.deep:
        paths = numbers[behind : sizes.numbers].reshape(sizes.rows, sizes.deep)
        for span in packed.spans:
            if span.parents:
                last = span.first + span.rows
                paths[last - len(span.parents) : last] = _paths(span.parents, sizes.deep)


def _fill_single(numbers: Numbers, packed: Packed, sizes: Sizes) -> None:
    """The same where each sequence has one row: as most steps do, and in a tenth of the time, as one list."""
    tokens, positions, slots = packed.table.tolist()
    n, filler = len(tokens), [0] * (sizes.rows - len(tokens))
    limits = [position + 1 for position in positions]
    flat = tokens + filler + positions + filler + slots + [-1] * len(filler)
    flat += limits + filler + limits + filler + list(range(n)) + filler
    for i in range(n):
        flat += (i, 1, i, limits[i], 0, limits[i])
    flat += [0] * (sizes.numbers - len(flat))
    numbers[: sizes.numbers] = flat


def _paths(parents: tuple[int, ...], deep: int) -> list[list[int]]:
    """Of each node those from the root to itself, filled up."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return [path + [0] * (deep - len(path)) for path in paths]


class PageTable:
    """For each sequence of a step its pages; only what changed since the last step travels."""

    def __init__(self, sequences: int, most_pages: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(sequences, most_pages, dtype=torch.int32, device=device)
        self._host = torch.zeros(sequences, most_pages, dtype=torch.int32, pin_memory=pinned)
        self._numbers: Numbers = self._host.numpy()
        self._known: list[tuple[int, ...]] = [()] * sequences

    def update(self, spans: list[Span]) -> Tensor:
        """The table on the device with the pages of these sequences, in their order."""
        changed = [i for i, span in enumerate(spans) if span.pages != self._known[i]]
        for i in changed:
            pages = self._known[i] = spans[i].pages
            self._numbers[i, : len(pages)] = pages
        if changed:
            some = slice(changed[0], changed[-1] + 1)
            self.device[some].copy_(self._host[some], non_blocking=True)
        return self.device
