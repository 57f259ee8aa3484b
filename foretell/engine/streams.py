"""Values and calls that pass from the engine's thread to the callers on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import ForetellError

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState
    from foretell.types import Delta, Request, StepTimes

# Items after which a caller without `wants_deltas` is woken: handling all of them at the end would block the loop.
MAX_BUFFERED_ITEMS = 256
MAX_PENDING_CALLS = 32  # calls that are not urgent, after which the event loop is woken nevertheless


class Unavailable(ForetellError):
    """New requests are refused; a retry after `retry_after` seconds may succeed."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Unavailable):
    """The limit of running and waiting sequences is reached."""


class StepFailed(ForetellError):
    """A sequence's step failed when it ran alone; the others of its batch are not affected."""


@dataclass(frozen=True)
class StepTiming:
    """The end of a step, the time of its parts, and the number of its sequences and tokens."""

    ended_at: float  # by perf_counter
    seconds: float
    times: StepTimes
    rows: int  # tokens the target ran: prompt, decode and draft tokens; 0 if the step failed and was recovered
    num_sequences: int  # that got output tokens
    num_drafted: int  # draft tokens of these sequences
    context_tokens: int  # tokens of these sequences, summed

    @property
    def is_decode_only(self) -> bool:
        """Return whether the step ran no prefill, so that it can be compared with a plain step."""
        return self.num_sequences > 0 and self.rows == self.num_sequences + self.num_drafted

    @property
    def host_seconds(self) -> float:
        """Return the time spent neither on drafting nor in the target; a plain step would take it too."""
        return self.seconds - self.times.draft_seconds - self.times.target_seconds


@dataclass(frozen=True)
class StreamItem:
    """The output that one step added to one sequence. `state` is safe to read once `delta.finish_reason` is set."""

    delta: Delta
    state: SequenceState
    is_first: bool  # whether these are the sequence's first output tokens
    timing: StepTiming | None = None  # of the step, if it was measured


@dataclass(frozen=True)
class Load:
    """The load of an engine: running and waiting sequences and KV usage."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_held: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class StepReport:
    """A finished step, and the engine's load after it."""

    items: tuple[StreamItem, ...]
    timing: StepTiming
    load: Load
    drafters: dict[str, tuple[int, int]]  # draft tokens and accepted draft tokens by drafter, since the start


@dataclass(eq=False)
class Stream:
    """The items of one caller's sequences, interleaved as they are generated. `close` aborts them."""

    requests: list[Request]
    wants_deltas: bool = True  # False: the caller waits for the end, and items may be buffered
    close: Callable[[], None] = lambda: None
    # Handles an item at once while the caller waits in `next_items`; returns False if it cannot.
    on_item: Callable[[StreamItem], bool] = lambda item: False
    unfinished: int = 0
    timer: asyncio.TimerHandle | None = None  # fails the stream at its timeout

    def __post_init__(self) -> None:
        self.unfinished = len(self.requests)
        self.request_ids = tuple(dict.fromkeys(request.id for request in self.requests))
        self._items: list[StreamItem] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None  # its result: whether there is something to return
        self._handled_at = 0.0  # loop time of the last item that `on_item` took

    def put(self, item: StreamItem) -> None:
        """Add an item; `unfinished` already counts it."""
        waiter = self._waiter
        if item.delta.finish_reason is None and waiter is not None and not waiter.done():  # no item is queued before it
            try:
                if self.on_item(item):
                    self._handled_at = waiter.get_loop().time()
                    return
            except Exception as error:  # affects this caller only
                self.fail(error)
                return
        self._items.append(item)
        if (
            self.wants_deltas
            or not self.unfinished
            or item.delta.finish_reason == "error"
            or len(self._items) >= MAX_BUFFERED_ITEMS
        ):
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until `next_items` has something to return; return False after `seconds` without an item."""
        if self._items or self._failure is not None or not self.unfinished:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter, began = waiter, loop.time()
        timer: asyncio.TimerHandle | None = None

        def give_up() -> None:
            nonlocal timer
            due = max(began, self._handled_at) + (seconds or 0.0)
            if due > loop.time():
                timer = loop.call_at(due, give_up)
            elif not waiter.done():
                waiter.set_result(False)

        if seconds is not None:
            timer = loop.call_later(seconds, give_up)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()

    async def next_items(self) -> list[StreamItem]:
        """Return the items since the last call, or wait for the next; empty when every sequence has finished.

        A failure is raised after the items that came before it.
        """
        await self.wait()
        items, self._items = self._items, []
        if not items and self._failure is not None:
            raise self._failure
        return items

    async def items(self) -> AsyncGenerator[StreamItem, None]:
        """Yield items until every sequence has finished; raise a failure. Leaving early aborts the sequences."""
        try:
            while items := await self.next_items():
                for item in items:
                    yield item
        finally:
            self.close()


class LoopCalls:
    """A queue of calls from the engine's thread to the event loop, which makes them in order.

    The loop is woken once for all queued calls. Calls that are not urgent do not wake it; they go with the next urgent
    one.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop; before the first `put`."""
        self._loop = loop

    def put(self, call: Callable[[], None], urgent: bool = True) -> None:
        """Queue a call from the engine's thread; raise RuntimeError if the loop has closed."""
        self._calls.append(call)
        if urgent or len(self._calls) >= MAX_PENDING_CALLS:
            self._wake()

    def deliver(self) -> None:
        """Make all queued calls, on the loop."""
        self._woken = False  # first: a call that is queued meanwhile is made now or wakes the loop again
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:  # a call failed; make the others nevertheless
                self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)
