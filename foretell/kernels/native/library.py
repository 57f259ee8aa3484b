"""The compiled library as Python sees it."""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .build import BuildError, built_library
from .head_records import (
    BlockChainRecord,
    BlockHeadRecord,
    HeadRecord,
    MedusaRecord,
    MedusaRowsRecord,
    ReaderRecord,
)
from .records import ModelRecord, StepRecord

LOG = logging.getLogger("foretell")
# How a row is drawn; `key` is what noise is made of.
DRAW = np.dtype([("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("key", "i8")])
SWITCH = "FORETELL_NATIVE"  # 0: do without


class Library:
    """Calls release Python's lock, and use as many threads as torch does."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.best_level: int = loaded.foretell_best_level()  # 2: AVX-512 VNNI, 1: AVX2, 0: neither
        self._linear = loaded.foretell_linear
        self._linear.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        self._linear.restype = None
        self._step = loaded.foretell_step
        self._step.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._step.restype = ctypes.c_bool
        self._top = loaded.foretell_top
        self._top.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
        self._top.restype = None
        self._choose = loaded.foretell_choose
        self._choose.argtypes = (*self._top.argtypes[:3], ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._choose.restype = None
        self._odds = loaded.foretell_odds
        self._odds.argtypes = (*self._choose.argtypes[:5], ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_int)
        self._odds.restype = None
        self._chain, self._blocks = loaded.foretell_chain, loaded.foretell_blocks
        for guess in (self._chain, self._blocks):
            guess.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
            guess.restype = ctypes.c_int64
        self._read, self._medusa = loaded.foretell_read, loaded.foretell_medusa
        for work in (self._read, self._medusa):
            work.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
            work.restype = None

    def linear(self, weights: int, x: Tensor, outputs: int) -> Tensor:
        """x [rows, in], float32 on a CPU, times the weights whose record is at that address."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], outputs)
        self._linear(weights, x.data_ptr(), x.shape[0], y.data_ptr(), torch.get_num_threads())
        return y

    def step(self, model: ModelRecord, step: array[int]) -> None:
        """All layers and the head over a step's rows; results go where `step`, a StepRecord, says."""
        if not self._step(ctypes.addressof(model), step.buffer_info()[0], torch.get_num_threads()):
            rows = StepRecord.from_buffer(step).rows
            raise MemoryError(f"a step of {rows} rows does not fit in memory; lower max_num_batched_tokens")

    def chain(self, head: HeadRecord, chain: array[int]) -> int:
        """One guess of a head after another; results go where `chain`, a ChainRecord, says. How many were made for the
        longest."""
        made: int = self._chain(ctypes.addressof(head), chain.buffer_info()[0], torch.get_num_threads())
        return made

    def blocks(self, head: BlockHeadRecord, asked: BlockChainRecord) -> int:
        """The guesses of a block head; results go where `asked` says."""
        return int(self._blocks(ctypes.addressof(head), ctypes.addressof(asked), torch.get_num_threads()))

    def read(self, reader: ReaderRecord, reading: array[int]) -> None:
        """Keep what a head is to remember of places the target has run, a ReadingRecord."""
        self._read(ctypes.addressof(reader), reading.buffer_info()[0], torch.get_num_threads())

    def medusa(self, head: MedusaRecord, rows: MedusaRowsRecord) -> None:
        """All guesses of Medusa heads; results go where `rows` says."""
        self._medusa(ctypes.addressof(head), ctypes.addressof(rows), torch.get_num_threads())

    def top(self, x: Tensor, count: int) -> list[list[int]]:
        """Where the `count` largest of each row of x [rows, width] are, float32 on a CPU, best first; at most 64."""
        x, (rows, width) = x.contiguous(), x.shape
        found = array("q", bytes(8 * rows * count))
        self._top(x.data_ptr(), rows, width, count, found.buffer_info()[0])
        ids = found.tolist()
        return [ids[first : first + count] for first in range(0, rows * count, count)]

    def choose(self, x: Tensor, draws: bytes) -> list[int]:
        """A token for each row of x [rows, width], float32 on a CPU, by `draws`, a DRAW for each; -1: there is none."""
        x, (rows, width) = x.contiguous(), x.shape
        assert len(draws) == rows * DRAW.itemsize, "each row is drawn"
        ids = array("q", bytes(8 * rows))
        self._choose(x.data_ptr(), rows, width, draws, ids.buffer_info()[0], torch.get_num_threads())
        return ids.tolist()

    def odds(self, x: Tensor, ids: Tensor, draws: bytes, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` tokens that are farthest ahead in the race of each row of x [rows, width], float32 on a CPU, best
        first, and their shares: x are the scores of the tokens `ids`, `draws` a DRAW for each row. At most 64."""
        x, (rows, width) = x.contiguous(), x.shape
        assert len(draws) == rows * DRAW.itemsize, "each row is drawn"
        assert ids.dtype == torch.int64 and ids.is_contiguous() and len(ids) == width, "a token for each score"
        tokens, shares = array("q", bytes(8 * rows * count)), array("f", bytes(4 * rows * count))
        places = (tokens.buffer_info()[0], shares.buffer_info()[0])
        self._odds(x.data_ptr(), rows, width, draws, ids.data_ptr(), count, *places, torch.get_num_threads())
        starts = range(0, rows * count, count)
        return [tokens[i : i + count].tolist() for i in starts], [shares[i : i + count].tolist() for i in starts]


@cache
def library() -> Library | None:
    """The library, compiled if need be. None where that cannot be done, which is said once, or is not wanted."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return Library(str(built_library()))
    except (BuildError, OSError) as error:
        LOG.warning("no native kernels, steps will be slower: %s (%s=0 says it is no matter)", error, SWITCH)
        return None
