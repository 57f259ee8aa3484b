"""What a head keeps of places the target has run, as one graph for each of a few numbers of rows; no wait."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kv.cache import slots_of
from foretell.models.draft_heads import BlockHead, DraftHead, MedusaHead
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.kv import HeadMemory, attend, store
from foretell.runner.heads.tables import Whole, columns_for, power
from foretell.runner.native.head_prefill import PrefillRange

MOST_ROWS = 256  # more are read as the definition does
TOKEN, PLACE, SLOT, BEFORE, HOME, FIELDS = range(6)


@dataclass(frozen=True)
class PrefillShape:
    """Readings of the same sizes are one graph."""

    rows: int  # filled up
    texts: int = 0  # filled up; 0: rows see none but themselves
    each: int = 0  # rows of a text, filled up
    columns: int = 0  # places of a text that may be seen, filled up

    def covers(self, other: PrefillShape) -> bool:
        """Whether a reading of the others can be filled up to these."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return (self.texts > 0) == (other.texts > 0) and all(mine >= its for mine, its in pairs)

    @property
    def price(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run."""
        return self.rows, self.texts, self.each, self.columns


class PrefillTable:
    """Of each row its token, place and slot, the slot of the place before, and where it stands among the rows of all
    texts; for each of those the row; and each text's pages. Rows that fill up are the last one once more, or without a
    slot."""

    def __init__(self, sizes: PrefillShape, page_size: int, inputs: Tensor, leaves_out: bool = False) -> None:
        """`inputs` [rows, width] is where the target's states are put; `leaves_out`: whether who reads leaves out rows
        that have no slot."""
        self.sizes, self.inputs, self.leaves_out, device = sizes, inputs, leaves_out, inputs.device
        self.pages_each = -(-sizes.columns // page_size)
        self.grid_at = FIELDS * sizes.rows
        self.pages_at = self.grid_at + sizes.texts * sizes.each
        count = self.pages_at + sizes.texts * self.pages_each
        self._device = torch.zeros(count, dtype=torch.int64, device=device)
        self._host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: Whole = self._host.numpy()
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, readings: list[PrefillRange], page_size: int) -> None:
        """Of these places."""
        if self._sent is not None:
            self._sent.synchronize()  # until the last ones have left, which they mostly have
        counts, pages = [each.stop - each.start for each in readings], [each.seq.pages for each in readings]
        rows, filled = self._numbers[: self.grid_at].reshape(FIELDS, -1), sum(counts)
        rows[:HOME, :filled] = _fields(readings, page_size)  # as lists: they are few, and numpy takes long to begin
        if self.sizes.texts:
            self._send_texts(rows, counts, pages)
        if filled < self.sizes.rows:
            rows[:, filled:] = rows[:, filled - 1 : filled]
            if self.leaves_out:
                rows[SLOT, filled:] = -1
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _send_texts(self, rows: Whole, counts: list[int], pages: list[list[int]]) -> None:
        """Where rows stand side by side, as many for each text."""
        grid = self._numbers[self.grid_at : self.pages_at].reshape(self.sizes.texts, -1)
        held = self._numbers[self.pages_at :].reshape(self.sizes.texts, -1)
        grid[:], place, first = 0, np.arange(self.sizes.each), 0
        for text, count in enumerate(counts):
            grid[text] = first + np.minimum(place, count - 1)
            rows[HOME, first : first + count] = text * self.sizes.each + place[:count]
            some = pages[text][: self.pages_each]
            held[text, : len(some)] = some
            first += count

    def field(self, which: int) -> Tensor:
        """[rows]."""
        return self._device[which * self.sizes.rows : (which + 1) * self.sizes.rows]

    @property
    def grid(self) -> Tensor:
        """[texts * rows of each]."""
        return self._device[self.grid_at : self.pages_at]

    @property
    def pages(self) -> Tensor:
        """[texts, pages]."""
        return self._device[self.pages_at :].view(self.sizes.texts, -1)


def _fields(readings: list[PrefillRange], page_size: int) -> list[list[int]]:
    """Of all places, end to end: tokens, places, slots, and the slots of the places before."""
    tokens: list[int] = []
    places: list[int] = []
    slots: list[int] = []
    before: list[int] = []
    for each in readings:
        first = max(each.start - 1, 0)  # a text's first place has none before it
        own = slots_of(each.seq.pages, page_size, each.start, each.stop)
        tokens += each.seq.tokens[each.start : each.stop]
        places += range(each.start, each.stop)
        slots += own
        before += slots_of(each.seq.pages, page_size, first, first + 1) + own[:-1]
    return [tokens, places, slots, before]


class GraphPrefill:
    """Reads for a head of any kind."""

    leaves_out = False  # rows that only fill up

    def __init__(
        self,
        head: DraftHead[Any],
        keys: Several[Tensor],
        values: Several[Tensor],
        features: Tensor | None,
        page_size: int,
    ) -> None:
        self.head, self.keys, self.values, self.features, self.page_size = head, keys, values, features, page_size
        self.tables: dict[PrefillShape, PrefillTable] = {}
        self._inputs: Tensor | None = None
        self.recorder: GraphCache[PrefillShape, None] = GraphCache(head.draft_ids.device)

    def read(self, readings: list[PrefillRange], columns: Tensor | None) -> bool:
        """Keep what these places are to be remembered by; False if they are too many. `columns` are where the head's
        own stand among all of the target's states; None: just so."""
        rows = sum(each.stop - each.start for each in readings)
        if rows > MOST_ROWS:
            return False
        table = self._table(self.recorder.serving(self._sizes(readings, rows)), readings[0].states[0].dtype)
        pieces = [piece for each in readings for piece in each.states]
        if columns is None:
            torch.cat(pieces, out=table.inputs[:rows])
        else:
            torch.index_select(torch.cat(pieces), 1, columns, out=table.inputs[:rows])
        if rows < table.sizes.rows and not self.leaves_out:
            table.inputs[rows:] = table.inputs[rows - 1]
        table.send(readings, self.page_size)
        self.recorder(table.sizes, lambda: self.run(table))
        return True

    def _sizes(self, readings: list[PrefillRange], rows: int) -> PrefillShape:
        if len(self.keys) <= 1 or isinstance(self.head, BlockHead):
            return PrefillShape(power(rows))
        each, longest = max(r.stop - r.start for r in readings), max(r.stop for r in readings)
        return PrefillShape(power(rows), power(len(readings)), power(each), columns_for(longest))

    def _table(self, sizes: PrefillShape, dtype: torch.dtype) -> PrefillTable:
        if sizes not in self.tables:
            if self._inputs is None:  # one for all sizes: they are read one after the other
                width = self.head.config.input_width
                self._inputs = torch.zeros(MOST_ROWS, width, dtype=dtype, device=self.head.draft_ids.device)
            self.tables[sizes] = PrefillTable(sizes, self.page_size, self._inputs[: sizes.rows], self.leaves_out)
        return self.tables[sizes]

    def run(self, table: PrefillTable) -> None:
        slots = table.field(SLOT)
        if isinstance(self.head, BlockHead):
            turn = self.head.rope_rows(table.field(PLACE))
            for layer, both in enumerate(self.head.context_kv(self.head.fuse(table.inputs), turn)):
                self._keep(layer, slots, *both)
            return
        if isinstance(self.head, MedusaHead):
            assert self.features is not None, "this head keeps features"
            store(table.inputs[:, None], self.features, slots)
            return
        head: Any = self.head
        before = head.fuse(table.inputs)
        if self.features is not None:  # else it looks at tokens alone, and takes anything for a feature
            store(before[:, None], self.features, slots)
            # The first place of a text has no feature before it; it gets one of no meaning, and is never seen.
            before = self.features.view(-1, self.features.shape[-1]).index_select(0, table.field(BEFORE))
        pair = (table.field(TOKEN), before, head.rope_rows(table.field(PLACE)))
        attend = PrefillAttention(self, table) if table.sizes.texts else None  # none where there is one layer
        self._keep(-1, slots, *head.keys_values(*pair, attend))

    def _keep(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        store(keys, self.keys[layer], slots)
        store(values, self.values[layer], slots)


class PrefillAttention:
    """Attention of places that are read, over those before them; what a head of several layers needs."""

    def __init__(self, reader: GraphPrefill, table: PrefillTable) -> None:
        self.reader, self.table, self.config = reader, table, reader.head.config.layer
        places = table.field(PLACE).index_select(0, table.grid).view(table.sizes.texts, -1, 1)
        column = torch.arange(table.pages_each * reader.page_size, device=places.device)
        self.seen = (column >= places.clamp_max(1)) & (column <= places)  # a text's first place sees itself alone
        if self.config.window is not None:
            self.seen = self.seen & (column > places - self.config.window)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.reader._keep(layer, self.table.field(SLOT), k, v)
        pages = self.table.pages
        memory = HeadMemory([self.reader.keys[layer]], [self.reader.values[layer]], self.config, pages)
        rows = q.index_select(0, self.table.grid)
        out = attend(rows, memory.keys[0], memory.values[0], memory.bias(self.seen), self.config)
        return out.index_select(0, self.table.field(HOME))
