"""Tables of a step for the kernels: its rows as one flat array of integers, and the pages of its sequences.

Both are copied to the device without waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.attention import Span
from foretell.kernels.triton.row_tables import ROW_FIELDS, TILE_FIELDS, StepShape, full_splits, split_start
from foretell.runner.batch_layout import BatchLayout

Int32Array = npt.NDArray[np.int32]
TOKENS, POSITIONS, SLOTS, LIMITS, REACHES, LOGITS_INDICES = range(ROW_FIELDS)


@dataclass(frozen=True)
class Tiles:
    """The rows that each attention program handles."""

    shared: Int32Array  # [tiles, TILE_FIELDS]: rows of one sequence that attend to the same keys
    nodes: Int32Array  # [nodes, TILE_FIELDS]: single tree nodes, over the keys of their own path
    depth: int = 0  # levels of the deepest tree


def make_tiles(packed: BatchLayout, max_rows: int, unsplit: bool = False) -> Tiles:
    """Divide the rows of a step into tiles of at most `max_rows`; `unsplit`: one program reads all keys of a tile."""
    shared: list[tuple[int, ...]] = []
    nodes: list[Int32Array] = []
    for sequence, span in enumerate(packed.spans):
        linear = span.rows - len(span.parents)
        for at in range(0, linear, max_rows):
            rows = min(max_rows, linear - at)
            shared.append((span.first + at, rows, sequence, keys := span.start + at + rows, 0, keys))
        if span.parents:
            common = 0 if unsplit else full_splits(span.stop - len(span.parents))
            shared += _shared_tiles(span, sequence, max_rows, split_start(common))
            nodes.append(_node_tiles(span, sequence, common, packed.table[POSITIONS]))
    shape = (-1, TILE_FIELDS)
    if not nodes:
        return Tiles(np.array(shared, np.int32).reshape(shape), np.empty((0, TILE_FIELDS), np.int32))
    single = np.concatenate(nodes)
    return Tiles(np.array(shared, np.int32).reshape(shape), single, int((single[:, 3] - single[:, 5]).max()))


def _shared_tiles(span: Span, sequence: int, max_rows: int, keys: int) -> list[tuple[int, ...]]:
    """Return tiles of several nodes of a tree, over the first `keys` keys, which all nodes see."""
    nodes = len(span.parents)
    first = span.first + span.rows - nodes
    stop = nodes if keys else 0
    return [(first + at, min(max_rows, nodes - at), sequence, keys, 0, keys) for at in range(0, stop, max_rows)]


def _node_tiles(span: Span, sequence: int, part: int, positions: Int32Array) -> Int32Array:
    """Return a tile for each node, from key split `part` on: its path continues the keys before the tree."""
    nodes, last = len(span.parents), span.first + span.rows
    tiles = np.empty((nodes, TILE_FIELDS), np.int32)
    tiles[:, 0] = np.arange(last - nodes, last)
    tiles[:, 1:] = (1, sequence, 0, part, span.stop - nodes)
    tiles[:, 3] = positions[last - nodes : last] + 1
    return tiles


def write_tables(numbers: Int32Array, packed: BatchLayout, tiles: Tiles | None, shape: StepShape) -> None:
    """Write the tables of a step into a flat buffer, padded to `shape`. Padded rows and tiles do nothing.

    Without tiles each sequence has one row, which is its tile.
    """
    if tiles is None:
        _write_plain_decode(numbers, packed, shape)
        return
    n, logits = packed.rows, len(packed.logits_indices)
    rows = numbers[: ROW_FIELDS * shape.rows].reshape(ROW_FIELDS, shape.rows)
    rows[:3, :n] = packed.table
    rows[LIMITS, :n] = rows[REACHES, :n] = packed.table[POSITIONS] + 1
    rows[:, n:] = 0
    rows[SLOTS, n:] = -1
    rows[LOGITS_INDICES, :logits] = packed.logits_indices
    rows[LOGITS_INDICES, logits:] = 0
    paths_at = ROW_FIELDS * shape.rows + TILE_FIELDS * (shape.tiles + shape.nodes)
    padded = numbers[ROW_FIELDS * shape.rows : paths_at].reshape(-1, TILE_FIELDS)
    for own, target in ((tiles.shared, padded[: shape.tiles]), (tiles.nodes, padded[shape.tiles :])):
        target[: len(own)] = own
        target[len(own) :] = 0
    if shape.path_length:
        paths = numbers[paths_at : shape.table_size].reshape(shape.rows, shape.path_length)
        for span in packed.spans:
            if span.parents:
                nodes = slice(span.first + span.rows - len(span.parents), span.first + span.rows)
                depths = packed.table[POSITIONS, nodes] - (span.stop - len(span.parents))
                _write_paths(span.parents, depths, paths[nodes])


def _write_plain_decode(numbers: Int32Array, packed: BatchLayout, shape: StepShape) -> None:
    """Write the tables of a step with one row per sequence as one list, in a tenth of the time. Most steps are such."""
    tokens, positions, slots = packed.tokens, packed.positions, packed.slots
    n, padding = len(tokens), [0] * (shape.rows - len(tokens))
    limits = [position + 1 for position in positions]
    flat = tokens + padding + positions + padding + slots + [-1] * len(padding)
    flat += limits + padding + limits + padding + list(range(n)) + padding
    for i in range(n):
        flat += (i, 1, i, limits[i], 0, limits[i])
    flat += [0] * (shape.table_size - len(flat))
    numbers[: shape.table_size] = flat


def _write_paths(parents: tuple[int, ...], depths: npt.NDArray[np.int64], paths: Int32Array) -> None:
    """Write the path from the root to each node into `paths` [nodes, levels]; `depths` start at 0."""
    nodes = np.arange(len(parents))
    above = np.array((*parents, -1))  # the last entry is the root, its own parent
    way = np.empty((int(depths.max()) + 1, len(parents)), np.int64)  # upwards from each node
    way[0] = nodes
    for step in range(1, len(way)):
        above.take(way[step - 1], out=way[step], mode="wrap")
    # A node that has reached the root writes past the end of its path, where no kernel reads.
    paths[nodes, depths - np.arange(len(way))[:, None]] = way


class PageTable:
    """The pages of each sequence of a step, on the device; only entries that changed are copied."""

    def __init__(self, sequences: int, max_pages: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.table = torch.zeros(sequences, max_pages, dtype=torch.int32, device=device)
        self._host = torch.zeros(sequences, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._numbers: Int32Array = self._host.numpy()
        self._current: list[tuple[int, ...]] = [()] * sequences

    def update(self, spans: list[Span]) -> Tensor:
        """Write the pages of these sequences in their order and return the table on the device."""
        changed = [i for i, span in enumerate(spans) if span.pages != self._current[i]]
        for i in changed:
            pages = self._current[i] = spans[i].pages
            self._numbers[i, : len(pages)] = pages
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            self.table[rows].copy_(self._host[rows], non_blocking=True)
        return self.table
