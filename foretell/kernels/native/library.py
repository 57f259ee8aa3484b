"""The compiled library as Python sees it."""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounds import require
from .build import BuildError, build_library
from .records import (
    BlockDraftRecord,
    BlockHeadRecord,
    HeadPrefillRecord,
    HeadRecord,
    MedusaDraftRecord,
    MedusaRecord,
    ModelRecord,
    PrefillHeadRecord,
    StepRecord,
)

LOG = logging.getLogger("foretell")
# How a row is drawn; `key` is what noise is made of.
SAMPLING_ROW = np.dtype([("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("key", "i8")])
NATIVE_VARIABLE = "FORETELL_NATIVE"  # 0: do without
OUT_OF_MEMORY = -1  # `foretell::kNoMemory`: what an entry point returns when an allocation failed
MAX_TOPK = 64  # `kMost` in top.cpp


class Library:
    """Calls release Python's lock, and use as many threads as torch does."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.best_level: int = loaded.foretell_best_level()  # 2: AVX-512 VNNI, 1: AVX2, 0: neither
        pointer, number, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        rows = (pointer, number, number)  # floats, rows, width
        work = (pointer, pointer, count)  # a model or head, what it is to do, threads
        self._linear = _entry(loaded.foretell_linear, pointer, pointer, number, pointer, count)
        self._top = _entry(loaded.foretell_top, *rows, count, pointer)
        self._choose = _entry(loaded.foretell_choose, *rows, pointer, pointer, count)
        self._odds = _entry(loaded.foretell_odds, *rows, pointer, pointer, count, pointer, pointer, count)
        self._step = _entry(loaded.foretell_step, *work)
        self._chain, self._blocks = _entry(loaded.foretell_chain, *work), _entry(loaded.foretell_blocks, *work)
        self._read, self._medusa = _entry(loaded.foretell_read, *work), _entry(loaded.foretell_medusa, *work)

    def linear(self, weights: int, x: Tensor, outputs: int) -> Tensor:
        """x [rows, in], float32 on a CPU, times the weights whose record is at that address."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], outputs)
        status = self._linear(weights, x.data_ptr(), x.shape[0], y.data_ptr(), torch.get_num_threads())
        if status:
            raise native_error(status, f"a linear layer over {x.shape[0]} rows")
        return y

    def forward(self, model: ModelRecord, step: array[int]) -> None:
        """All layers and the head over a step's rows; results go where `step`, a StepRecord, says."""
        status = self._step(ctypes.addressof(model), step.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"a step of {StepRecord.from_buffer(step).rows} rows")

    def draft_chain(self, head: HeadRecord, chain: array[int]) -> int:
        """One guess of a head after another; results go where `chain`, a ChainRecord, says. How many were made for the
        longest."""
        made: int = self._chain(ctypes.addressof(head), chain.buffer_info()[0], torch.get_num_threads())
        if made < 0:
            raise native_error(made, "the drafts of a head")
        return made

    def draft_blocks(self, head: BlockHeadRecord, asked: BlockDraftRecord) -> int:
        """The guesses of a block head; results go where `asked` says."""
        made: int = self._blocks(ctypes.addressof(head), ctypes.addressof(asked), torch.get_num_threads())
        if made < 0:
            raise native_error(made, f"block drafts for {asked.texts} sequences")
        return made

    def head_prefill(self, reader: PrefillHeadRecord, reading: array[int]) -> None:
        """Keep what a head is to remember of places the target has run, a ReadingRecord."""
        status = self._read(ctypes.addressof(reader), reading.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"a head's KV of {HeadPrefillRecord.from_buffer(reading).rows} positions")

    def draft_medusa(self, head: MedusaRecord, rows: MedusaDraftRecord) -> None:
        """All guesses of Medusa heads; results go where `rows` says."""
        status = self._medusa(ctypes.addressof(head), ctypes.addressof(rows), torch.get_num_threads())
        if status:
            raise native_error(status, f"Medusa drafts for {rows.texts} sequences")

    def topk(self, x: Tensor, count: int) -> list[list[int]]:
        """Where the `count` largest of each row of x [rows, width] are, float32 on a CPU, best first; at most 64."""
        x, (rows, width) = x.contiguous(), x.shape
        require(count <= min(width, MAX_TOPK), f"at most {MAX_TOPK} of {width} scores")
        found = array("q", bytes(8 * rows * count))
        status = self._top(x.data_ptr(), rows, width, count, found.buffer_info()[0])
        if status:
            raise native_error(status, f"the top {count} of {rows} rows")
        ids = found.tolist()
        return [ids[first : first + count] for first in range(0, rows * count, count)]

    def sample(self, x: Tensor, draws: bytes) -> list[int]:
        """A token for each row of x [rows, width], float32 on a CPU, by `draws`, a DRAW for each."""
        x, (rows, width) = x.contiguous(), x.shape
        require(len(draws) == rows * SAMPLING_ROW.itemsize, "one DRAW for each row")
        ids = array("q", bytes(8 * rows))
        status = self._choose(x.data_ptr(), rows, width, draws, ids.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"sampling {rows} rows of {width} scores")
        return ids.tolist()

    def race_topk(self, x: Tensor, ids: Tensor, draws: bytes, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` tokens that are farthest ahead in the race of each row of x [rows, width], float32 on a CPU, best
        first, and their shares: x are the scores of the tokens `ids`, `draws` a DRAW for each row. At most 64."""
        x, (rows, width) = x.contiguous(), x.shape
        require(len(draws) == rows * SAMPLING_ROW.itemsize, "one DRAW for each row")
        require(ids.dtype == torch.int64 and ids.is_contiguous() and len(ids) == width, "one token id for each score")
        require(count <= min(width, MAX_TOPK), f"at most {MAX_TOPK} of {width} scores")
        tokens, shares = array("q", bytes(8 * rows * count)), array("f", bytes(4 * rows * count))
        places = (tokens.buffer_info()[0], shares.buffer_info()[0])
        threads = torch.get_num_threads()
        status = self._odds(x.data_ptr(), rows, width, draws, ids.data_ptr(), count, *places, threads)
        if status:
            raise native_error(status, f"the odds of {rows} rows of {width} scores")
        starts = range(0, rows * count, count)
        return [tokens[i : i + count].tolist() for i in starts], [shares[i : i + count].tolist() for i in starts]


def _entry(function: Any, *types: Any) -> Any:
    """Declare an entry point: it returns a result of at least 0, or what `native_error` reads."""
    function.argtypes, function.restype = types, ctypes.c_int64
    return function


def native_error(status: int, what: str) -> Exception:
    """Return the exception for the negative result of an entry point."""
    if status == OUT_OF_MEMORY:
        return MemoryError(f"not enough memory for {what}; free memory or lower max_num_batched_tokens")
    return RuntimeError(f"native code failed in {what}")


@cache
def library() -> Library | None:
    """The library, compiled if need be. None where that cannot be done, which is said once, or is not wanted."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    try:
        return Library(str(build_library()))
    except (BuildError, OSError) as error:
        LOG.warning("no native kernels, steps will be slower: %s (%s=0 says it is no matter)", error, NATIVE_VARIABLE)
        return None
