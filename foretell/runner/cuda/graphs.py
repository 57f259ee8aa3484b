"""CUDA graphs by shape: when a shape is captured, which captured shape serves another one, and the capture itself."""

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
from foretell.utils.system import without_gc

LOG = logging.getLogger("foretell")
CAPTURE_AFTER = 64  # runs in which a larger graph served a shape, before the shape gets a graph of its own
MAX_CAPTURE_TIME = 0.01  # share of the time that captures of one cache may take while requests are running
CAPTURE_BACKOFF = 64  # captures skipped after one that ran out of memory

_CAPTURE_NOW = ContextVar("capture_now", default=False)  # per thread
_NO_CAPTURE = ContextVar("no_capture", default=False)  # per thread


class Paddable(Hashable, Protocol):
    """A shape that work can be padded to."""

    def covers(self, other: Any) -> bool:
        """Return whether work of the other shape can be padded to this one without costing many times as much."""

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Return a key that orders shapes by the time they take, the most important size first."""


Shape = TypeVar("Shape", bound=Paddable)
Graph = TypeVar("Graph")
Result = TypeVar("Result")


@contextmanager
def capture_now() -> Iterator[None]:
    """Capture every shape that runs in this context at once: no request is waiting. Used by warm-up."""
    before = _CAPTURE_NOW.set(True)
    try:
        yield
    finally:
        _CAPTURE_NOW.reset(before)


@contextmanager
def no_capture() -> Iterator[None]:
    """Capture nothing in this context. During a capture no other thread could free device memory."""
    before = _NO_CAPTURE.set(True)
    try:
        yield
    finally:
        _NO_CAPTURE.reset(before)


class TimingGuard:
    """Learns whether the work in its context was an outlier: captured, or run eagerly for the first time.

    Such a run takes longer than the following ones, so its time must not enter the cost model.
    """

    is_outlier = False

    def __enter__(self) -> TimingGuard:
        self._before = _TIMING_GUARD.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _TIMING_GUARD.reset(self._before)


_TIMING_GUARD: ContextVar[TimingGuard | None] = ContextVar("timing_guard", default=None)


def mark_outlier() -> None:
    """Mark the work in the innermost `TimingGuard` as an outlier."""
    if (guard := _TIMING_GUARD.get()) is not None:
        guard.is_outlier = True


class CapturePolicy(Generic[Shape, Graph]):
    """The captured graphs of one kind of work, and the policy for capturing more.

    Which graph runs depends on the shapes requested before, never on draft or sampled tokens, and changes only the
    time it takes.
    """

    def __init__(self, allow_larger: bool = True, clock: Callable[[], float] = perf_counter) -> None:
        """`allow_larger`: a graph may serve smaller shapes.

        It is False with tensor parallelism: all ranks have to capture the same shape in the same step, and only the
        first rank knows whether a request is waiting.
        """
        self.graphs: dict[Shape, Graph | None] = {}  # None: the shape ran once, eagerly
        self.requests: Counter[Shape] = Counter()  # runs of a shape that a larger graph served
        self._allow_larger, self._clock = allow_larger, clock
        self._serves: dict[Shape, Shape] = {}
        self._next_capture = 0.0  # clock time

    def select(self, requested: Shape) -> Shape:
        """Return the shape to run: the requested one, or the cheapest captured one that covers it.

        So a request waits for a capture only if no graph covers its shape, or if the shape came up often enough.
        """
        if not self._allow_larger or self.graphs.get(requested) is not None or _CAPTURE_NOW.get():
            return requested
        found = self._serves.get(requested)
        if found is None or self.graphs.get(found) is None:
            covering = [shape for shape, graph in self.graphs.items() if graph is not None and shape.covers(requested)]
            if not covering:
                return requested
            found = self._serves[requested] = min(covering, key=lambda shape: shape.padded_size)
        self.requests[requested] += 1
        is_due = self.requests[requested] >= CAPTURE_AFTER and self._clock() >= self._next_capture
        return requested if is_due else found

    def should_capture(self, shape: Shape) -> bool:
        """Return whether a shape that runs eagerly now is captured too: warm-up, a second run, or many requests."""
        return (
            (self._allow_larger and _CAPTURE_NOW.get()) or shape in self.graphs or self.requests[shape] >= CAPTURE_AFTER
        )

    def add(self, shape: Shape, graph: Graph | None, began: float) -> None:
        """Record an eager run that began at `began`, and the graph if one was captured."""
        self.graphs[shape] = graph
        if graph is not None:
            self._serves.clear()
        if self.requests.pop(shape, 0) or graph is not None:
            now = self._clock()
            self._next_capture = now + (now - began) / MAX_CAPTURE_TIME


class GraphCapture:
    """Captures CUDA graphs that share one memory pool: an output is valid until the next graph is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failures = 0
        self._skip = 0  # captures still to be skipped
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result] | None:
        """Capture `run`, without running it, and return the graph and the tensors it writes its result to.

        Returns None if device memory is short: the work stays eager, and is tried again `CAPTURE_BACKOFF` times later.
        """
        if _NO_CAPTURE.get():
            return None
        if self._skip:
            self._skip -= 1
            return None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would collect garbage and empty the cache each time
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except RuntimeError as error:
                self._abort(graph)
                if not is_oom(error):
                    raise
                return None
        return graph, result

    def renew_pool(self) -> None:
        """Take a new memory pool: a pool that no graph holds any more cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def _abort(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture; otherwise all later work would become part of it."""
        mark_outlier()
        self.failures += 1
        self._skip = CAPTURE_BACKOFF
        LOG.warning("CUDA graph capture failed, the step runs without one; %d failures so far", self.failures)
        try:
            graph.capture_end()
        except RuntimeError:  # the device ended the capture already, but torch's allocator still allocates to the pool
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            with suppress(RuntimeError):  # raised if `capture_end` itself failed: then the allocator knows
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            self.renew_pool()


class GraphCache(Generic[Shape, Result]):
    """Runs work that reads and writes the same memory each time: eagerly first, later by replaying its CUDA graph.

    On other devices the work always runs eagerly. A result is valid until the next call, since all graphs share their
    memory.
    """

    def __init__(self, device: torch.device, capture: GraphCapture | None = None, allow_larger: bool = True) -> None:
        """`capture` may be shared by several caches; `allow_larger`: see `CapturePolicy`."""
        self.device = device
        self.policy: CapturePolicy[Shape, tuple[torch.cuda.CUDAGraph, Result]] = CapturePolicy(allow_larger)
        self._own = GraphCapture(device) if capture is None and device.type == "cuda" else None
        self._capture = capture or self._own

    @property
    def graphs(self) -> dict[Shape, tuple[torch.cuda.CUDAGraph, Result] | None]:
        """Return the captured graphs by shape; None for a shape that ran once, eagerly."""
        return self.policy.graphs

    def select(self, requested: Shape) -> Shape:
        """Return the shape that work of the requested shape has to be padded to."""
        return self.policy.select(requested)

    def __call__(self, shape: Shape, run: Callable[[], Result], keep: bool = True) -> Result:
        """Return the result of `run`, which may depend only on `shape` and on what is in memory.

        `keep`: the work may be captured; a graph holds on to the memory it works with.
        """
        known = self.policy.graphs.get(shape)
        if known is not None:
            known[0].replay()
            return known[1]
        began = perf_counter()
        result = run()
        if self._capture is None or not keep:
            return result
        if self._own is not None and not any(self.graphs.values()):
            self._own.renew_pool()
        is_due = self.policy.should_capture(shape)
        with without_gc():  # destroying the graphs of an engine that is gone would end the capture
            captured = self._capture.capture(run) if is_due else None
        if captured is not None or not is_due:  # after a capture that failed the next run takes as long as this one
            mark_outlier()
        self.policy.add(shape, captured, began)
        return result
