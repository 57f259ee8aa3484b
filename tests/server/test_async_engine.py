"""The async engine: outputs, aborted requests, and failing steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.async_engine import MAX_FAILED_STEPS, AsyncEngine
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.streams import QueueFull, StepFailed, StepReport, Unavailable
from foretell.errors import CapacityError
from foretell.runner.executor import StepOutput
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence
from tests.tiny import CONTEXT, VOCAB, World, add, run
from tests.waiting import TIMEOUT

PROMPT = [4, 5, 6, 7, 4, 5, 6, 7, 4, 5]
WORLD = World(max_num_seqs=4)


def requests(engine: Engine, name: str, tokens: int = 24, **params: Any) -> list[Request]:
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset({0}), VOCAB), None, engine.drafter)
    wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params)
    return maker.make(name, PROMPT, wanted)


def alone(tokens: int = 24) -> list[int]:
    engine = WORLD.engine(NGramDrafter())
    (track,) = add(engine, "1", PROMPT, max_tokens=tokens, ignore_eos=True)
    run(engine)
    return track.seq.tokens[len(PROMPT) :]


def go(
    scenario: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
    most: int = 8,
    world: World = WORLD,
    drafter: Drafter | None = None,
) -> AsyncEngine:
    """Run a scenario with an engine on an event loop; afterwards all pages must be free."""

    async def scene() -> AsyncEngine:
        engine = AsyncEngine(world.engine(drafter or NGramDrafter()), most)
        engine.start()
        try:
            await asyncio.wait_for(scenario(engine), TIMEOUT)
        finally:
            await engine.stop()
        return engine

    engine = asyncio.run(scene())
    assert engine.engine.runner.pool.num_held == 0 and engine.num_sequences == 0
    return engine


async def generate(engine: AsyncEngine, name: str, tokens: int = 24) -> list[int]:
    stream = engine.submit(requests(engine.engine, name, tokens))
    return [token async for piece in stream.items() for token in piece.delta.tokens]


def test_outputs_equal_those_of_the_synchronous_engine() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = await asyncio.gather(*(generate(engine, str(i)) for i in range(6)))
        assert all(text == alone() for text in outputs)

    go(scenario)


def test_the_choices_of_a_request_are_interleaved_and_complete() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.submit(requests(engine.engine, "a", n=3, temperature=1.0))
        pieces = [piece async for piece in stream.items()]
        assert sorted(piece.delta.choice for piece in pieces if piece.delta.finish_reason) == [0, 1, 2]
        assert sorted(piece.delta.choice for piece in pieces if piece.is_first) == [0, 1, 2]

    go(scenario)


def test_every_step_is_reported_before_its_pieces() -> None:
    reports: list[StepReport] = []

    async def scenario(engine: AsyncEngine) -> None:
        engine.observe = reports.append
        text = await generate(engine, "a")
        returned = [token for report in reports for piece in report.items for token in piece.delta.tokens]
        assert returned == text and reports[-1].load.pages_held == 0
        assert sum(report.timing.rows for report in reports) >= len(PROMPT) + len(text) - 1

    go(scenario)


def test_an_aborted_request_frees_its_pages_before_the_next_step() -> None:
    """A step may be running when the client disconnects; the next one no longer has the sequence."""
    left, late = threading.Event(), []

    async def scenario(engine: AsyncEngine) -> None:
        step = engine.engine.step

        def watched() -> Any:
            if left.is_set():
                late.append([seq.request.id for seq in engine.engine.scheduler.running])
            return step()

        engine.engine.step = watched  # type: ignore[method-assign]
        pieces = engine.submit(requests(engine.engine, "a", 200)).items()
        await anext(pieces)
        await pieces.aclose()
        left.set()
        assert await generate(engine, "b") == alone()
        assert engine.engine.runner.pool.num_held == 0

    go(scenario)
    assert len(late) > 2 and not any("a" in names for names in late[1:])


def test_a_request_that_times_out_is_aborted() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release = hold(engine.engine, after=1)
        stream = engine.submit(requests(engine.engine, "a", 200), timeout=0.1)
        with pytest.raises(TimeoutError):
            async for _ in stream.items():
                pass
        assert engine.num_sequences == 0
        release.set()

    go(scenario)


def hold(engine: Engine, after: int = 0) -> threading.Event:
    """Block an engine's step after `after` steps until the returned event is set."""
    step, release, left = engine.step, threading.Event(), iter(range(after))

    def held() -> Any:
        if next(left, None) is None:
            release.wait(TIMEOUT)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return release


async def stuck(engine: AsyncEngine, seconds: float = 0.0) -> None:
    """Wait until the engine has been stuck for that long."""
    while engine.stuck_for() <= seconds:
        await asyncio.sleep(0.001)


def test_a_full_queue_refuses_and_opens_again() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(generate(engine, "a"))
        second = asyncio.ensure_future(generate(engine, "b"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            engine.submit(requests(engine.engine, "c"))
        assert full.value.retry_after >= 1
        await asyncio.gather(first, second)
        assert await generate(engine, "c") == alone()

    go(scenario, most=2)


def test_what_does_not_fit_is_refused_and_nothing_else() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        other = asyncio.ensure_future(generate(engine, "a"))
        with pytest.raises(CapacityError):
            await generate(engine, "b", 200)
        assert await other == alone()

    go(scenario, world=World(max_num_seqs=4, pages=20))


def test_a_step_that_fails_once_aborts_no_request() -> None:
    """Four sequences run and two wait when a step fails; one by one all can continue."""

    async def scenario(engine: AsyncEngine) -> None:
        break_step(engine.engine, outputs=4, times=1)
        outputs = await asyncio.gather(*(generate(engine, str(i)) for i in range(6)))
        assert outputs == [alone()] * 6 and engine.failure is None

    go(scenario)


def break_step(engine: Engine, outputs: int, times: int) -> None:
    """Make the runner fail `times` times in steps with this many sequences."""
    forward, left = engine.runner.forward, [None] * times

    def broken(scheduled: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        if left and len(scheduled) == outputs:
            left.pop()
            raise RuntimeError("planted")
        return forward(scheduled, drafts)

    engine.runner.forward = broken  # type: ignore[method-assign]


def test_an_engine_that_always_fails_is_given_up() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        break_step(engine.engine, outputs=1, times=1000)
        for i in range(MAX_FAILED_STEPS):
            with pytest.raises((StepFailed, Unavailable)):
                await generate(engine, str(i))
        while engine.failure is None:
            await asyncio.sleep(0.001)
        assert "planted" in engine.failure
        with pytest.raises(Unavailable):
            engine.submit(requests(engine.engine, "x"))

    go(scenario)


def test_a_stuck_step_shows() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert engine.stuck_for() == 0
        release = hold(engine.engine)
        asked = asyncio.ensure_future(generate(engine, "a", 1))
        await stuck(engine, 0.01)
        release.set()
        await asked

    go(scenario)


def test_stuck_work_between_steps_shows_too() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release = threading.Event()
        asked = asyncio.ensure_future(engine.between_steps(lambda: release.wait(TIMEOUT)))
        await stuck(engine, 0.01)
        release.set()
        assert await asked
        while engine.stuck_for():
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert engine.stuck_for() == 0, "waiting to be asked is no work"

    go(scenario)


async def fails_soon(asked: asyncio.Future[Any]) -> None:
    """Expect `Unavailable`; the timeout only keeps a failing test from hanging."""
    done, _ = await asyncio.wait([asked], timeout=TIMEOUT)
    assert done, "it waits for a thread that has ended"
    with pytest.raises(Unavailable):
        asked.result()


def test_work_between_steps_fails_when_the_engine_has_failed() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        def leave() -> None:
            raise SystemExit

        first = asyncio.ensure_future(engine.between_steps(leave))
        left = asyncio.ensure_future(engine.between_steps(lambda: None))
        await fails_soon(left)
        await fails_soon(asyncio.ensure_future(engine.between_steps(lambda: None)))
        await fails_soon(first)
        assert engine.failure is not None

    go(scenario)


def test_work_between_steps_fails_when_the_engine_has_stopped() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release = threading.Event()
        first = asyncio.ensure_future(engine.between_steps(lambda: release.wait(TIMEOUT)))
        await stuck(engine, 0.01)
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)
        left = asyncio.ensure_future(engine.between_steps(lambda: None))
        await asyncio.sleep(0)
        release.set()
        assert await first
        await stopping
        await asyncio.wait([left], timeout=TIMEOUT)
        assert left.done()
        await fails_soon(asyncio.ensure_future(engine.between_steps(lambda: None)))

    go(scenario)


def test_a_cancelled_caller_of_between_steps_costs_nothing() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release, ran = threading.Event(), list[int]()
        first = asyncio.ensure_future(engine.between_steps(lambda: release.wait(TIMEOUT)))
        await stuck(engine, 0.01)
        second = asyncio.ensure_future(engine.between_steps(lambda: ran.append(1)))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second], timeout=TIMEOUT)
        release.set()
        assert await generate(engine, "a") == alone()
        assert engine.failure is None and not ran

    go(scenario)


def test_a_thread_that_ends_fails_its_waiting_requests() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        def leave() -> None:
            raise SystemExit

        engine.engine.step = leave  # type: ignore[method-assign,assignment]
        with pytest.raises(Unavailable):
            await generate(engine, "a")
        assert engine.failure is not None
        engine.engine.abort("a")

    go(scenario)


def test_waiting_for_a_running_step_counts_as_queue_time() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release = hold(engine.engine)
        other = asyncio.ensure_future(generate(engine, "a", 3))
        await stuck(engine)
        stream = engine.submit(requests(engine.engine, "b", 1))
        asked = time.perf_counter()
        release.set()
        (piece,) = [piece async for piece in stream.items()]
        assert piece.state.timings.added <= asked
        await other

    go(scenario)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        text = asyncio.ensure_future(generate(engine, "a"))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(engine.drain(TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            engine.submit(requests(engine.engine, "b"))
        assert await draining is True
        assert await text == alone()

    go(scenario)


def test_stopping_ends_what_runs() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        release = hold(engine.engine, after=1)
        text = asyncio.ensure_future(generate(engine, "a", 200))
        await asyncio.sleep(0)
        assert await engine.drain(0.1) is False
        release.set()  # sequences are finished on the loop, which does not run in between
        await engine.stop()
        with pytest.raises(Unavailable):
            await text

    go(scenario)


def test_idle_time_is_used_for_work_that_yields_to_requests_and_may_fail() -> None:
    pieces: list[bool] = []

    def piece(engine: Engine) -> bool:
        pieces.append(engine.busy)
        if len(pieces) == 12:
            raise ValueError("planted")
        time.sleep(0.002)
        return True

    async def scene() -> None:
        inner = WORLD.engine(NGramDrafter())
        engine = AsyncEngine(inner, 8, while_idle=lambda: piece(inner))
        engine.start()
        try:
            while len(pieces) < 3:
                await asyncio.sleep(0.005)
            assert await generate(engine, "1") == alone()
            while len(pieces) < 12:
                await asyncio.sleep(0.005)
            assert await generate(engine, "2") == alone(), "a failure in idle time costs no text"
            assert len(pieces) == 12, "what failed is not tried again"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(scene(), TIMEOUT))
    assert not any(pieces), "never while there is something to write"
