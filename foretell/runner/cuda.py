"""Runs steps on a CUDA device: small ones as recorded graphs of a few sizes, large prompts kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.attention import Layout
from foretell.kernels.triton.finish import finish
from foretell.kernels.triton.tables import NO_PARTS, RowTables, Sizes, parts
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder

from .cuda_chain import ChainSizes, CudaChain
from .cuda_forward import CudaForward
from .cuda_passes import passes, readers, single
from .cuda_tables import Numbers, PageTable, Tiles, fill, make_tiles
from .executor import StepOutput
from .pack import Packed
from .recording import Capture

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)  # sizes steps are filled up to; more rows run unrecorded
KEYS = (512, 1024, 2048, 4096)  # contexts the grids are made for; behind, powers of two
DEEP = (8, 32, 256)  # levels that tables of trees have room for
LOW, HIGH, WHOLE = 16, 32, 64  # heights of a tile: for a few rows a sequence, for many, for prompts

Chains = tuple[list[list[int]], list[list[float]]]  # by sequence: tokens, and how sure the model was of each


@dataclass(frozen=True)
class Recording:
    """A graph, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    features: Tensor | None


class CudaExecutor:
    """What `EagerExecutor` defines. Logits are good until the next call."""

    def __init__(self, model: Decoder, cache: KVCache, layout: Layout) -> None:
        self.layout, self.vocab = layout, model.outputs
        self.forward = CudaForward(model, cache)
        self.context = max(len(table) for table in model.tables.values())
        most_pages = min(len(cache.keys[0]), -(-self.context // layout.page_size))
        self.pages = PageTable(ROWS[-1], most_pages, layout.device)
        room = Sizes(ROWS[-1], 2 * ROWS[-1], HIGH, 0, DEEP[-1], ROWS[-1]).numbers
        self._numbers = torch.zeros(room, dtype=torch.int32, device=layout.device)
        self._host = torch.zeros(room, dtype=torch.int32, pin_memory=layout.device.type == "cuda")
        self._host_numbers: Numbers = self._host.numpy()
        self._logits = torch.empty(0, self.vocab, device=layout.device)
        self._features: Tensor | None = None
        self._tokens = torch.zeros(ROWS[-1], dtype=torch.int32, pin_memory=layout.device.type == "cuda")
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._idle = True  # whether the host has seen the end of the last step
        self._recordings: dict[tuple[Sizes, tuple[int, ...]], Recording | None] = {}  # None: it ran once
        self._capture = Capture(layout.device)
        self.chains = CudaChain(self.forward, self.pages, ROWS[-1], layout.page_size, self._capture)

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        """In passes, so that the bits of what is written hang neither on prompts nor on how many write."""
        several = passes(packed, ROWS[-1])
        if len(several) == 1:
            return self._step(packed, taps)
        outputs = [_kept(self._step(some, taps)) for some in several]
        features = [output.features for output in outputs if output.features is not None]
        return StepOutput(torch.cat([output.logits for output in outputs]), torch.cat(features) if features else None)

    def _step(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        sizes, tiles = fit(packed, self.layout.share)
        if sizes.rows > ROWS[-1]:
            return self._run_unrecorded(packed, taps)
        self._send(packed, tiles, sizes)
        key = (sizes, taps)
        recording = self._recordings.get(key)
        if recording is None:
            logits, features = self._run(sizes, taps)
            if key in self._recordings:  # what comes twice will come again
                self._recordings[key] = self._record(sizes, taps)
            self._recordings.setdefault(key, None)
        else:
            recording.graph.replay()
            logits = recording.logits
            features = None if recording.features is None else recording.features.clone()
        count = len(packed.wanted)
        own = None if features is None else features[: packed.rows]
        return StepOutput(logits[:count], own, lambda: self._likeliest(count))

    def _likeliest(self, count: int) -> list[int]:
        """Of the last step; only now does the host wait for the device."""
        self._wait()
        tokens: list[int] = self._tokens[:count].tolist()
        return tokens

    def _wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self._idle:
            torch.cuda.current_stream(self.layout.device).synchronize()
            self._idle = True

    def chain(self, packed: Packed, steps: int, vocab: int) -> Chains | None:
        """After each sequence `steps` tokens, each the likeliest, and how sure the model was; None if it is too much.

        The spans hold all pages that their sequences may write to.
        """
        sizes, tiles = fit(packed, self.layout.share)
        if sizes.rows > ROWS[-1] or sizes.deep:
            return None
        self._wait()
        ends = [min(len(span.pages) * self.layout.page_size, self.context) for span in packed.spans]
        return self.chains(packed, tiles, fit_chain(packed, sizes, self.layout.share, steps, vocab), ends)

    def _send(self, packed: Packed, tiles: Tiles | None, sizes: Sizes) -> None:
        """Take the tables to where the kernels read them."""
        self._wait_for_tables()
        self.pages.update(packed.spans)
        fill(self._host_numbers, packed, tiles, sizes)
        self._numbers[: sizes.numbers].copy_(self._host[: sizes.numbers], non_blocking=True)
        self._sent.record()
        self._idle = False

    def _wait_for_tables(self) -> None:
        """Until those of the last pass have left; of a step that is over they have."""
        if not self._idle:
            self._sent.synchronize()

    def _run(self, sizes: Sizes, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        rows = RowTables.over(self._numbers, sizes, self.pages.device)
        logits, features = self.forward(rows, rows.wanted, taps)
        room = self._room(sizes.rows)
        finish(logits, room, self._tokens)
        return room, features

    def _room(self, rows: int) -> Tensor:
        """Where logits are left, in float32; recordings keep what they were made with."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self.vocab, device=self.layout.device)
        return self._logits[:rows]

    def _record(self, sizes: Sizes, taps: tuple[int, ...]) -> Recording | None:
        """The same step once more, to be kept: it writes what was just written. All graphs leave their results in the
        same places, which are not from the graphs' own memory: else each would hold on to some of that."""
        self._room(sizes.rows)
        if self._features is None or self._features.shape[1] != len(taps) * self.forward.model.config.width:
            width, dtype = len(taps) * self.forward.model.config.width, self.forward.model.dtype
            self._features = torch.empty(ROWS[-1], width, dtype=dtype, device=self.layout.device)
        left = self._features[: sizes.rows]

        def run() -> tuple[Tensor, Tensor | None]:
            logits, features = self._run(sizes, taps)
            return logits, None if features is None else left.copy_(features)

        recorded = self._capture(run)
        return None if recorded is None else Recording(recorded[0], *recorded[1])

    def _run_unrecorded(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        """A step too large to be recorded: tables of its own, one program for all keys of some rows."""
        height = max(WHOLE, _power(self.layout.share))
        tiles = make_tiles(packed, height // self.layout.share, whole=True)
        sizes = Sizes(packed.rows, len(tiles.together), height, NO_PARTS, _levels(tiles.deep), len(tiles.nodes))
        numbers = np.empty(sizes.numbers, np.int32)
        fill(numbers, packed, tiles, sizes)
        device = self.layout.device
        pages = self.pages
        if len(packed.spans) > ROWS[-1]:
            pages = PageTable(len(packed.spans), self.pages.device.shape[1], device)
        self._wait_for_tables()
        rows = RowTables.over(torch.from_numpy(numbers).to(device), sizes, pages.update(packed.spans))
        self._sent.record()
        self._idle = False
        logits, features = self.forward(rows, rows.wanted[: len(packed.wanted)], taps)
        return StepOutput(logits.float(), features)


def fit(packed: Packed, share: int) -> tuple[Sizes, Tiles | None]:
    """The sizes a step is filled up to, and its tiles; none where each sequence is one."""
    if single(packed):
        rows = next((size for size in ROWS if packed.rows <= size), packed.rows)
        keys = _keys(max([span.start for span in packed.spans]) + 1)
        return Sizes(rows, _power(packed.rows), max(LOW, _power(share)), parts(keys)), None
    rows = next((size for size in ROWS if packed.rows <= size), packed.rows)
    whole = all(readers(packed))
    low = max(LOW, _power(share))
    if whole:  # many rows: there the library's products add up alike, however many
        rows, height = max(rows, ROWS[-1]), max(WHOLE, _power(share))
    else:
        height = low if max(span.rows for span in packed.spans) <= low // share else max(HIGH, low)
    tiles = make_tiles(packed, height // share, whole)
    deep = _levels(tiles.deep)
    splits = NO_PARTS if whole else parts(_keys(max(span.stop for span in packed.spans)))
    nodes = min(rows, _power(len(tiles.nodes))) if deep else 0
    return Sizes(rows, _power(len(tiles.together)), height, splits, deep, nodes), tiles


def fit_chain(packed: Packed, first: Sizes, share: int, steps: int, vocab: int) -> ChainSizes:
    """The sizes of a chain's steps, behind a first one of these."""
    keys = _keys(max(span.stop for span in packed.spans) + steps)
    sequences = min(first.rows, _power(len(packed.spans)))  # the first step has a row for each
    return ChainSizes(first, max(LOW, _power(share)), parts(keys), sequences, steps, vocab)


def _kept(output: StepOutput) -> StepOutput:
    """What the next pass does not write over."""
    return replace(output, logits=output.logits.clone(), likeliest=None)


def _levels(deep: int) -> int:
    """What so many levels of a tree are filled up to."""
    return next((size for size in (0, *DEEP) if deep <= size), _power(deep))


def _keys(keys: int) -> int:
    """The context a grid is made for."""
    return next((size for size in KEYS if keys <= size), _power(keys))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
