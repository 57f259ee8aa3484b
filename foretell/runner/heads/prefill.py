"""Prefill of draft heads: hidden states, keys and values of positions that the target has run.

It runs as a CUDA graph for a few padded numbers of rows, and the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kv.cache import slots_of
from foretell.models.draft_heads import BlockHead, DraftHead, MedusaHead
from foretell.runner.cuda.graph_shapes import next_power_of_2
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.kv import GraphKV, attend, store_rows
from foretell.runner.heads.tables import Int64Array, padded_context
from foretell.runner.native.head_prefill import PrefillRange

MAX_ROWS = 256  # of a graph; the reference implementation prefills more
TOKEN, POSITION, SLOT, PREVIOUS_SLOT, GRID_INDEX, FIELDS = range(6)


@dataclass(frozen=True)
class PrefillShape:
    """Padded shape of a prefill; prefills of one shape share a CUDA graph. Only `rows` matters without attention."""

    rows: int  # padded
    sequences: int = 0  # padded; 0: rows do not attend to other positions
    rows_per_sequence: int = 0  # padded
    columns: int = 0  # context positions per sequence, padded

    def covers(self, other: PrefillShape) -> bool:
        """Return whether a prefill of the other shape can be padded to this one."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return (self.sequences > 0) == (other.sequences > 0) and all(mine >= its for mine, its in pairs)

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Return a key that orders shapes by the time they take."""
        return self.rows, self.sequences, self.rows_per_sequence, self.columns


class PrefillTable:
    """Integers of a prefill, copied to the device in one transfer.

    Per row: token, position, slot, slot of the position before, and index in the grid. The grid [sequences, rows per
    sequence] holds row indices, so that attention can treat all sequences alike. Then come the pages of each sequence.
    Padded rows repeat the last row, or have slot -1.
    """

    def __init__(self, shape: PrefillShape, page_size: int, inputs: Tensor, skips_padding: bool = False) -> None:
        """`inputs` [rows, width] takes the target's hidden states; `skips_padding`: rows with slot -1 are skipped."""
        self.shape, self.inputs, self.skips_padding, device = shape, inputs, skips_padding, inputs.device
        self.pages_per_sequence = -(-shape.columns // page_size)
        self.grid_at = FIELDS * shape.rows
        self.pages_at = self.grid_at + shape.sequences * shape.rows_per_sequence
        count = self.pages_at + shape.sequences * self.pages_per_sequence
        self._device = torch.zeros(count, dtype=torch.int64, device=device)
        self._host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Int64Array = self._host.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def upload(self, ranges: list[PrefillRange], page_size: int) -> None:
        """Write these positions and copy them to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # mostly the last copy is finished
        counts, pages = [each.stop - each.start for each in ranges], [each.seq.pages for each in ranges]
        rows, used = self._numbers[: self.grid_at].reshape(FIELDS, -1), sum(counts)
        rows[:GRID_INDEX, :used] = _fields(ranges, page_size)  # built as lists: faster than numpy for few rows
        if self.shape.sequences:
            self._write_grid(rows, counts, pages)
        if used < self.shape.rows:
            rows[:, used:] = rows[:, used - 1 : used]
            if self.skips_padding:
                rows[SLOT, used:] = -1
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _write_grid(self, rows: Int64Array, counts: list[int], pages: list[list[int]]) -> None:
        """Write the grid and the pages of each sequence."""
        grid = self._numbers[self.grid_at : self.pages_at].reshape(self.shape.sequences, -1)
        page_rows = self._numbers[self.pages_at :].reshape(self.shape.sequences, -1)
        grid[:], offsets, first = 0, np.arange(self.shape.rows_per_sequence), 0
        for sequence, count in enumerate(counts):
            grid[sequence] = first + np.minimum(offsets, count - 1)
            rows[GRID_INDEX, first : first + count] = sequence * self.shape.rows_per_sequence + offsets[:count]
            context = pages[sequence][: self.pages_per_sequence]
            page_rows[sequence, : len(context)] = context
            first += count

    def field(self, which: int) -> Tensor:
        """Return a field of all rows, [rows]."""
        return self._device[which * self.shape.rows : (which + 1) * self.shape.rows]

    @property
    def grid(self) -> Tensor:
        """Return the row indices of the grid, [sequences * rows per sequence]."""
        return self._device[self.grid_at : self.pages_at]

    @property
    def pages(self) -> Tensor:
        """Return the pages, [sequences, pages]."""
        return self._device[self.pages_at :].view(self.shape.sequences, -1)


def _fields(ranges: list[PrefillRange], page_size: int) -> list[list[int]]:
    """Return tokens, positions, slots, and slots of the positions before, of all ranges."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    previous_slots: list[int] = []
    for each in ranges:
        first = max(each.start - 1, 0)  # the first position of a sequence has none before it
        own = slots_of(each.seq.pages, page_size, each.start, each.stop)
        tokens += each.seq.tokens[each.start : each.stop]
        positions += range(each.start, each.stop)
        slots += own
        previous_slots += slots_of(each.seq.pages, page_size, first, first + 1) + own[:-1]
    return [tokens, positions, slots, previous_slots]


class GraphPrefill:
    """Prefills a head of any kind from the target's hidden states."""

    skips_padding = False  # rows with slot -1 are not stored

    def __init__(
        self,
        head: DraftHead[Any],
        keys: Several[Tensor],
        values: Several[Tensor],
        hidden_state_cache: Tensor | None,
        page_size: int,
    ) -> None:
        self.head, self.keys, self.values, self.hidden_state_cache, self.page_size = (
            head,
            keys,
            values,
            hidden_state_cache,
            page_size,
        )
        self.tables: dict[PrefillShape, PrefillTable] = {}
        self._attends = len(keys) > 1 and not isinstance(head, BlockHead)  # lower layers attend to earlier positions
        self._inputs: Tensor | None = None
        self.graphs: GraphCache[PrefillShape, None] = GraphCache(head.draft_ids.device)

    def prefill(self, ranges: list[PrefillRange], columns: Tensor | None) -> bool:
        """Store hidden states, keys and values of these positions, or return False if there are too many.

        `columns` selects the head's hidden layers from the target's hidden states; None: all of them, in order.
        """
        rows = sum(each.stop - each.start for each in ranges)
        if rows > MAX_ROWS:
            return False
        table = self._table(self.graphs.select(self._shape(ranges, rows)), ranges[0].states[0].dtype)
        chunks = [chunk for each in ranges for chunk in each.states]
        if columns is None:
            torch.cat(chunks, out=table.inputs[:rows])
        else:
            torch.index_select(torch.cat(chunks), 1, columns, out=table.inputs[:rows])
        if rows < table.shape.rows and not self.skips_padding:
            table.inputs[rows:] = table.inputs[rows - 1]
        table.upload(ranges, self.page_size)
        self.graphs(table.shape, lambda: self.run(table))
        return True

    def _shape(self, ranges: list[PrefillRange], rows: int) -> PrefillShape:
        if not self._attends:
            return PrefillShape(next_power_of_2(rows))
        most_rows, longest = max(each.stop - each.start for each in ranges), max(each.stop for each in ranges)
        return PrefillShape(
            rows=next_power_of_2(rows),
            sequences=next_power_of_2(len(ranges)),
            rows_per_sequence=next_power_of_2(most_rows),
            columns=padded_context(longest),
        )

    def _table(self, shape: PrefillShape, dtype: torch.dtype) -> PrefillTable:
        if shape not in self.tables:
            if self._inputs is None:  # one buffer for all shapes: they run one after the other
                width = self.head.config.input_width
                self._inputs = torch.zeros(MAX_ROWS, width, dtype=dtype, device=self.head.draft_ids.device)
            self.tables[shape] = PrefillTable(shape, self.page_size, self._inputs[: shape.rows], self.skips_padding)
        return self.tables[shape]

    def run(self, table: PrefillTable) -> None:
        """Run a prefill whose table and inputs are on the device."""
        slots = table.field(SLOT)
        if isinstance(self.head, BlockHead):
            rope = self.head.rope_rows(table.field(POSITION))
            for layer, both in enumerate(self.head.context_kv(self.head.fuse(table.inputs), rope)):
                self._store_kv(layer, slots, *both)
            return
        if isinstance(self.head, MedusaHead):
            assert self.hidden_state_cache is not None, "this head stores hidden states"
            store_rows(table.inputs[:, None], self.hidden_state_cache, slots)
            return
        head: Any = self.head
        previous = head.fuse(table.inputs)
        if self.hidden_state_cache is not None:  # else the head conditions on tokens only
            store_rows(previous[:, None], self.hidden_state_cache, slots)
            # The first position of a sequence gets arbitrary hidden states; no row ever attends to it.
            previous = self.hidden_state_cache.view(-1, self.hidden_state_cache.shape[-1]).index_select(
                0, table.field(PREVIOUS_SLOT)
            )
        pair = (table.field(TOKEN), previous, head.rope_rows(table.field(POSITION)))
        attend = GraphPrefillAttention(self, table) if table.shape.sequences else None  # None: one layer
        self._store_kv(-1, slots, *head.keys_values(*pair, attend))

    def _store_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        store_rows(keys, self.keys[layer], slots)
        store_rows(values, self.values[layer], slots)


class GraphPrefillAttention:
    """Causal attention of prefilled positions, for heads with several layers."""

    def __init__(self, prefill: GraphPrefill, table: PrefillTable) -> None:
        self.prefill, self.table, self.config = prefill, table, prefill.head.config.layer
        positions = table.field(POSITION).index_select(0, table.grid).view(table.shape.sequences, -1, 1)
        column = torch.arange(table.pages_per_sequence * prefill.page_size, device=positions.device)
        # The first position of a sequence attends to itself only.
        self.mask = (column >= positions.clamp_max(1)) & (column <= positions)
        if self.config.window is not None:
            self.mask = self.mask & (column > positions - self.config.window)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.prefill._store_kv(layer, self.table.field(SLOT), k, v)
        pages = self.table.pages
        kv = GraphKV([self.prefill.keys[layer]], [self.prefill.values[layer]], self.config, pages)
        rows = q.index_select(0, self.table.grid)
        out = attend(rows, kv.keys[0], kv.values[0], kv.mask_bias(self.mask), self.config)
        return out.index_select(0, self.table.field(GRID_INDEX))
