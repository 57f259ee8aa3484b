"""Prefill of a draft head over positions that the target has run, in one call of the native library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.bounds import require
from foretell.kernels.native.records import HeadPrefillRecord, PrefillHeadRecord, pack_record
from foretell.kv.cache import slots_of
from foretell.models.draft_heads import BlockHead, DistilledHead
from foretell.models.draft_heads.layer import HeadLayer
from foretell.runner.native.executor import pack_int64
from foretell.runner.native.head_draft import NativeHead, PrefillBuffers, norm_address, weights_address
from foretell.types import Sequence

FLOAT_BYTES = 4


@dataclass(frozen=True)
class PrefillRange:
    """Positions `start` to `stop` of a sequence that a head prefills, with the target's hidden states there."""

    seq: Sequence
    start: int
    stop: int
    states: list[Tensor]  # chunks of [positions, hidden layers * width]

    def row_addresses(self) -> list[int]:
        """Return the address of each position's hidden states."""
        found: list[int] = []
        for chunk in self.states:
            found += addresses_of(chunk, 0, len(chunk))
        return found


@dataclass
class PrefillTables:
    """The arrays that `HeadPrefillRecord` points to, in its order.

    First come the hidden states to store, then pairs of a token and the hidden states of the position before it, from
    which EAGLE heads compute keys and values.
    """

    states: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    previous_slots: list[int] = field(default_factory=list)
    pair_slots: list[int] = field(default_factory=list)
    pair_positions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    first_pages: list[int] = field(default_factory=list)
    pair_sequences: list[int] = field(default_factory=list)

    def add_states(self, span: PrefillRange, slots: list[int]) -> None:
        self.states += span.row_addresses()
        self.slots += slots
        self.positions += range(span.start, span.stop)

    def add_pairs(self, sequence: int, span: PrefillRange, start: int, slots: list[int]) -> None:
        """Add pairs from `start` on; `slots` begin with the slot before `start`."""
        self.tokens += span.seq.tokens[start : span.stop]
        self.previous_slots += slots[:-1]
        self.pair_slots += slots[1:]
        self.pair_positions += range(start, span.stop)
        self.first_pages.append(len(self.pages))
        self.pages += span.seq.pages
        self.pair_sequences += repeat(sequence, span.stop - start)


class NativePrefill:
    """Prefills for a head that drafts with `native`.

    `columns` are where the head's hidden layers begin in the target's hidden states.
    """

    def __init__(self, native: NativeHead, hidden_states: Tensor | None, columns: list[int]) -> None:
        head: Any = native.head
        self._native, self._page_size = native, native.page_size
        self._pairs, self._tokens_only = not isinstance(head, BlockHead), isinstance(head, DistilledHead)
        layers = [layer for layer in head.modules() if isinstance(layer, HeadLayer)]
        self._kv_weights = _addresses([weights_address(layer.attention.kv) for layer in layers])
        norms = [norm_address(norm) for norm in getattr(head, "tap_norms", ())]
        self._norms, self._columns = _addresses(norms), np.array(columns, np.int64)
        joins = native.record.fc is not None  # then `fc` joins embedding and hidden states, and not several layers
        self._held = (hidden_states, head.target_norm)
        self._record = PrefillHeadRecord(
            native.record,
            ctypes.addressof(self._kv_weights),
            None if joins else weights_address(getattr(head, "fc", None)),
            head.target_norm.data_ptr() if head.config.target_norm else None,
            ctypes.addressof(self._norms) if norms else None,
            norm_address(getattr(head, "fc_norm", None)),
            None if self._pairs else norm_address(head.feature_norm),
            None if hidden_states is None else hidden_states.data_ptr(),
            self._columns.ctypes.data,
            len(columns),
            head.config.target_width,
            head.target_norm_eps,
            self._pairs,
        )

    def prefill(self, ranges: list[PrefillRange]) -> None:
        """Store hidden states, keys and values of these positions."""
        found = self.pack(ranges)  # keeps the arrays alive during the call
        self._native.library.head_prefill(self._record, found.record)

    def pack(self, ranges: list[PrefillRange]) -> PrefillBuffers:
        """Return these positions in the library's layout. Lists, not arrays: mostly there are two or three."""
        tables = PrefillTables()
        for sequence, each in enumerate(ranges):
            # The slots of these positions and of the one before; the first position of a sequence has none before it.
            paired = max(each.start, 1)
            slots = slots_of(each.seq.pages, self._page_size, paired - 1, each.stop)
            if not self._tokens_only:
                tables.add_states(each, slots[each.start - paired + 1 :])
            if self._pairs:
                tables.add_pairs(sequence, each, paired, slots)
        numbers, addresses = pack_int64(tuple(vars(tables).values()))
        counts = (len(tables.states), len(tables.tokens))
        return PrefillBuffers(pack_record(HeadPrefillRecord, *addresses, *counts), numbers)


def addresses_of(rows: Tensor, begin: int, end: int) -> range:
    """Return the addresses of rows `begin` to `end`."""
    row_stride, column_stride = rows.stride()
    require(rows.dtype == torch.float32 and column_stride == 1, "float32 hidden states with contiguous rows")
    first, stride = rows.data_ptr(), row_stride * FLOAT_BYTES
    return range(first + begin * stride, first + end * stride, stride)


def _addresses(found: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(found))(*found)
