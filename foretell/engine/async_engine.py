"""An engine in a thread of its own, for callers on an event loop: a long step never keeps them waiting."""

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

from foretell.engine.fault_isolation import is_well, rescue
from foretell.engine.streams import Load, QueueFull, StepClock, StepFailed, StepReport, Stream, StreamItem, Unavailable
from foretell.errors import RankError
from foretell.types import StepTimes

if TYPE_CHECKING:
    from foretell.engine.engine import Engine
    from foretell.engine.sequence_state import SequenceState
    from foretell.sampling.grammar import Grammar
    from foretell.types import Delta, Request

MOST_WAITING = 32  # calls that have time, after which the loop is woken all the same


class LoopCalls:
    """Calls for the loop to make, in their order. It is woken once for all that wait, and not at all for those that
    have time: they go with the next one that has none."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._woken = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before anything is put in."""
        self._loop = loop

    def put(self, call: Callable[[], None], hurry: bool = True) -> None:
        """From the thread; RuntimeError where the loop has closed."""
        self._waiting.append(call)
        if hurry or len(self._waiting) >= MOST_WAITING:
            self._wake()

    def deliver(self) -> None:
        """On the loop: make the calls that wait."""
        self._woken = False  # before they are looked at: what comes meanwhile is seen now or wakes again
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # a call failed; the others are made all the same
                self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)


LOG = logging.getLogger("foretell")
FAILURES = 3  # steps in a row in which nobody could go on, after which the engine is given up
ENDINGS = 64  # of the last texts, from which the rate of endings is taken
LONGEST_WAIT = 60  # seconds, the most that is ever told to somebody who should come back later


T = TypeVar("T")


def _give(error: Exception) -> None:
    """What was found in another thread fails in the engine's own."""
    raise error


def _settle(done: Future[T], do: Callable[[], T]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # the caller has been cancelled
    try:
        done.set_result(do())
    except Exception as error:
        done.set_exception(error)


class AsyncEngine:
    """Commands go to the thread through its inbox, and are obeyed between two steps; pieces come back to the loop."""

    def __init__(
        self,
        engine: Engine,
        most_texts: int,
        observe: Callable[[StepReport], None] = lambda report: None,
        while_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`most_texts`: running and waiting together. `observe` hears of every step, on the loop. `while_idle` does a
        piece of work about as long as a step, in the thread, where there is nothing to write; False: none is left."""
        self.engine, self.most_texts, self.observe, self.while_idle = engine, most_texts, observe, while_idle
        self.load = self._load()
        self.texts = 0  # that have not ended
        self.failure: str | None = None  # why the engine was given up
        self.draining = False
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls = LoopCalls()
        self._commands: set[Future[Any]] = set()  # of `between_steps`, not done yet
        self._has_ended = False  # whether the thread has, as far as the loop knows
        self._streams: dict[str, Stream] = {}
        self._tracks: dict[tuple[str, int], SequenceState] = {}  # the thread's own
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: deque[float] = deque(maxlen=ENDINGS)
        self._busy_since: float | None = None  # with one thing: a step, a command, a piece of work for idle time
        self._failures = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)

    # On the event loop.

    def start(self) -> None:
        """Begin; from the loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._calls.open(self._loop)
        self._thread.start()
        if self.engine.runner.workers is not None:
            self.engine.runner.workers.on_failure(lambda error: self._inbox.put(partial(_give, error)))

    def submit(
        self,
        requests: list[Request],
        grammar: Grammar | None = None,
        timeout: float | None = None,
        patient: bool = False,
    ) -> Stream:
        """Take in the texts a caller asks for together, or refuse them where too many wait. `patient`: the caller waits
        for their ends, and the loop is not woken for every piece."""
        self.check_open(len(requests))
        stream = Stream(requests, patient)
        stream.close = partial(self._close, stream)
        if timeout is not None:
            stream.timer = self._loop.call_later(timeout, self._deliver_failure, stream.names[:1], TimeoutError())
        self._streams |= dict.fromkeys(stream.names, stream)
        self.texts += len(requests)
        self._idle.clear()
        self._inbox.put(partial(self._add, requests, grammar, time.perf_counter(), patient))
        return stream

    def catch_up(self) -> None:
        """Hear of every step that is done: some may have been left until there is more to tell."""
        self._calls.deliver()

    async def between_steps(self, do: Callable[[], T]) -> T:
        """Run `do` in the engine's thread before its next step and return the result; `Unavailable` if it has ended."""
        if self._has_ended:
            raise self._gone
        done: Future[T] = Future()
        self._commands.add(done)
        self._inbox.put(partial(_settle, done, do))
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._commands.discard(done)

    def check_open(self, texts: int = 1) -> None:
        """Refuse now what `submit` would refuse."""
        if self.failure is not None:
            raise Unavailable(f"the engine has failed: {self.failure}", LONGEST_WAIT)
        if self.draining:
            raise Unavailable("the server is about to stop and takes nothing new", LONGEST_WAIT)
        if self.texts + texts > self.most_texts:
            raise QueueFull(f"{self.texts} texts run or wait and no more may; come back later", self.retry_after)

    @property
    def retry_after(self) -> int:
        """Seconds until a few texts will have ended, by how fast they did."""
        if len(self._ended) < 2:
            return 1
        apart = (time.monotonic() - self._ended[0]) / len(self._ended)
        return max(1, min(LONGEST_WAIT, math.ceil(apart * 4)))

    def stuck_for(self) -> float:
        """Seconds the step that runs now has taken, or what is done between steps; 0 where it waits to be asked."""
        began = self._busy_since
        return 0.0 if began is None else time.monotonic() - began

    @property
    def has_died(self) -> bool:
        """Whether the thread ended and nobody had told it to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stopped

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for what runs; whether all of it ended in time."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End everything, and the thread after its step."""
        self.draining = True
        self._deliver_end(Unavailable("the server stopped", LONGEST_WAIT))
        self._inbox.put(self._stop)  # behind what gives the pages back
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, LONGEST_WAIT)

    def _close(self, stream: Stream) -> None:
        """The caller has gone: before the next step the pages are free."""
        if self._forget(stream):
            self._inbox.put(partial(self._abort, stream.names))

    def _forget(self, stream: Stream) -> bool:
        """Whether it was still known."""
        known = [self._streams.pop(name, None) for name in stream.names]
        self.texts -= stream.unfinished
        stream.unfinished = 0
        if stream.timer is not None:
            stream.timer.cancel()
        if not self._streams:
            self._idle.set()
        return any(known)

    def _deliver(self, report: StepReport) -> None:
        self.load = report.load
        for piece in report.pieces:
            stream = self._streams.get(piece.delta.request_id)
            if stream is None:
                continue  # its caller has gone
            if piece.delta.finish_reason is not None:
                stream.unfinished -= 1
                self.texts -= 1
                self._ended.append(time.monotonic())
                if not stream.unfinished:
                    self._forget(stream)
            stream.put(piece)
        self.observe(report)  # behind the words, for which somebody waits

    def _deliver_failure(self, names: Iterable[str], error: Exception) -> None:
        for name in names:
            stream = self._streams.get(name)
            if stream is not None:
                stream.fail(error)
                self._close(stream)

    def _deliver_end(self, error: Exception) -> None:
        self._deliver_failure(list(self._streams), error)

    def _deliver_thread_end(self) -> None:
        """Fail what is left in the inbox."""
        self._has_ended = True
        for done in self._commands:
            if not done.done():
                done.set_exception(self._gone)

    @property
    def _gone(self) -> Unavailable:
        return Unavailable(f"the engine has {'stopped' if self.failure is None else 'failed'}", LONGEST_WAIT)

    def _deliver_load(self, load: Load) -> None:
        self.load = load

    # In the thread.

    def _run(self) -> None:
        try:
            self.engine.runner.set_device()
            while not self._stopped:
                self._obey()
                if self.engine.busy and not self._stopped:
                    self._timed(self._step)
        except BaseException as error:  # the failed requests could not be removed, or the thread must end
            LOG.exception("the engine is given up")
            self._give_up(error)
        finally:
            self._tell(self._deliver_thread_end)

    def _obey(self) -> None:
        """Do what was asked; with nothing to write, wait to be asked."""
        if not self.engine.busy:
            while self._inbox.empty() and self._idle_piece():
                pass
            self._timed(self._inbox.get())
        while not self._inbox.empty():
            self._timed(self._inbox.get())

    def _timed(self, do: Callable[[], T]) -> T:
        """Do it under the eyes of whoever looks for a stuck engine."""
        self._busy_since = time.monotonic()
        try:
            return do()
        finally:
            self._busy_since = None

    def _idle_piece(self) -> bool:
        try:
            return self._timed(self.while_idle)
        except Exception:  # what nobody asked for must not cost anybody's text
            LOG.exception("work for idle time failed and is left")
            self.while_idle = lambda: False
            return False

    def _step(self) -> None:
        stats = self.engine.stats
        rows, drafting, running = stats.rows, stats.drafting_seconds, stats.running_seconds
        began = time.monotonic()
        try:
            deltas = self.engine.step()
        except RankError:
            raise  # there is nobody to run any text with
        except Exception as error:
            self._isolate(error)
        else:
            self._failures = 0
            times = StepTimes(stats.drafting_seconds - drafting, stats.running_seconds - running)
            self._report(deltas, began, stats.rows - rows, times)

    def _report(self, deltas: list[Delta], began: float, rows: int = 0, times: StepTimes = StepTimes(0, 0)) -> None:
        """`times`: what is known of where the step's seconds went."""
        clock = StepClock(
            time.perf_counter(),
            time.monotonic() - began,
            times,
            rows,
            len(deltas),
            sum(delta.num_drafted for delta in deltas),
            sum(len(self._tracks[delta.request_id, delta.choice].seq.tokens) for delta in deltas),
        )
        pieces = tuple(self._piece(delta, clock) for delta in deltas)
        counts = self.engine.stats.speculation.by_drafter.items()
        drafters = {name: (count.drafted, count.accepted) for name, count in counts}
        hurry = any(not piece.track.patient or piece.delta.finish_reason is not None for piece in pieces)
        self._tell(self._deliver, StepReport(pieces, clock, self._load(), drafters), hurry=hurry)

    def _piece(self, delta: Delta, clock: StepClock) -> StreamItem:
        key = (delta.request_id, delta.choice)
        track = self._tracks[key]
        track.outbox.clear()  # the piece is on its way
        if delta.finish_reason is not None:
            del self._tracks[key]
        return StreamItem(delta, track, track.speculation.steps == 1, clock)

    def _add(self, requests: list[Request], grammar: Grammar | None, asked: float, patient: bool) -> None:
        try:
            for request in requests:
                track = self._tracks[request.id, request.choice] = self.engine.add(request, grammar)
                track.timings.added = asked  # the step it had to wait for counts
                track.patient = patient
        except Exception as error:
            self._abort({request.id for request in requests})
            self._tell(self._deliver_failure, [requests[0].id], error)

    def _abort(self, names: Collection[str]) -> None:
        for name in names:
            self.engine.abort(name)
        for key in [key for key in self._tracks if key[0] in names]:
            del self._tracks[key]
        self._tell(self._deliver_load, self._load())

    def _isolate(self, error: Exception) -> None:
        """Only the texts that fail alone are lost. If all do, and a made-up one too, it is the engine that fails."""
        LOG.error("a step failed; its texts are run one by one", exc_info=error)
        self._busy_since = began = time.monotonic()
        found = rescue(self.engine, self._tracks.values(), error)
        if not (found.deltas or found.lost or found.went_on):
            raise error
        self._report(found.deltas, began)
        self._abort(found.lost)
        for name, reason in found.lost.items():
            self._tell(self._deliver_failure, [name], StepFailed(f"its step failed: {type(reason).__name__}"))
        if found.went_on or found.deltas or is_well(self.engine):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= FAILURES:
            raise error

    def _give_up(self, error: BaseException) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._tell(self._deliver_end, Unavailable("the engine has failed", LONGEST_WAIT))

    def _stop(self) -> None:
        self._stopped = True

    def _load(self) -> Load:
        scheduler, pool = self.engine.scheduler, self.engine.runner.pool
        return Load(len(scheduler.running), len(scheduler.waiting), pool.count, pool.held, scheduler.preemptions)

    def _tell(self, deliver: Callable[..., None], *values: object, hurry: bool = True) -> None:
        try:
            self._calls.put(partial(deliver, *values), hurry)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._stopped = True
