"""What a head keeps of places the target has run, by one call of the native library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.kernels.native.head_records import ReaderRecord, ReadingRecord
from foretell.models.heads import BlockHead, DistilledHead
from foretell.models.heads.layer import HeadLayer
from foretell.types import Sequence

from .native_head import LaidOut, NativeHead, norm_address, weights_address

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """Places that a head is to read: of one text those from `start` to `stop`, with the target's states there."""

    seq: Sequence
    start: int
    stop: int
    states: list[Tensor]  # [places, tapped layers * width], in pieces

    def slots(self, page_size: int, start: int, stop: int) -> Whole:
        """Of some places of the text."""
        places = np.arange(start, stop)
        slots: Whole = np.array(self.seq.pages, np.int64)[places // page_size] * page_size + places % page_size
        return slots

    def rows(self) -> Whole:
        """Where each place's states lie in memory."""
        found = [t.data_ptr() + np.arange(len(t)) * (t.stride(0) * t.itemsize) for t in self.states]
        return found[0] if len(found) == 1 else np.concatenate(found)


class NativeReader:
    """Reads for a head whose guesses `native` makes; `columns` are where its taps begin among all that is tapped."""

    def __init__(self, native: NativeHead, features: Tensor | None, columns: list[int]) -> None:
        head: Any = native.head
        self._native, self._page_size = native, native.page_size
        self._pairs, self._tokens_alone = not isinstance(head, BlockHead), isinstance(head, DistilledHead)
        layers = [layer for layer in head.modules() if isinstance(layer, HeadLayer)]
        self._keeps = _addresses([weights_address(layer.attention.kv) for layer in layers])
        norms = [norm_address(norm) for norm in getattr(head, "tap_norms", ())]
        self._norms, self._columns = _addresses(norms), np.array(columns, np.int64)
        joins = native.record.join is not None  # then what it joins is no feature of several taps
        self._held = (features, head.tap_norm)
        self._record = ReaderRecord(
            native.record,
            ctypes.addressof(self._keeps),
            None if joins else weights_address(getattr(head, "fc", None)),
            head.tap_norm.data_ptr() if head.config.target_norm else None,
            ctypes.addressof(self._norms) if norms else None,
            norm_address(getattr(head, "fc_norm", None)),
            None if self._pairs else norm_address(head.feature_norm),
            None if features is None else features.data_ptr(),
            self._columns.ctypes.data,
            len(columns),
            head.config.target_width,
            head.tap_eps,
            self._pairs,
        )

    def read(self, readings: list[Reading]) -> None:
        """Keep what these places are to be remembered by."""
        laid_out = self.laid_out(readings)  # for as long as the library reads it
        self._native.library.read(self._record, laid_out.record)

    def laid_out(self, readings: list[Reading]) -> LaidOut:
        """These places as the library wants them."""
        tables = [*self._state_tables(readings), *self._pair_tables(readings)]
        addresses = (table.ctypes.data for table in tables)
        return LaidOut(ReadingRecord(*addresses, len(tables[0]), len(tables[3])), tables)

    def _state_tables(self, readings: list[Reading]) -> list[Whole]:
        """Where the states lie, the slots they are for, and the places."""
        if self._tokens_alone:
            return [np.zeros(0, np.int64)] * 3
        assert all(t.dtype == torch.float32 and t.stride(1) == 1 for each in readings for t in each.states), "rows"
        states = np.concatenate([each.rows() for each in readings])
        slots = np.concatenate([each.slots(self._page_size, each.start, each.stop) for each in readings])
        return [states, slots, np.concatenate([np.arange(each.start, each.stop) for each in readings])]

    def _pair_tables(self, readings: list[Reading]) -> list[Whole]:
        """Tokens, the slots before them and their own, places; all pages, where each text's begin, whose a pair is."""
        if not self._pairs:
            return [np.zeros(0, np.int64)] * 7
        size = self._page_size
        spans = [(each, max(each.start, 1), each.stop) for each in readings]  # the first place has nothing before it
        counts = np.array([len(each.seq.pages) for each in readings], np.int64)
        return [
            np.array([token for each, start, stop in spans for token in each.seq.tokens[start:stop]], np.int64),
            np.concatenate([each.slots(size, start - 1, stop - 1) for each, start, stop in spans]),
            np.concatenate([each.slots(size, start, stop) for each, start, stop in spans]),
            np.concatenate([np.arange(start, stop) for _, start, stop in spans]),
            np.array([page for each in readings for page in each.seq.pages], np.int64),
            np.cumsum(counts) - counts,
            np.repeat(np.arange(len(spans)), [max(stop - start, 0) for _, start, stop in spans]),
        ]


def _addresses(found: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(found))(*found)
