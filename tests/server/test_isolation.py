"""Fault isolation: one failing request among others, at every point where a step can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.model import ModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.async_engine import MAX_FAILED_STEPS, AsyncEngine
from foretell.engine.async_scheduling import InFlightStep
from foretell.engine.engine import Engine
from foretell.engine.fault_isolation import PartialCommit, recover
from foretell.engine.sequence_state import PendingDelta, SequenceState
from foretell.engine.streams import StepFailed
from foretell.sampling.grammar_matcher import GrammarMatcher
from foretell.types import Draft, ScheduledSequence, Sequence, StepResult, StepTimes
from tests.fake_async import FakeAsyncExecutor
from tests.server.test_async_engine import PROMPT, WORLD, alone, generate, go, requests
from tests.tiny import World, check_pages, early_exit, model_drafter, random_tree

BAD = "bad"
AFTER = 5  # tokens of the bad text, before anything fails
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": TokenRecyclingDrafter,
    "tree": lambda: ScriptedDrafter(random_tree),
    "model": lambda: model_drafter(seed=1),
    "exit": early_exit,
    "mix": lambda: MixDrafter([NGramDrafter(), SuffixDrafter()]),
}


def is_bad(share: ScheduledSequence, after: int = AFTER) -> bool:
    return share.seq.request.id == BAD and share.seq.num_output_tokens >= after


def fail_running(engine: Engine, after: int = AFTER) -> None:
    forward = engine.runner.forward

    def broken(shares: list[ScheduledSequence], drafts: Any) -> Any:
        if any(is_bad(share, after) for share in shares):
            raise RuntimeError("planted")
        return forward(shares, drafts)

    engine.runner.forward = broken  # type: ignore[method-assign]


def fail_verifying(engine: Engine) -> None:
    verify = engine.verifier.verify

    def broken(step: InFlightStep) -> Any:
        if any(is_bad(scheduled) for scheduled in step.scheduled):
            raise RuntimeError("planted")
        return verify(step)

    engine.verifier.verify = broken  # type: ignore[method-assign]


def fail_committing(engine: Engine) -> None:
    """Fail after other sequences were committed, with this one's tokens already appended."""
    commit = engine.commit

    def broken(outcome: StepResult, deltas: list[PendingDelta]) -> Any:
        if is_bad(outcome.scheduled):
            engine.states[outcome.scheduled.seq.id].detokenizer.append((1,))
            raise RuntimeError("planted")
        return commit(outcome, deltas)

    engine.commit = broken  # type: ignore[method-assign]


def fail_emitting(engine: Engine) -> None:
    """Fail in detokenization, after the tokens were committed."""
    add = engine.add

    def adding(request: Any, *given: Any) -> SequenceState:
        state = add(request, *given)
        tell = state.detokenizer.pop_text

        def broken() -> str:
            if request.id == BAD and state.seq.num_output_tokens >= AFTER:
                raise RuntimeError("planted")
            return tell()

        state.detokenizer.pop_text = broken  # type: ignore[method-assign]
        return state

    engine.add = adding  # type: ignore[method-assign]


PLACES = {
    "running": fail_running,
    "judging": fail_verifying,
    "committing": fail_committing,
    "emitting": fail_emitting,
}


async def result_of(engine: AsyncEngine, name: str) -> list[int] | BaseException:
    (found,) = await asyncio.gather(generate(engine, name), return_exceptions=True)
    return found


def bad_among_good(drafter: Drafter, place: Callable[[Engine], None]) -> AsyncEngine:
    """Run two good requests before and two after the failing one; all of them and later ones must finish."""

    async def scenario(engine: AsyncEngine) -> None:
        place(engine.engine)
        names = ["a", "b", BAD, "c", "d"]
        outputs = dict(zip(names, await asyncio.gather(*(result_of(engine, name) for name in names)), strict=True))
        lost = outputs.pop(BAD)
        assert isinstance(lost, StepFailed) and str(lost).endswith(("RuntimeError", "PartialCommit"))
        assert all(text == alone() for text in outputs.values())
        assert await generate(engine, "later") == alone()
        assert engine.failure is None and engine.engine.stats.drafter_failures == 0

    return go(scenario, world=World(max_num_seqs=8), drafter=drafter)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_failing_request_does_not_affect_others(drafter: str) -> None:
    engine = bad_among_good(DRAFTERS[drafter](), fail_running).engine
    if isinstance(engine.drafter, ModelDrafter):
        assert engine.drafter.runner.pool.num_held == 0, "nor does the draft model lose a page"


@pytest.mark.parametrize("async_device", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_isolation_wherever_the_step_fails(place: str, async_device: bool) -> None:
    """Also with async scheduling, where the next step starts before the last one is delivered."""

    def plant(engine: Engine) -> None:
        if async_device:
            engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
        PLACES[place](engine)

    bad_among_good(NGramDrafter(), plant)


def test_a_failure_after_commit_loses_no_token() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        controller, left = engine.engine.controller, [None] * 3

        def broken(outcomes: list[StepResult], times: StepTimes) -> None:
            if left:
                left.pop()
                raise RuntimeError("planted")

        controller.observe = broken  # type: ignore[method-assign]
        assert await asyncio.gather(*(generate(engine, name) for name in "abcd")) == [alone()] * 4
        assert not left

    go(scenario)


def test_a_bad_request_may_come_as_often_as_it_likes() -> None:
    """The request fails alone, but a dummy sequence runs: the engine does not fail."""

    async def scenario(engine: AsyncEngine) -> None:
        fail_running(engine.engine, after=0)
        for _ in range(2 * MAX_FAILED_STEPS):
            assert isinstance(await result_of(engine, BAD), StepFailed)
        assert await generate(engine, "good") == alone() and engine.failure is None

    go(scenario)


# Without a thread, where the order of things is known.


def finish(engine: Engine, states: list[SequenceState]) -> tuple[dict[str, list[int]], set[str]]:
    """Step until all have finished; return the tokens by request and choice, and the aborted requests."""
    returned: dict[str, list[int]] = {f"{state.seq.request.id}{state.seq.request.choice}": [] for state in states}
    lost: set[str] = set()
    for _ in range(1000):
        if not engine.busy:
            break
        try:
            deltas = engine.step()
        except Exception as error:
            found = recover(engine, states, error)
            deltas = found.deltas
            lost |= set(found.failed)
            for name in found.failed:
                engine.abort(name)
        check_pages(engine)
        for delta in deltas:
            returned[f"{delta.request_id}{delta.choice}"] += delta.tokens
        for state in states:
            state.outbox.clear()
    assert not engine.busy and engine.runner.pool.num_held == 0
    return returned, lost


def start(engine: Engine, *names: str, **params: Any) -> list[SequenceState]:
    return [engine.add(each) for name in names for each in requests(engine, name, **params)]


@pytest.mark.parametrize("async_device", [False, True])
def test_a_finished_sequence_whose_delta_fails_gets_an_error(async_device: bool) -> None:
    engine = WORLD.engine(NGramDrafter())
    if async_device:
        engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    states = start(engine, "a", "b") + start(engine, BAD, stop_token_ids=(alone()[AFTER],))
    tell = states[-1].detokenizer.pop_text

    def broken() -> str:
        if states[-1].seq.finish_reason is not None:
            raise RuntimeError("planted")
        return tell()

    states[-1].detokenizer.pop_text = broken  # type: ignore[method-assign]
    returned, lost = finish(engine, states)
    assert lost == {BAD} and returned["a0"] == returned["b0"] == alone()


def test_choices_that_finish_in_a_failing_step_are_returned_and_their_siblings_continue() -> None:
    """A stop token finishes one choice in the step whose commit fails for a later sequence."""
    engine = WORLD.engine()
    returned, _ = finish(engine, start(engine, "a", n=2, temperature=1.0))
    ends = returned["a0"][AFTER]
    assert ends not in returned["a0"][:AFTER] + returned["a1"][:AFTER]
    engine = WORLD.engine()
    expected, _ = finish(engine, start(engine, "a", n=2, temperature=1.0, stop_token_ids=(ends,)))
    assert len(expected["a0"]) == AFTER + 1 < len(expected["a1"])
    engine = WORLD.engine()
    fail_committing(engine)
    states = start(engine, "a", n=2, temperature=1.0, stop_token_ids=(ends,)) + start(engine, BAD)
    returned, lost = finish(engine, states)
    assert returned == {**expected, "bad0": alone()[:AFTER]} and lost == {BAD}


def test_a_partially_committed_sequence_is_aborted() -> None:
    engine = WORLD.engine(NGramDrafter())
    commit, left = engine.commit, [None]

    def broken(outcome: StepResult, deltas: list[PendingDelta]) -> Any:
        if left and is_bad(outcome.scheduled):
            left.pop()
            engine.states[outcome.scheduled.seq.id].detokenizer.append((1,))
            raise RuntimeError("planted")
        return commit(outcome, deltas)

    engine.commit = broken  # type: ignore[method-assign]
    returned, lost = finish(engine, start(engine, "a", BAD, "b"))
    assert lost == {BAD} and returned["a0"] == returned["b0"] == alone()


def test_a_sequence_whose_grammar_is_ahead_of_its_tokens_is_aborted() -> None:
    engine = WORLD.engine()
    states = start(engine, "a", BAD)
    for _ in range(AFTER):
        engine.step()
    matcher = GrammarMatcher(None, 1, ())  # type: ignore[arg-type]
    matcher.num_tokens, states[1].matcher = states[1].seq.num_output_tokens + 1, matcher
    for state in states:
        state.outbox.clear()
    found = recover(engine, states, RuntimeError("planted"))
    assert {name: type(error) for name, error in found.failed.items()} == {BAD: PartialCommit}
    assert [delta.request_id for delta in found.deltas] == ["a"]


def test_a_sequence_that_cannot_be_scheduled_is_aborted_and_later_ones_are_not() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        scheduler = engine.engine.scheduler
        try_admit = scheduler._try_admit

        def broken(seq: Sequence, force: bool) -> bool:
            if seq.request.id == BAD:
                raise RuntimeError("planted")
            return try_admit(seq, force)

        scheduler._try_admit = broken  # type: ignore[method-assign]
        for _ in range(MAX_FAILED_STEPS + 1):
            lost, *outputs = await asyncio.gather(*(result_of(engine, name) for name in (BAD, "b", "c")))
            assert isinstance(lost, StepFailed) and outputs == [alone(), alone()]
        assert engine.failure is None

    go(scenario)


def test_a_failing_draft_aborts_no_sequence() -> None:
    engine = WORLD.engine(NGramDrafter())
    forward, failed = engine.runner.forward, []

    def broken(shares: list[ScheduledSequence], drafts: list[Draft]) -> Any:
        if any(map(len, drafts)):
            failed.append(len(shares))
            raise RuntimeError("planted")
        return forward(shares, drafts)

    engine.runner.forward = broken  # type: ignore[method-assign]
    returned, lost = finish(engine, start(engine, "a", "b"))
    assert failed and not lost and returned == {"a0": alone(), "b0": alone()}


def test_a_sequence_committed_alone_survives_a_later_failure() -> None:
    engine = WORLD.engine(NGramDrafter())
    fail_running(engine)
    observe = engine.controller.observe

    def broken(outcomes: list[StepResult], times: StepTimes) -> None:
        if len(outcomes) == 1:
            raise RuntimeError("planted")
        observe(outcomes, times)

    engine.controller.observe = broken  # type: ignore[method-assign]
    returned, lost = finish(engine, start(engine, "a", BAD, "b"))
    assert lost == {BAD} and returned["a0"] == returned["b0"] == alone()


def test_a_sequence_without_a_free_page_waits_and_continues() -> None:
    engine = WORLD.engine()
    engine.scheduler.prefix = None  # so that the second does not wait for the first one's pages
    states = start(engine, "a", "b")
    for _ in range(len(PROMPT) % WORLD.page_size + 1):  # up to a page's end
        engine.step()
    taken = engine.runner.pool.allocate(engine.runner.pool.num_available)
    assert taken
    for state in states:
        state.outbox.clear()
    found = recover(engine, states, RuntimeError("planted"))
    assert not found.failed and [delta.request_id for delta in found.deltas] == ["a"]
    assert [seq.request.id for seq in engine.scheduler.waiting] == ["b"], "the youngest gave its pages to the other"
    engine.runner.pool.release(taken)
    finish(engine, states)
    assert [state.seq.tokens[len(PROMPT) :] for state in states] == [alone(), alone()]
