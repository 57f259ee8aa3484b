"""A step fails only those it fails for: one bad request among good ones, at each place where a step can fail."""

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
from tests.server.test_async_engine import PROMPT, WORLD, alone, go, requests, written
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
    """Behind the others' commits and before theirs, with the words already written."""
    commit = engine.commit

    def broken(outcome: StepResult, news: list[PendingDelta]) -> Any:
        if is_bad(outcome.scheduled):
            engine.states[outcome.scheduled.seq.id].detokenizer.append((1,))
            raise RuntimeError("planted")
        return commit(outcome, news)

    engine.commit = broken  # type: ignore[method-assign]


def fail_telling(engine: Engine) -> None:
    """What the text's tokens say cannot be found out, when they are in it already."""
    add = engine.add

    def adding(request: Any, *given: Any) -> SequenceState:
        track = add(request, *given)
        tell = track.detokenizer.pop_text

        def broken() -> str:
            if request.id == BAD and track.seq.num_output_tokens >= AFTER:
                raise RuntimeError("planted")
            return tell()

        track.detokenizer.pop_text = broken  # type: ignore[method-assign]
        return track

    engine.add = adding  # type: ignore[method-assign]


PLACES = {
    "running": fail_running,
    "judging": fail_verifying,
    "committing": fail_committing,
    "telling": fail_telling,
}


async def outcome_of(engine: AsyncEngine, name: str) -> list[int] | BaseException:
    (found,) = await asyncio.gather(written(engine, name), return_exceptions=True)
    return found


def bad_among_good(drafter: Drafter, place: Callable[[Engine], None]) -> AsyncEngine:
    """Two good ones before it, two behind it; all of them, and who comes later, get their texts."""

    async def play(engine: AsyncEngine) -> None:
        place(engine.engine)
        names = ["a", "b", BAD, "c", "d"]
        texts = dict(zip(names, await asyncio.gather(*(outcome_of(engine, name) for name in names)), strict=True))
        lost = texts.pop(BAD)
        assert isinstance(lost, StepFailed) and str(lost).endswith(("RuntimeError", "PartialCommit"))
        assert all(text == alone() for text in texts.values())
        assert await written(engine, "later") == alone()
        assert engine.failure is None and engine.engine.stats.drafter_failures == 0

    return go(play, world=World(max_num_seqs=8), drafter=drafter)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_that_fails_takes_nobody_along(drafter: str) -> None:
    engine = bad_among_good(DRAFTERS[drafter](), fail_running).engine
    if isinstance(engine.drafter, ModelDrafter):
        assert engine.drafter.runner.pool.num_held == 0, "nor does the draft model lose a page"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_fails(place: str, beside: bool) -> None:
    """Also on a device that works beside the host, where the next step begins before the last one is told."""

    def plant(engine: Engine) -> None:
        if beside:
            engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
        PLACES[place](engine)

    bad_among_good(NGramDrafter(), plant)


def test_what_fails_behind_the_commit_costs_no_token() -> None:
    async def play(engine: AsyncEngine) -> None:
        controller, left = engine.engine.controller, [None] * 3

        def broken(outcomes: list[StepResult], times: StepTimes) -> None:
            if left:
                left.pop()
                raise RuntimeError("planted")

        controller.observe = broken  # type: ignore[method-assign]
        assert await asyncio.gather(*(written(engine, name) for name in "abcd")) == [alone()] * 4
        assert not left

    go(play)


def test_a_bad_request_may_come_as_often_as_it_likes() -> None:
    """It fails alone, but a made-up text can be run: the engine is not given up for it."""

    async def play(engine: AsyncEngine) -> None:
        fail_running(engine.engine, after=0)
        for _ in range(2 * MAX_FAILED_STEPS):
            assert isinstance(await outcome_of(engine, BAD), StepFailed)
        assert await written(engine, "good") == alone() and engine.failure is None

    go(play)


# Without a thread, where the order of things is known.


def finish(engine: Engine, tracks: list[SequenceState]) -> tuple[dict[str, list[int]], set[str]]:
    """Step until all have ended: what each caller was told, by request and choice, and who was lost."""
    told: dict[str, list[int]] = {f"{track.seq.request.id}{track.seq.request.choice}": [] for track in tracks}
    lost: set[str] = set()
    for _ in range(1000):
        if not engine.busy:
            break
        try:
            deltas = engine.step()
        except Exception as error:
            found = recover(engine, tracks, error)
            deltas = found.deltas
            lost |= set(found.failed)
            for name in found.failed:
                engine.abort(name)
        check_pages(engine)
        for delta in deltas:
            told[f"{delta.request_id}{delta.choice}"] += delta.tokens
        for track in tracks:
            track.outbox.clear()
    assert not engine.busy and engine.runner.pool.num_held == 0
    return told, lost


def start(engine: Engine, *names: str, **params: Any) -> list[SequenceState]:
    return [engine.add(each) for name in names for each in requests(engine, name, **params)]


@pytest.mark.parametrize("beside", [False, True])
def test_a_text_that_ends_and_cannot_be_told_is_lost_in_words(beside: bool) -> None:
    engine = WORLD.engine(NGramDrafter())
    if beside:
        engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    tracks = start(engine, "a", "b") + start(engine, BAD, stop_token_ids=(alone()[AFTER],))
    tell = tracks[-1].detokenizer.pop_text

    def broken() -> str:
        if tracks[-1].seq.finish_reason is not None:
            raise RuntimeError("planted")
        return tell()

    tracks[-1].detokenizer.pop_text = broken  # type: ignore[method-assign]
    told, lost = finish(engine, tracks)
    assert lost == {BAD} and told["a0"] == told["b0"] == alone()


def test_choices_that_end_in_the_step_that_fails_are_told_and_their_siblings_go_on() -> None:
    """A stop token ends one choice in the very step whose commit fails for somebody behind it."""
    engine = WORLD.engine()
    told, _ = finish(engine, start(engine, "a", n=2, temperature=1.0))
    ends = told["a0"][AFTER]
    assert ends not in told["a0"][:AFTER] + told["a1"][:AFTER]
    engine = WORLD.engine()
    expected, _ = finish(engine, start(engine, "a", n=2, temperature=1.0, stop_token_ids=(ends,)))
    assert len(expected["a0"]) == AFTER + 1 < len(expected["a1"])
    engine = WORLD.engine()
    fail_committing(engine)
    tracks = start(engine, "a", n=2, temperature=1.0, stop_token_ids=(ends,)) + start(engine, BAD)
    told, lost = finish(engine, tracks)
    assert told == {**expected, "bad0": alone()[:AFTER]} and lost == {BAD}


def test_a_text_left_half_written_is_lost_even_if_it_could_go_on() -> None:
    engine = WORLD.engine(NGramDrafter())
    commit, left = engine.commit, [None]

    def broken(outcome: StepResult, news: list[PendingDelta]) -> Any:
        if left and is_bad(outcome.scheduled):
            left.pop()
            engine.states[outcome.scheduled.seq.id].detokenizer.append((1,))
            raise RuntimeError("planted")
        return commit(outcome, news)

    engine.commit = broken  # type: ignore[method-assign]
    told, lost = finish(engine, start(engine, "a", BAD, "b"))
    assert lost == {BAD} and told["a0"] == told["b0"] == alone()


def test_a_text_whose_grammar_went_ahead_of_it_is_lost() -> None:
    engine = WORLD.engine()
    tracks = start(engine, "a", BAD)
    for _ in range(AFTER):
        engine.step()
    matcher = GrammarMatcher(None, 1, ())  # type: ignore[arg-type]
    matcher.num_tokens, tracks[1].matcher = tracks[1].seq.num_output_tokens + 1, matcher
    for track in tracks:
        track.outbox.clear()
    found = recover(engine, tracks, RuntimeError("planted"))
    assert {name: type(error) for name, error in found.failed.items()} == {BAD: PartialCommit}
    assert [delta.request_id for delta in found.deltas] == ["a"]


def test_a_text_that_cannot_be_taken_up_is_lost_and_those_behind_it_are_not() -> None:
    async def play(engine: AsyncEngine) -> None:
        scheduler = engine.engine.scheduler
        try_admit = scheduler._try_admit

        def broken(seq: Sequence, force: bool) -> bool:
            if seq.request.id == BAD:
                raise RuntimeError("planted")
            return try_admit(seq, force)

        scheduler._try_admit = broken  # type: ignore[method-assign]
        for _ in range(MAX_FAILED_STEPS + 1):
            lost, *texts = await asyncio.gather(*(outcome_of(engine, name) for name in (BAD, "b", "c")))
            assert isinstance(lost, StepFailed) and texts == [alone(), alone()]
        assert engine.failure is None

    go(play)


def test_where_it_is_the_draft_that_fails_nobody_is_lost() -> None:
    engine = WORLD.engine(NGramDrafter())
    forward, failed = engine.runner.forward, []

    def broken(shares: list[ScheduledSequence], drafts: list[Draft]) -> Any:
        if any(map(len, drafts)):
            failed.append(len(shares))
            raise RuntimeError("planted")
        return forward(shares, drafts)

    engine.runner.forward = broken  # type: ignore[method-assign]
    told, lost = finish(engine, start(engine, "a", "b"))
    assert failed and not lost and told == {"a0": alone(), "b0": alone()}


def test_a_text_that_was_committed_alone_is_not_lost_by_what_fails_behind_it() -> None:
    engine = WORLD.engine(NGramDrafter())
    fail_running(engine)
    observe = engine.controller.observe

    def broken(outcomes: list[StepResult], times: StepTimes) -> None:
        if len(outcomes) == 1:
            raise RuntimeError("planted")
        observe(outcomes, times)

    engine.controller.observe = broken  # type: ignore[method-assign]
    told, lost = finish(engine, start(engine, "a", BAD, "b"))
    assert lost == {BAD} and told["a0"] == told["b0"] == alone()


def test_a_text_that_finds_no_page_alone_waits_and_goes_on() -> None:
    engine = WORLD.engine()
    engine.scheduler.prefix = None  # so that the second does not wait for the first one's pages
    tracks = start(engine, "a", "b")
    for _ in range(len(PROMPT) % WORLD.page_size + 1):  # up to a page's end
        engine.step()
    taken = engine.runner.pool.allocate(engine.runner.pool.num_available)
    assert taken
    for track in tracks:
        track.outbox.clear()
    found = recover(engine, tracks, RuntimeError("planted"))
    assert not found.failed and [delta.request_id for delta in found.deltas] == ["a"]
    assert [seq.request.id for seq in engine.scheduler.waiting] == ["b"], "the youngest gave its pages to the other"
    engine.runner.pool.release(taken)
    finish(engine, tracks)
    assert [track.seq.tokens[len(PROMPT) :] for track in tracks] == [alone(), alone()]
