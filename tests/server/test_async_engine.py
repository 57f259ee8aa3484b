"""The engine in its thread: what callers get, what becomes of those who leave, and of those whose step fails."""

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
    play: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
    most: int = 8,
    world: World = WORLD,
    drafter: Drafter | None = None,
) -> AsyncEngine:
    """Run a scene with an engine on a loop; afterwards no page may be missing."""

    async def scene() -> AsyncEngine:
        engine = AsyncEngine(world.engine(drafter or NGramDrafter()), most)
        engine.start()
        try:
            await asyncio.wait_for(play(engine), TIMEOUT)
        finally:
            await engine.stop()
        return engine

    engine = asyncio.run(scene())
    assert engine.engine.runner.pool.num_held == 0 and engine.num_sequences == 0
    return engine


async def written(engine: AsyncEngine, name: str, tokens: int = 24) -> list[int]:
    stream = engine.submit(requests(engine.engine, name, tokens))
    return [token async for piece in stream.items() for token in piece.delta.tokens]


def test_texts_are_those_of_an_engine_without_a_thread() -> None:
    async def play(engine: AsyncEngine) -> None:
        texts = await asyncio.gather(*(written(engine, str(i)) for i in range(6)))
        assert all(text == alone() for text in texts)

    go(play)


def test_the_choices_of_a_request_come_mixed_and_whole() -> None:
    async def play(engine: AsyncEngine) -> None:
        stream = engine.submit(requests(engine.engine, "a", n=3, temperature=1.0))
        pieces = [piece async for piece in stream.items()]
        assert sorted(piece.delta.choice for piece in pieces if piece.delta.finish_reason) == [0, 1, 2]
        assert sorted(piece.delta.choice for piece in pieces if piece.is_first) == [0, 1, 2]

    go(play)


def test_every_step_is_reported_before_its_pieces() -> None:
    reports: list[StepReport] = []

    async def play(engine: AsyncEngine) -> None:
        engine.observe = reports.append
        text = await written(engine, "a")
        told = [token for report in reports for piece in report.items for token in piece.delta.tokens]
        assert told == text and reports[-1].load.pages_held == 0
        assert sum(report.timing.rows for report in reports) >= len(PROMPT) + len(text) - 1

    go(play)


def test_who_leaves_frees_the_pages_before_the_next_step() -> None:
    """A step may have begun when the caller leaves; the one after it does not know the text any more."""
    left, late = threading.Event(), []

    async def play(engine: AsyncEngine) -> None:
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
        assert await written(engine, "b") == alone()
        assert engine.engine.runner.pool.num_held == 0

    go(play)
    assert len(late) > 2 and not any("a" in names for names in late[1:])


def test_a_text_that_takes_too_long_is_ended() -> None:
    async def play(engine: AsyncEngine) -> None:
        release = hold(engine.engine, after=1)
        stream = engine.submit(requests(engine.engine, "a", 200), timeout=0.1)
        with pytest.raises(TimeoutError):
            async for _ in stream.items():
                pass
        assert engine.num_sequences == 0
        release.set()

    go(play)


def hold(engine: Engine, after: int = 0) -> threading.Event:
    """Let an engine get stuck in a step, after so many, until the event is set."""
    step, release, left = engine.step, threading.Event(), iter(range(after))

    def held() -> Any:
        if next(left, None) is None:
            release.wait(TIMEOUT)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return release


async def stuck(engine: AsyncEngine, seconds: float = 0.0) -> None:
    """Until it has been for so long."""
    while engine.stuck_for() <= seconds:
        await asyncio.sleep(0.001)


def test_a_full_queue_refuses_and_opens_again() -> None:
    async def play(engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(written(engine, "a"))
        second = asyncio.ensure_future(written(engine, "b"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            engine.submit(requests(engine.engine, "c"))
        assert full.value.retry_after >= 1
        await asyncio.gather(first, second)
        assert await written(engine, "c") == alone()

    go(play, most=2)


def test_what_does_not_fit_is_refused_and_nothing_else() -> None:
    async def play(engine: AsyncEngine) -> None:
        other = asyncio.ensure_future(written(engine, "a"))
        with pytest.raises(CapacityError):
            await written(engine, "b", 200)
        assert await other == alone()

    go(play, world=World(max_num_seqs=4, pages=20))


def test_a_step_that_fails_once_costs_nobody_a_text() -> None:
    """Four run and two wait when a step fails; one by one they can all go on."""

    async def play(engine: AsyncEngine) -> None:
        break_step(engine.engine, texts=4, times=1)
        texts = await asyncio.gather(*(written(engine, str(i)) for i in range(6)))
        assert texts == [alone()] * 6 and engine.failure is None

    go(play)


def break_step(engine: Engine, texts: int, times: int) -> None:
    """Let the runner fail so many times, in the midst of steps of so many texts."""
    forward, left = engine.runner.forward, [None] * times

    def broken(shares: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        if left and len(shares) == texts:
            left.pop()
            raise RuntimeError("planted")
        return forward(shares, drafts)

    engine.runner.forward = broken  # type: ignore[method-assign]


def test_an_engine_that_always_fails_is_given_up() -> None:
    async def play(engine: AsyncEngine) -> None:
        break_step(engine.engine, texts=1, times=1000)
        for i in range(MAX_FAILED_STEPS):
            with pytest.raises((StepFailed, Unavailable)):
                await written(engine, str(i))
        while engine.failure is None:
            await asyncio.sleep(0.001)
        assert "planted" in engine.failure
        with pytest.raises(Unavailable):
            engine.submit(requests(engine.engine, "x"))

    go(play)


def test_a_stuck_step_shows() -> None:
    async def play(engine: AsyncEngine) -> None:
        assert engine.stuck_for() == 0
        release = hold(engine.engine)
        asked = asyncio.ensure_future(written(engine, "a", 1))
        await stuck(engine, 0.01)
        release.set()
        await asked

    go(play)


def test_stuck_work_between_steps_shows_too() -> None:
    async def play(engine: AsyncEngine) -> None:
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

    go(play)


async def fails_soon(asked: asyncio.Future[Any]) -> None:
    """Expect `Unavailable`; the limit only keeps a test that fails from waiting for ever."""
    done, _ = await asyncio.wait([asked], timeout=TIMEOUT)
    assert done, "it waits for a thread that has ended"
    with pytest.raises(Unavailable):
        asked.result()


def test_work_between_steps_fails_when_the_engine_has_failed() -> None:
    async def play(engine: AsyncEngine) -> None:
        def leave() -> None:
            raise SystemExit

        first = asyncio.ensure_future(engine.between_steps(leave))
        left = asyncio.ensure_future(engine.between_steps(lambda: None))
        await fails_soon(left)
        await fails_soon(asyncio.ensure_future(engine.between_steps(lambda: None)))
        await fails_soon(first)
        assert engine.failure is not None

    go(play)


def test_work_between_steps_fails_when_the_engine_has_stopped() -> None:
    async def play(engine: AsyncEngine) -> None:
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

    go(play)


def test_a_cancelled_caller_of_between_steps_costs_nothing() -> None:
    async def play(engine: AsyncEngine) -> None:
        release, ran = threading.Event(), list[int]()
        first = asyncio.ensure_future(engine.between_steps(lambda: release.wait(TIMEOUT)))
        await stuck(engine, 0.01)
        second = asyncio.ensure_future(engine.between_steps(lambda: ran.append(1)))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second], timeout=TIMEOUT)
        release.set()
        assert await written(engine, "a") == alone()
        assert engine.failure is None and not ran

    go(play)


def test_a_thread_that_must_end_tells_those_who_wait() -> None:
    async def play(engine: AsyncEngine) -> None:
        def leave() -> None:
            raise SystemExit

        engine.engine.step = leave  # type: ignore[method-assign,assignment]
        with pytest.raises(Unavailable):
            await written(engine, "a")
        assert engine.failure is not None
        engine.engine.abort("a")

    go(play)


def test_the_step_a_text_has_to_wait_for_counts_as_waiting() -> None:
    async def play(engine: AsyncEngine) -> None:
        release = hold(engine.engine)
        other = asyncio.ensure_future(written(engine, "a", 3))
        await stuck(engine)
        stream = engine.submit(requests(engine.engine, "b", 1))
        asked = time.perf_counter()
        release.set()
        (piece,) = [piece async for piece in stream.items()]
        assert piece.state.timings.added <= asked
        await other

    go(play)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def play(engine: AsyncEngine) -> None:
        text = asyncio.ensure_future(written(engine, "a"))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(engine.drain(TIMEOUT))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            engine.submit(requests(engine.engine, "b"))
        assert await draining is True
        assert await text == alone()

    go(play)


def test_stopping_ends_what_runs() -> None:
    async def play(engine: AsyncEngine) -> None:
        release = hold(engine.engine, after=1)
        text = asyncio.ensure_future(written(engine, "a", 200))
        await asyncio.sleep(0)
        assert await engine.drain(0.1) is False
        release.set()  # it is the loop that ends texts, and there is no turn of the loop in between
        await engine.stop()
        with pytest.raises(Unavailable):
            await text

    go(play)


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
            assert await written(engine, "1") == alone()
            while len(pieces) < 12:
                await asyncio.sleep(0.005)
            assert await written(engine, "2") == alone(), "a failure in idle time costs no text"
            assert len(pieces) == 12, "what failed is not tried again"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(scene(), TIMEOUT))
    assert not any(pieces), "never while there is something to write"
