"""What a head keeps of places the target has run, by one call of the native library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.native.head_records import ReaderRecord, ReadingRecord
from foretell.kv.cache import slots_of
from foretell.models.heads import BlockHead, DistilledHead
from foretell.models.heads.layer import HeadLayer
from foretell.types import Sequence

from .native import laid_out
from .native_head import LaidOut, NativeHead, norm_address, weights_address

Tables = list[list[int]]


@dataclass(frozen=True)
class Reading:
    """Places that a head is to read: of one text those from `start` to `stop`, with the target's states there."""

    seq: Sequence
    start: int
    stop: int
    states: list[Tensor]  # [places, tapped layers * width], in pieces

    def rows(self) -> list[int]:
        """Where each place's states lie in memory."""
        found: list[int] = []
        for piece in self.states:
            assert piece.dtype == torch.float32 and piece.stride(1) == 1, "rows as the library reads them"
            first, apart = piece.data_ptr(), piece.stride(0) * piece.itemsize
            found += range(first, first + len(piece) * apart, apart)
        return found


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
        found = self.laid_out(readings)  # for as long as the library reads it
        self._native.library.read(self._record, found.record)

    def laid_out(self, readings: list[Reading]) -> LaidOut:
        """These places as the library wants them. Lists, not arrays: as a rule there are two or three of them."""
        tables = (*self._state_tables(readings), *self._pair_tables(readings))
        numbers, addresses = laid_out(tables)
        return LaidOut(ReadingRecord(*addresses, len(tables[0]), len(tables[3])), numbers)

    def _state_tables(self, readings: list[Reading]) -> Tables:
        """Where the states lie, the slots they are for, and the places."""
        if self._tokens_alone:
            return [[]] * 3
        spans = [(each.seq.pages, each.start, each.stop) for each in readings]
        states = [row for each in readings for row in each.rows()]
        return [states, self._slots(spans), [place for _, start, stop in spans for place in range(start, stop)]]

    def _pair_tables(self, readings: list[Reading]) -> Tables:
        """Tokens, the slots before them and their own, places; all pages, where each text's begin, whose a pair is."""
        if not self._pairs:
            return [[]] * 7
        # The first place of a text has nothing before it.
        spans = [(each.seq.pages, max(each.start, 1), each.stop) for each in readings]
        texts = [each.seq.tokens for each in readings]
        return [
            [token for tokens, (_, start, stop) in zip(texts, spans, strict=True) for token in tokens[start:stop]],
            self._slots([(pages, start - 1, stop - 1) for pages, start, stop in spans]),
            self._slots(spans),
            [place for _, start, stop in spans for place in range(start, stop)],
            [page for pages, _, _ in spans for page in pages],
            list(accumulate((len(pages) for pages, _, _ in spans[:-1]), initial=0)),
            [text for text, (_, start, stop) in enumerate(spans) for _ in range(start, stop)],
        ]

    def _slots(self, spans: list[tuple[list[int], int, int]]) -> list[int]:
        """Of places of texts with such pages."""
        return [slot for pages, start, stop in spans for slot in slots_of(pages, self._page_size, start, stop)]


def _addresses(found: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(found))(*found)
