"""Work of fixed sizes on a CUDA device: run plainly, recorded when that is worth it, and replayed from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import perf_counter
from typing import Generic, TypeVar

import torch

from foretell.kv.shortage import lacks_memory

from .stock import Sizes, Stock, note_odd

LOG = logging.getLogger("foretell")
REST = 64  # recordings that are not tried after one for which memory did not suffice

PLAINLY = ContextVar("PLAINLY", default=False)  # of a thread

Result = TypeVar("Result")


@contextmanager
def plainly() -> Iterator[None]:
    """Nothing is recorded in here: meanwhile no other thread could give memory back."""
    before = PLAINLY.set(True)
    try:
        yield
    finally:
        PLAINLY.reset(before)


class Capture:
    """Makes graphs that share their memory: what one leaves there is good until the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failures = 0
        self._rest = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result] | None:
        """The graph of `run` and where it leaves what it gives; it is not run here. None where memory is short: what
        ran plainly goes on plainly, and is tried again after a while."""
        if PLAINLY.get():
            return None
        if self._rest:
            self._rest -= 1
            return None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._aside):  # torch.cuda.graph would collect garbage and empty the cache each time
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = run()
                graph.capture_end()
            except RuntimeError as error:
                self._abandon(graph)
                if not lacks_memory(error):
                    raise
                return None
        return graph, found

    def renew(self) -> None:
        """Take other memory: what no graph holds any more cannot be taken up again."""
        self._pool = torch.cuda.graph_pool_handle()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave a recording that failed: else all that comes would be taken for a part of it."""
        note_odd()
        self.failures += 1
        self._rest = REST
        LOG.warning("a step could not be recorded, and goes on without; %d times so far", self.failures)
        try:
            graph.capture_end()
        except RuntimeError:  # the device gave it up already, and torch stops there: its allocator is still recording
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            with suppress(RuntimeError):  # where it was the end that failed, it knows
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            self.renew()


class Recorder(Generic[Sizes, Result]):
    """Runs what reads and writes the same memory each time. Where there is no such device, plainly every time.

    What it returns is good until the next call: all graphs share their memory.
    """

    def __init__(self, device: torch.device, capture: Capture | None = None, shares: bool = True) -> None:
        """`capture`: one that others have, too. `shares`: whether a recording may serve for smaller sizes."""
        self.device = device
        self.stock: Stock[Sizes, tuple[torch.cuda.CUDAGraph, Result]] = Stock(shares)
        self._own = Capture(device) if capture is None and device.type == "cuda" else None
        self._capture = capture or self._own

    @property
    def recordings(self) -> dict[Sizes, tuple[torch.cuda.CUDAGraph, Result] | None]:
        """None: it ran once."""
        return self.stock.kept

    def serving(self, wanted: Sizes) -> Sizes:
        """The sizes that work of these is to be filled up to."""
        return self.stock.serving(wanted)

    def __call__(self, sizes: Sizes, run: Callable[[], Result], keep: bool = True) -> Result:
        """What `run` gives, which hangs on `sizes` and on what lies in memory, and on nothing else.

        `keep`: whether it may be recorded; a graph holds on to the memory it works with.
        """
        known = self.stock.kept.get(sizes)
        if known is not None:
            known[0].replay()
            return known[1]
        began = perf_counter()
        found = run()
        if self._capture is None or not keep:
            return found
        if self._own is not None and not any(self.recordings.values()):
            self._own.renew()
        is_due = self.stock.is_due(sizes)
        recorded = self._capture(run) if is_due else None
        if recorded is not None or not is_due:  # where memory is short, it takes as long again
            note_odd()
        self.stock.keep(sizes, recorded, began)
        return found
