"""Work of fixed sizes on a CUDA device: plain at first, recorded when it comes again, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Sizes = TypeVar("Sizes", bound=Hashable)
Result = TypeVar("Result")


class Recorder(Generic[Sizes, Result]):
    """Runs what reads and writes the same memory each time. Where there is no such device, plainly every time.

    What it returns is good until the next call: all graphs share their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: dict[Sizes, tuple[torch.cuda.CUDAGraph, Result] | None] = {}  # None: it ran once
        self._records = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        self._aside = torch.cuda.Stream(device) if self._records else None  # type: ignore[no-untyped-call]

    def __call__(self, sizes: Sizes, run: Callable[[], Result], keep: bool = True) -> Result:
        """What `run` gives, which hangs on `sizes` and on what lies in memory, and on nothing else.

        `keep`: whether it may be recorded; a graph holds on to the memory it works with.
        """
        known = self.recordings.get(sizes)
        if known is not None:
            known[0].replay()
            return known[1]
        found = run()
        again = sizes in self.recordings
        self.recordings[sizes] = self._record(run) if again and keep and self._records else None
        return found

    def _record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """The same once more, to be kept; it is not run here."""
        graph = torch.cuda.CUDAGraph()
        if not any(self.recordings.values()):
            self._pool = torch.cuda.graph_pool_handle()  # memory that no graph holds any more cannot be taken up again
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._aside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            found = run()
            graph.capture_end()
        return graph, found
