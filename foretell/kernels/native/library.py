"""Python interface of the compiled native library."""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounds import require
from .build import BuildError, build_library, find_prebuilt
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
# Sampling parameters of a row, `foretell::SamplingParams`; `key` is the noise key of `sampling.noise.keys`.
SAMPLING_ROW = np.dtype([("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("key", "i8")])
NATIVE_VARIABLE = "FORETELL_NATIVE"  # environment variable; 0 turns the library off
OUT_OF_MEMORY = -1  # `foretell::kNoMemory`: result of an entry point after a failed allocation
MAX_TOPK = 64  # `kMaxTopK` in topk.cpp
LEVELS = ("baseline", "AVX2", "AVX-512 VNNI")  # names of the results of `foretell_best_level`


class Library:
    """The entry points of the library. Calls release the GIL and use as many threads as torch does."""

    def __init__(self, path: str) -> None:
        self.path = path
        loaded = ctypes.CDLL(path)
        self.best_level: int = loaded.foretell_best_level()  # 2: AVX-512 VNNI, 1: AVX2, 0: neither
        pointer, number, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        rows = (pointer, number, number)  # scores, rows, width
        work = (pointer, pointer, count)  # model or head, request, threads
        self._linear = _entry(loaded.foretell_linear, pointer, pointer, number, pointer, count)
        self._topk = _entry(loaded.foretell_topk, *rows, count, pointer)
        self._sample = _entry(loaded.foretell_sample, *rows, pointer, pointer, count)
        self._race_topk = _entry(loaded.foretell_race_topk, *rows, pointer, pointer, count, pointer, pointer, count)
        self._forward = _entry(loaded.foretell_forward, *work)
        self._draft_chain = _entry(loaded.foretell_draft_chain, *work)
        self._draft_blocks = _entry(loaded.foretell_draft_blocks, *work)
        self._head_prefill = _entry(loaded.foretell_head_prefill, *work)
        self._draft_medusa = _entry(loaded.foretell_draft_medusa, *work)

    def linear(self, weights: int, x: Tensor, outputs: int) -> Tensor:
        """Multiply float32 rows x [rows, in] on the CPU by the weights whose record is at address `weights`."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], outputs)
        status = self._linear(weights, x.data_ptr(), x.shape[0], y.data_ptr(), torch.get_num_threads())
        if status:
            raise native_error(status, f"a linear layer over {x.shape[0]} rows")
        return y

    def forward(self, model: ModelRecord, step: array[int]) -> None:
        """Run all layers and the LM head; `step`, a StepRecord, has the addresses of inputs and results."""
        status = self._forward(ctypes.addressof(model), step.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"a step of {StepRecord.from_buffer(step).rows} rows")

    def draft_chain(self, head: HeadRecord, chain: array[int]) -> int:
        """Draft chains token by token; `chain` is a DraftChainRecord. Return the length of the longest chain."""
        made: int = self._draft_chain(ctypes.addressof(head), chain.buffer_info()[0], torch.get_num_threads())
        if made < 0:
            raise native_error(made, "the drafts of a head")
        return made

    def draft_blocks(self, head: BlockHeadRecord, request: BlockDraftRecord) -> int:
        """Draft blocks; `request` has the addresses of inputs and results. Return the length of the longest draft."""
        made: int = self._draft_blocks(ctypes.addressof(head), ctypes.addressof(request), torch.get_num_threads())
        if made < 0:
            raise native_error(made, f"block drafts for {request.sequences} sequences")
        return made

    def head_prefill(self, head: PrefillHeadRecord, prefill: array[int]) -> None:
        """Store the KV of a head for positions that the target has run; `prefill` is a HeadPrefillRecord."""
        status = self._head_prefill(ctypes.addressof(head), prefill.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"a head's KV of {HeadPrefillRecord.from_buffer(prefill).rows} positions")

    def draft_medusa(self, head: MedusaRecord, draft: MedusaDraftRecord) -> None:
        """Draft with Medusa heads; `draft` has the addresses of inputs and results."""
        status = self._draft_medusa(ctypes.addressof(head), ctypes.addressof(draft), torch.get_num_threads())
        if status:
            raise native_error(status, f"Medusa drafts for {draft.sequences} sequences")

    def topk(self, x: Tensor, count: int) -> list[list[int]]:
        """Return the indices of the `count` largest of each row of x [rows, width], float32, best first; at most 64."""
        x, (rows, width) = x.contiguous(), x.shape
        require(count <= min(width, MAX_TOPK), f"at most {MAX_TOPK} of {width} scores")
        found = array("q", bytes(8 * rows * count))
        status = self._topk(x.data_ptr(), rows, width, count, found.buffer_info()[0])
        if status:
            raise native_error(status, f"the top {count} of {rows} rows")
        ids = found.tolist()
        return [ids[first : first + count] for first in range(0, rows * count, count)]

    def sample(self, x: Tensor, sampling: bytes) -> list[int]:
        """Sample a token for each row of x [rows, width], float32; `sampling` has a SAMPLING_ROW for each."""
        x, (rows, width) = x.contiguous(), x.shape
        require(len(sampling) == rows * SAMPLING_ROW.itemsize, "one SAMPLING_ROW for each row")
        ids = array("q", bytes(8 * rows))
        status = self._sample(x.data_ptr(), rows, width, sampling, ids.buffer_info()[0], torch.get_num_threads())
        if status:
            raise native_error(status, f"sampling {rows} rows of {width} scores")
        return ids.tolist()

    def race_topk(
        self, x: Tensor, ids: Tensor, sampling: bytes, count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the top `count` tokens of each row in its exponential race and their probabilities; at most 64.

        x [rows, width], float32, are the scores of the tokens `ids`; `sampling` has a SAMPLING_ROW for each row.
        """
        x, (rows, width) = x.contiguous(), x.shape
        require(len(sampling) == rows * SAMPLING_ROW.itemsize, "one SAMPLING_ROW for each row")
        require(ids.dtype == torch.int64 and ids.is_contiguous() and len(ids) == width, "one token id for each score")
        require(count <= min(width, MAX_TOPK), f"at most {MAX_TOPK} of {width} scores")
        tokens, probs = array("q", bytes(8 * rows * count)), array("f", bytes(4 * rows * count))
        results = (tokens.buffer_info()[0], probs.buffer_info()[0])
        threads = torch.get_num_threads()
        status = self._race_topk(x.data_ptr(), rows, width, sampling, ids.data_ptr(), count, *results, threads)
        if status:
            raise native_error(status, f"the race of {rows} rows of {width} scores")
        starts = range(0, rows * count, count)
        return [tokens[i : i + count].tolist() for i in starts], [probs[i : i + count].tolist() for i in starts]


def _entry(function: Any, *types: Any) -> Any:
    """Declare an entry point, which returns a result of at least 0 or a code for `native_error`."""
    function.argtypes, function.restype = types, ctypes.c_int64
    return function


def native_error(status: int, what: str) -> Exception:
    """Return the exception for the negative result of an entry point."""
    if status == OUT_OF_MEMORY:
        return MemoryError(f"not enough memory for {what}; free memory or lower max_num_batched_tokens")
    return RuntimeError(f"native code failed in {what}")


@cache
def library() -> Library | None:
    """Return the library, from the package or compiled; None if it is off or cannot be built, which is logged once."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    try:
        return _load_prebuilt() or _load("compiled on this machine", build_library())
    except (BuildError, OSError) as error:
        LOG.warning("no native kernels, so steps are slower: %s (%s=0 silences this warning)", error, NATIVE_VARIABLE)
        return None


def _load_prebuilt() -> Library | None:
    path = find_prebuilt()
    if path is None:
        return None
    try:
        return _load("from the package", path)
    except OSError as error:  # it needs a newer C library than this system has
        LOG.info("the native library of the package cannot be loaded, so it is compiled here: %s", error)
        return None


def _load(origin: str, path: Path) -> Library:
    found = Library(str(path))
    LOG.info("native kernels: %s, %s", LEVELS[found.best_level], origin)
    return found
