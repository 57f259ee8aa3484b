"""A step's rows as flat whole numbers, and the pages of its sequences, brought to the device without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.attention import Span
from foretell.kernels.triton.row_tables import ROW_FIELDS, TILE_FIELDS, StepShape, full_splits, split_start
from foretell.runner.batch_layout import BatchLayout

Numbers = npt.NDArray[np.int32]
TOKENS, POSITIONS, SLOTS, LIMITS, REACHES, WANTED = range(ROW_FIELDS)


@dataclass(frozen=True)
class Tiles:
    """What programs attend to."""

    together: Numbers  # [tiles, TILE_FIELDS]: rows of one sequence
    nodes: Numbers  # [nodes, TILE_FIELDS]: nodes of trees, each over what its own path is part of
    deep: int = 0  # levels of the deepest tree


def make_tiles(packed: BatchLayout, most: int, whole: bool = False) -> Tiles:
    """At most `most` rows are attended together; `whole`: keys are not cut into parts."""
    together: list[tuple[int, ...]] = []
    nodes: list[Numbers] = []
    for sequence, span in enumerate(packed.spans):
        straight = span.rows - len(span.parents)
        for at in range(0, straight, most):
            rows = min(most, straight - at)
            together.append((span.first + at, rows, sequence, keys := span.start + at + rows, 0, keys))
        if span.parents:
            before = 0 if whole else full_splits(span.stop - len(span.parents))
            together += _shared(span, sequence, most, split_start(before))
            nodes.append(_single(span, sequence, before, packed.table[POSITIONS]))
    shape = (-1, TILE_FIELDS)
    if not nodes:
        return Tiles(np.array(together, np.int32).reshape(shape), np.empty((0, TILE_FIELDS), np.int32))
    single = np.concatenate(nodes)
    return Tiles(np.array(together, np.int32).reshape(shape), single, int((single[:, 3] - single[:, 5]).max()))


def _shared(span: Span, sequence: int, most: int, keys: int) -> list[tuple[int, ...]]:
    """A tree's nodes together, over the keys that all of them see in parts of their own."""
    nodes = len(span.parents)
    first = span.first + span.rows - nodes
    return [(first + at, min(most, nodes - at), sequence, keys, 0, keys) for at in range(0, nodes if keys else 0, most)]


def _single(span: Span, sequence: int, part: int, positions: Numbers) -> Numbers:
    """Each node by itself, from this part on: its path is as if it were the text behind the tree's beginning."""
    nodes, last = len(span.parents), span.first + span.rows
    tiles = np.empty((nodes, TILE_FIELDS), np.int32)
    tiles[:, 0] = np.arange(last - nodes, last)
    tiles[:, 1:] = (1, sequence, 0, part, span.stop - nodes)
    tiles[:, 3] = positions[last - nodes : last] + 1
    return tiles


def fill(numbers: Numbers, packed: BatchLayout, tiles: Tiles | None, sizes: StepShape) -> None:
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
    if sizes.path_length:
        paths = numbers[behind : sizes.table_size].reshape(sizes.rows, sizes.path_length)
        for span in packed.spans:
            if span.parents:
                nodes = slice(span.first + span.rows - len(span.parents), span.first + span.rows)
                depths = packed.table[POSITIONS, nodes] - (span.stop - len(span.parents))
                _paths(span.parents, depths, paths[nodes])


def _fill_single(numbers: Numbers, packed: BatchLayout, sizes: StepShape) -> None:
    """The same where each sequence has one row: as most steps do, and in a tenth of the time, as one list."""
    tokens, positions, slots = packed.tokens, packed.positions, packed.slots
    n, filler = len(tokens), [0] * (sizes.rows - len(tokens))
    limits = [position + 1 for position in positions]
    flat = tokens + filler + positions + filler + slots + [-1] * len(filler)
    flat += limits + filler + limits + filler + list(range(n)) + filler
    for i in range(n):
        flat += (i, 1, i, limits[i], 0, limits[i])
    flat += [0] * (sizes.table_size - len(flat))
    numbers[: sizes.table_size] = flat


def _paths(parents: tuple[int, ...], depths: npt.NDArray[np.int64], paths: Numbers) -> None:
    """Of each node those from the root to itself, to `paths` [nodes, levels]; `depths` are counted from 0."""
    nodes = np.arange(len(parents))
    above = np.array((*parents, -1))  # the root, which the last one stands for, is above itself
    way = np.empty((int(depths.max()) + 1, len(parents)), np.int64)  # upwards from each node
    way[0] = nodes
    for step in range(1, len(way)):
        above.take(way[step - 1], out=way[step], mode="wrap")
    # Who is at the root already writes behind its own path, which nobody reads.
    paths[nodes, depths - np.arange(len(way))[:, None]] = way


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
