"""Work of fixed sizes on a CUDA device: run plainly, recorded when that is worth it, and replayed from then on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch

from foretell.errors import is_oom

OFTEN = 64  # times that sizes were wished for and others served, before they are worth a recording
SHARE = 0.01  # of the time, at most, that recordings of one kind take while texts are written

FREELY = ContextVar("FREELY", default=False)  # of a thread


class Paddable(Hashable, Protocol):
    """Sizes that work can be filled up to."""

    def covers(self, other: Any) -> bool:
        """Whether the work of the others can be done in these, and not at many times its price."""

    @property
    def price(self) -> tuple[int, ...]:
        """What tells which of two is cheaper to run, the dearest first."""


Sizes = TypeVar("Sizes", bound=Paddable)
Kept = TypeVar("Kept")


@contextmanager
def freely() -> Iterator[None]:
    """In here all sizes that come are recorded at once: nobody waits."""
    before = FREELY.set(True)
    try:
        yield
    finally:
        FREELY.reset(before)


class TimingGuard:
    """Hears of what happens in it: whether something took longer than it will take again, as it was recorded, or ran
    plainly and will be."""

    odd = False

    def __enter__(self) -> TimingGuard:
        self._before = WATCH.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        WATCH.reset(self._before)


WATCH: ContextVar[TimingGuard | None] = ContextVar("WATCH", default=None)


def note_odd() -> None:
    """Tell whoever watches."""
    if (watch := WATCH.get()) is not None:
        watch.odd = True


class GraphPool(Generic[Sizes, Kept]):
    """Recordings of one kind. Which of them does a piece of work hangs on what was asked for before, never on what is
    guessed or drawn, and changes nothing but the time it takes."""

    def __init__(self, shares: bool = True, clock: Callable[[], float] = perf_counter) -> None:
        """`shares`: whether one may serve for another. Where not, several processes record the same work at the same
        time, and whether anybody waits is known to one of them alone."""
        self.kept: dict[Sizes, Kept | None] = {}  # None: it ran once
        self.wishes: Counter[Sizes] = Counter()
        self._shares, self._clock = shares, clock
        self._serving: dict[Sizes, Sizes] = {}
        self._rests_until = 0.0

    def serving(self, wanted: Sizes) -> Sizes:
        """The sizes to be run: the wanted ones, or the cheapest that are recorded and cover them. So a text waits for a
        recording where nothing serves, and else no more often than it is worth."""
        if not self._shares or self.kept.get(wanted) is not None or FREELY.get():
            return wanted
        found = self._serving.get(wanted)
        if found is None or self.kept.get(found) is None:
            able = [sizes for sizes, kept in self.kept.items() if kept is not None and sizes.covers(wanted)]
            if not able:
                return wanted
            found = self._serving[wanted] = min(able, key=lambda sizes: sizes.price)
        self.wishes[wanted] += 1
        return wanted if self.wishes[wanted] >= OFTEN and self._clock() >= self._rests_until else found

    def is_due(self, sizes: Sizes) -> bool:
        """Whether what is run plainly now is to be recorded: nobody waits, it comes again, or it was wished for."""
        return (self._shares and FREELY.get()) or sizes in self.kept or self.wishes[sizes] >= OFTEN

    def keep(self, sizes: Sizes, kept: Kept | None, began: float) -> None:
        """What came of a plain run, and of a recording if it was due."""
        self.kept[sizes] = kept
        if kept is not None:
            self._serving.clear()
        if self.wishes.pop(sizes, 0) or kept is not None:
            now = self._clock()
            self._rests_until = now + (now - began) / SHARE


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
                if not is_oom(error):
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


class GraphCache(Generic[Sizes, Result]):
    """Runs what reads and writes the same memory each time. Where there is no such device, plainly every time.

    What it returns is good until the next call: all graphs share their memory.
    """

    def __init__(self, device: torch.device, capture: Capture | None = None, shares: bool = True) -> None:
        """`capture`: one that others have, too. `shares`: whether a recording may serve for smaller sizes."""
        self.device = device
        self.stock: GraphPool[Sizes, tuple[torch.cuda.CUDAGraph, Result]] = GraphPool(shares)
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
