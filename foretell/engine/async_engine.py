"""AsyncEngine: an engine in its own thread, for callers on an event loop, which a long step never blocks."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.engine.fault_isolation import is_healthy, recover
from foretell.engine.streams import (
    Load,
    LoopCalls,
    QueueFull,
    StepFailed,
    StepReport,
    StepTiming,
    Stream,
    StreamItem,
    Unavailable,
)
from foretell.errors import RankError
from foretell.types import StepTimes

if TYPE_CHECKING:
    from foretell.engine.engine import Engine
    from foretell.engine.sequence_state import SequenceState
    from foretell.sampling.grammar import Grammar
    from foretell.types import Delta, Request

LOG = logging.getLogger("foretell")
MAX_FAILED_STEPS = 3  # failed steps in a row without progress, after which the engine is shut down
RECENT_FINISHES = 64  # finished sequences from which their rate is estimated
MAX_RETRY_AFTER = 60  # seconds; upper bound of Retry-After

T = TypeVar("T")


def _raise(error: Exception) -> None:
    """Raise an error of another thread in the engine's own."""
    raise error


def _resolve(future: Future[T], do: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the caller was cancelled
    try:
        future.set_result(do())
    except Exception as error:
        future.set_exception(error)


class AsyncEngine:
    """Runs an engine in a thread. Commands reach it through an inbox between two steps; items return on the loop."""

    def __init__(
        self,
        engine: Engine,
        max_sequences: int,
        observe: Callable[[StepReport], None] = lambda report: None,
        while_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`max_sequences` limits running and waiting ones together.

        `observe` is called with the report of every step, on the loop. `while_idle` is called in the thread while there
        is nothing to generate; it does a piece of work about as long as a step and returns False when none is left.
        """
        self.engine = engine
        self.max_sequences = max_sequences
        self.observe = observe
        self.while_idle = while_idle
        self.load = self._load()
        self.num_sequences = 0  # not finished
        self.failure: str | None = None  # why the engine was shut down
        self.draining = False
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls = LoopCalls()
        self._commands: set[Future[Any]] = set()  # of `between_steps`, not done yet
        self._has_ended = False  # whether the thread has ended, as known on the loop
        self._streams: dict[str, Stream] = {}
        self._states: dict[tuple[str, int], SequenceState] = {}  # by request id and choice; only used in the thread
        self._idle = asyncio.Event()
        self._idle.set()
        self._finished_at: deque[float] = deque(maxlen=RECENT_FINISHES)
        self._busy_since: float | None = None  # start of the current step, command or idle work
        self._failures = 0  # failed steps in a row
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)

    # On the event loop.

    def start(self) -> None:
        """Start the thread; called from the loop that will make requests."""
        self._loop = asyncio.get_running_loop()
        self._calls.open(self._loop)
        self._thread.start()
        if self.engine.runner.workers is not None:
            self.engine.runner.workers.on_failure(lambda error: self._inbox.put(partial(_raise, error)))

    def submit(
        self,
        requests: list[Request],
        grammar: Grammar | None = None,
        timeout: float | None = None,
        wants_deltas: bool = True,
    ) -> Stream:
        """Queue the requests of one caller and return their stream; raise QueueFull if too many wait.

        Without `wants_deltas` the caller waits for the end, and the loop is not woken for every step.
        """
        self.check_open(len(requests))
        stream = Stream(requests, wants_deltas)
        stream.close = partial(self._close, stream)
        if timeout is not None:
            stream.timer = self._loop.call_later(timeout, self._deliver_failure, stream.request_ids[:1], TimeoutError())
        self._streams |= dict.fromkeys(stream.request_ids, stream)
        self.num_sequences += len(requests)
        self._idle.clear()
        self._inbox.put(partial(self._add, requests, grammar, time.perf_counter(), wants_deltas))
        return stream

    def deliver_pending(self) -> None:
        """Deliver the reports of all finished steps, including those that did not wake the loop."""
        self._calls.deliver()

    async def between_steps(self, do: Callable[[], T]) -> T:
        """Run `do` in the engine's thread before its next step and return the result; `Unavailable` if it has ended."""
        if self._has_ended:
            raise self._unavailable
        future: Future[T] = Future()
        self._commands.add(future)
        self._inbox.put(partial(_resolve, future, do))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._commands.discard(future)

    def check_open(self, num_sequences: int = 1) -> None:
        """Raise what `submit` would raise for so many sequences."""
        if self.failure is not None:
            raise Unavailable(f"the engine has failed: {self.failure}", MAX_RETRY_AFTER)
        if self.draining:
            raise Unavailable("the server is shutting down and accepts no new requests", MAX_RETRY_AFTER)
        if self.num_sequences + num_sequences > self.max_sequences:
            raise QueueFull(
                f"the queue is full: {self.num_sequences} sequences are running or waiting; retry later",
                self.retry_after,
            )

    @property
    def retry_after(self) -> int:
        """Return the seconds in which four sequences will finish, at the recent rate."""
        if len(self._finished_at) < 2:
            return 1
        interval = (time.monotonic() - self._finished_at[0]) / len(self._finished_at)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(interval * 4)))

    def stuck_for(self) -> float:
        """Return the seconds since the current step or command began; 0 while the thread waits for requests."""
        began = self._busy_since
        return 0.0 if began is None else time.monotonic() - began

    @property
    def has_died(self) -> bool:
        """Return whether the thread ended without being stopped."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stopped

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the running ones; return whether all finished in time."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Fail all streams and end the thread after its current step."""
        self.draining = True
        self._deliver_end(Unavailable("the server stopped", MAX_RETRY_AFTER))
        self._inbox.put(self._stop)  # after the aborts that free the pages
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, MAX_RETRY_AFTER)

    def _close(self, stream: Stream) -> None:
        """Abort the requests of a caller that has gone; their pages are free before the next step."""
        if self._forget(stream):
            self._inbox.put(partial(self._abort, stream.request_ids))

    def _forget(self, stream: Stream) -> bool:
        """Remove a stream and return whether it was still known."""
        known = [self._streams.pop(request_id, None) for request_id in stream.request_ids]
        self.num_sequences -= stream.unfinished
        stream.unfinished = 0
        if stream.timer is not None:
            stream.timer.cancel()
        if not self._streams:
            self._idle.set()
        return any(known)

    def _deliver(self, report: StepReport) -> None:
        self.load = report.load
        for item in report.items:
            stream = self._streams.get(item.delta.request_id)
            if stream is None:
                continue  # its caller has gone
            if item.delta.finish_reason is not None:
                stream.unfinished -= 1
                self.num_sequences -= 1
                self._finished_at.append(time.monotonic())
                if not stream.unfinished:
                    self._forget(stream)
            stream.put(item)
        self.observe(report)  # after the items, for which callers wait

    def _deliver_failure(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.fail(error)
                self._close(stream)

    def _deliver_end(self, error: Exception) -> None:
        self._deliver_failure(list(self._streams), error)

    def _deliver_thread_end(self) -> None:
        """Fail the commands that are left in the inbox."""
        self._has_ended = True
        for future in self._commands:
            if not future.done():
                future.set_exception(self._unavailable)

    @property
    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the engine has {'stopped' if self.failure is None else 'failed'}", MAX_RETRY_AFTER)

    def _deliver_load(self, load: Load) -> None:
        self.load = load

    # In the engine's thread.

    def _run(self) -> None:
        try:
            self.engine.runner.set_device()
            while not self._stopped:
                self._drain_commands()
                if self.engine.busy and not self._stopped:
                    self._timed(self._step)
        except BaseException as error:  # the failed requests could not be removed, or the thread must end
            LOG.exception("the engine is shut down")
            self._fail(error)
        finally:
            self._call_on_loop(self._deliver_thread_end)

    def _drain_commands(self) -> None:
        """Run the commands in the inbox; with nothing to generate, do idle work and wait for a command."""
        if not self.engine.busy:
            while self._inbox.empty() and self._idle_work():
                pass
            self._timed(self._inbox.get())
        while not self._inbox.empty():
            self._timed(self._inbox.get())

    def _timed(self, do: Callable[[], T]) -> T:
        """Run `do` and let `stuck_for` see when it began."""
        self._busy_since = time.monotonic()
        try:
            return do()
        finally:
            self._busy_since = None

    def _idle_work(self) -> bool:
        try:
            return self._timed(self.while_idle)
        except Exception:  # optional work must not fail a request
            LOG.exception("idle work failed and is disabled")
            self.while_idle = lambda: False
            return False

    def _step(self) -> None:
        stats = self.engine.stats
        rows, draft_seconds, target_seconds = stats.rows, stats.draft_seconds, stats.target_seconds
        began = time.monotonic()
        try:
            deltas = self.engine.step()
        except RankError:
            raise  # without all worker processes no sequence can run
        except Exception as error:
            self._isolate(error)
        else:
            self._failures = 0
            times = StepTimes(stats.draft_seconds - draft_seconds, stats.target_seconds - target_seconds)
            self._report(deltas, began, stats.rows - rows, times)

    def _report(self, deltas: list[Delta], began: float, rows: int = 0, times: StepTimes = StepTimes(0, 0)) -> None:
        """Send the deltas of a step to the loop; `times` is what is known of where its seconds went."""
        timing = StepTiming(
            ended_at=time.perf_counter(),
            seconds=time.monotonic() - began,
            times=times,
            rows=rows,
            num_sequences=len(deltas),
            num_drafted=sum(delta.num_drafted for delta in deltas),
            context_tokens=sum(len(self._states[delta.request_id, delta.choice].seq.tokens) for delta in deltas),
        )
        items = tuple(self._stream_item(delta, timing) for delta in deltas)
        counts = self.engine.stats.speculation.by_drafter.items()
        drafters = {name: (count.drafted, count.accepted) for name, count in counts}
        urgent = any(item.state.wants_deltas or item.delta.finish_reason is not None for item in items)
        self._call_on_loop(self._deliver, StepReport(items, timing, self._load(), drafters), urgent=urgent)

    def _stream_item(self, delta: Delta, timing: StepTiming) -> StreamItem:
        key = (delta.request_id, delta.choice)
        state = self._states[key]
        state.outbox.clear()  # the item carries the delta
        if delta.finish_reason is not None:
            del self._states[key]
        return StreamItem(delta, state, state.speculation.steps == 1, timing)

    def _add(self, requests: list[Request], grammar: Grammar | None, added: float, wants_deltas: bool) -> None:
        try:
            for request in requests:
                state = self._states[request.id, request.choice] = self.engine.add(request, grammar)
                state.timings.added = added  # includes the wait for the step that was running
                state.wants_deltas = wants_deltas
        except Exception as error:
            self._abort({request.id for request in requests})
            self._call_on_loop(self._deliver_failure, [requests[0].id], error)

    def _abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
        for key in [key for key in self._states if key[0] in request_ids]:
            del self._states[key]
        self._call_on_loop(self._deliver_load, self._load())

    def _isolate(self, error: Exception) -> None:
        """Rerun the sequences of a failed step one by one and fail only those that fail alone.

        If all of them fail, and so does a dummy sequence, the engine itself is at fault.
        """
        LOG.error("a step failed; its sequences are run one by one", exc_info=error)
        self._busy_since = began = time.monotonic()
        recovery = recover(self.engine, self._states.values(), error)
        if not (recovery.deltas or recovery.failed or recovery.num_continued):
            raise error
        self._report(recovery.deltas, began)
        self._abort(recovery.failed)
        for request_id, reason in recovery.failed.items():
            failure = StepFailed(f"its step failed: {type(reason).__name__}")
            self._call_on_loop(self._deliver_failure, [request_id], failure)
        if recovery.num_continued or recovery.deltas or is_healthy(self.engine):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= MAX_FAILED_STEPS:
            raise error

    def _fail(self, error: BaseException) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._call_on_loop(self._deliver_end, Unavailable("the engine has failed", MAX_RETRY_AFTER))

    def _stop(self) -> None:
        self._stopped = True

    def _load(self) -> Load:
        scheduler, pool = self.engine.scheduler, self.engine.runner.pool
        return Load(len(scheduler.running), len(scheduler.waiting), pool.count, pool.num_held, scheduler.preemptions)

    def _call_on_loop(self, deliver: Callable[..., None], *values: object, urgent: bool = True) -> None:
        try:
            self._calls.put(partial(deliver, *values), urgent)
        except RuntimeError:  # the loop has closed
            self._stopped = True
