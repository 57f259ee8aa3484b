"""What a head keeps of places the target has run, by one call of the native library."""

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
from foretell.runner.native.executor import in_a_row
from foretell.runner.native.head_draft import NativeHead, PrefillBuffers, norm_address, weights_address
from foretell.types import Sequence

FLOAT_BYTES = 4


@dataclass(frozen=True)
class PrefillRange:
    """Places that a head is to read: of one text those from `start` to `stop`, with the target's states there."""

    seq: Sequence
    start: int
    stop: int
    states: list[Tensor]  # [places, tapped layers * width], in pieces

    def rows(self) -> list[int]:
        """Where each place's states lie in memory."""
        found: list[int] = []
        for piece in self.states:
            found += addresses_of(piece, 0, len(piece))
        return found


@dataclass
class PrefillTables:
    """What `HeadPrefillRecord` points to: where states lie, the slots they are for, and the places; then of pairs
    tokens, the slots before them and their own, places; all pages, where each text's begin, whose a pair is."""

    states: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    first_pages: list[int] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)

    def add_states(self, reading: PrefillRange, slots: list[int]) -> None:
        self.states += reading.rows()
        self.slots += slots
        self.places += range(reading.start, reading.stop)

    def add_pairs(self, text: int, reading: PrefillRange, start: int, slots: list[int]) -> None:
        """`slots` begin with the one before `start`."""
        self.tokens += reading.seq.tokens[start : reading.stop]
        self.before += slots[:-1]
        self.own += slots[1:]
        self.at += range(start, reading.stop)
        self.first_pages.append(len(self.pages))
        self.pages += reading.seq.pages
        self.texts += repeat(text, reading.stop - start)


class NativePrefill:
    """Reads for a head whose guesses `native` makes; `columns` are where its taps begin among all that is tapped."""

    def __init__(self, native: NativeHead, features: Tensor | None, columns: list[int]) -> None:
        head: Any = native.head
        self._native, self._page_size = native, native.page_size
        self._pairs, self._tokens_alone = not isinstance(head, BlockHead), isinstance(head, DistilledHead)
        layers = [layer for layer in head.modules() if isinstance(layer, HeadLayer)]
        self._keeps = _addresses([weights_address(layer.attention.kv) for layer in layers])
        norms = [norm_address(norm) for norm in getattr(head, "tap_norms", ())]
        self._norms, self._columns = _addresses(norms), np.array(columns, np.int64)
        joins = native.record.fc is not None  # then `fc` does not project hidden layers
        self._held = (features, head.target_norm)
        self._record = PrefillHeadRecord(
            native.record,
            ctypes.addressof(self._keeps),
            None if joins else weights_address(getattr(head, "fc", None)),
            head.target_norm.data_ptr() if head.config.target_norm else None,
            ctypes.addressof(self._norms) if norms else None,
            norm_address(getattr(head, "fc_norm", None)),
            None if self._pairs else norm_address(head.feature_norm),
            None if features is None else features.data_ptr(),
            self._columns.ctypes.data,
            len(columns),
            head.config.target_width,
            head.target_norm_eps,
            self._pairs,
        )

    def read(self, readings: list[PrefillRange]) -> None:
        """Keep what these places are to be remembered by."""
        found = self.laid_out(readings)  # for as long as the library reads it
        self._native.library.head_prefill(self._record, found.record)

    def laid_out(self, readings: list[PrefillRange]) -> PrefillBuffers:
        """These places as the library wants them. Lists, not arrays: as a rule there are two or three of them."""
        tables = PrefillTables()
        for text, each in enumerate(readings):
            # The slots of these places and of the one before them; the first place of a text has nothing before it.
            paired = max(each.start, 1)
            slots = slots_of(each.seq.pages, self._page_size, paired - 1, each.stop)
            if not self._tokens_alone:
                tables.add_states(each, slots[each.start - paired + 1 :])
            if self._pairs:
                tables.add_pairs(text, each, paired, slots)
        numbers, addresses = in_a_row(tuple(vars(tables).values()))
        counts = (len(tables.states), len(tables.tokens))
        return PrefillBuffers(pack_record(HeadPrefillRecord, *addresses, *counts), numbers)


def addresses_of(rows: Tensor, begin: int, end: int) -> range:
    """Where each of them lies in memory, from one to another."""
    apart, beside = rows.stride()
    require(rows.dtype == torch.float32 and beside == 1, "float32 hidden states with contiguous rows")
    first, apart = rows.data_ptr(), apart * FLOAT_BYTES
    return range(first + begin * apart, first + end * apart, apart)


def _addresses(found: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(found))(*found)
