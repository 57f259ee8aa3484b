"""A step's rows as flat whole numbers, and the pages of its sequences, brought to the device without waiting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.attention import Span
from foretell.kernels.triton.tables import ROW_FIELDS, TILE_FIELDS, WORD, Sizes

from .pack import Packed

Numbers = npt.NDArray[np.int32]
TOKENS, POSITIONS, SLOTS, LIMITS, REACHES, WANTED = range(ROW_FIELDS)


def make_tiles(spans: list[Span], most: int) -> Numbers:
    """Rows that are attended together, at most `most` and of one sequence."""
    tiles = []
    for sequence, span in enumerate(spans):
        for at in range(0, span.rows, most):
            rows = min(most, span.rows - at)
            keys = span.stop if span.parents else span.start + at + rows
            tiles.append((span.first + at, rows, sequence, keys, span.start, span.first))
    return np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)


def fill(numbers: Numbers, packed: Packed, tiles: Numbers | None, sizes: Sizes) -> None:
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
    behind = ROW_FIELDS * sizes.rows + TILE_FIELDS * sizes.tiles
    all_tiles = numbers[ROW_FIELDS * sizes.rows : behind].reshape(sizes.tiles, TILE_FIELDS)
    all_tiles[: len(tiles)] = tiles
    all_tiles[len(tiles) :] = 0
    if sizes.words:
        words = numbers[behind : sizes.numbers].reshape(sizes.rows, sizes.words)
        words[:] = 0
        for span in packed.spans:
            if span.parents:
                _hang_tree(rows, words, span)


def _fill_single(numbers: Numbers, packed: Packed, sizes: Sizes) -> None:
    """The same where each sequence has one row: as most steps do, and in a tenth of the time, as one list."""
    tokens, positions, slots = packed.table.tolist()
    n, filler = len(tokens), [0] * (sizes.rows - len(tokens))
    limits = [position + 1 for position in positions]
    flat = tokens + filler + positions + filler + slots + [-1] * len(filler)
    flat += limits + filler + limits + filler + list(range(n)) + filler
    for i in range(n):
        flat += (i, 1, i, limits[i], positions[i], i)
    flat += [0] * (sizes.numbers - len(flat))
    numbers[: sizes.numbers] = flat


def _hang_tree(rows: Numbers, words: Numbers, span: Span) -> None:
    """Nodes see the text up to their root, and behind it their ancestors and themselves."""
    nodes = len(span.parents)
    first = span.first + span.rows - nodes
    rows[LIMITS, first : first + nodes] = span.stop - nodes
    rows[REACHES, first : first + nodes] = span.stop
    seen: list[int] = []
    for node, parent in enumerate(span.parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    raw = b"".join(bits.to_bytes(words.shape[1] * WORD // 8, "little") for bits in seen)
    words[first : first + nodes] = np.frombuffer(raw, np.int32).reshape(nodes, -1)


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
