"""The next step begins as soon as it is known what one wrote; that is told while a device works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.types import Sequence
from tests.laws.test_losslessness import DRAFTERS, truth_for
from tests.outruns import LeavesUnseen, Outruns
from tests.tiny import PROMPTS, VOCAB, World, add, check_pages, model_drafter, run


def guessing(drafter: Drafter, nodes: int = 3, world: World = World()) -> tuple[Engine, Outruns]:
    """An engine that guesses in every step, on a device that works beside it."""
    engine = world.engine(drafter)
    executor = engine.runner.executor = Outruns(engine.runner.executor)
    engine.controller = FixedController(nodes)
    return engine, executor


def oracle() -> OracleDrafter:
    texts = dict(zip(map(tuple, PROMPTS), truth_for("greedy"), strict=True))
    return OracleDrafter(texts, VOCAB, 0.3)


def written(tracks: list[Any]) -> list[list[int]]:
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def test_the_device_has_the_next_step_before_words_are_told() -> None:
    engine, executor = guessing(oracle())
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    order: list[str] = []
    for track in tracks:
        note = track.make_delta
        track.make_delta = lambda *given, note=note: (order.append(f"told {executor.num_steps}"), note(*given))[1]  # type: ignore[method-assign]
    while engine.busy:
        before = executor.num_steps
        deltas = engine.step()
        if deltas and engine.busy and before > 2:
            assert executor.num_steps == before + 1 and engine.async_scheduler.in_flight is not None
            assert set(order) == {f"told {executor.num_steps}"}, "all of it behind the next step's beginning"
        order.clear()
    assert written(tracks) == truth_for("greedy")
    assert not engine.stats.drafter_failures and engine.runner.pool.num_held == 0


def test_first_words_do_not_wait_for_a_guess() -> None:
    engine, executor = guessing(model_drafter(seed=5))
    add(engine, "0", PROMPTS[0])
    (delta,) = engine.step()
    assert delta.tokens and executor.num_steps == 1 and engine.async_scheduler.in_flight is None
    engine.step()
    add(engine, "1", PROMPTS[1])
    engine.step()
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 2
    assert [delta.request_id for delta in engine.step()] == ["0", "1"] and engine.async_scheduler.in_flight is None
    run(engine)


def test_where_nothing_runs_beside_the_host_steps_come_one_by_one() -> None:
    engine = World().engine(oracle())
    add(engine, "0", PROMPTS[0])
    for _ in range(3):
        engine.step()
        assert engine.async_scheduler.in_flight is None
    run(engine)


@pytest.mark.parametrize("error", [RuntimeError("planted"), ValueError("planted")])
def test_a_step_that_cannot_begin_costs_nothing_of_the_one_before(error: Exception) -> None:
    """It fails where it is asked for, if it fails again."""
    engine, _ = guessing(oracle())
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    forward, failures = engine.runner.forward, iter([False, False, False, True, False, True, True])

    def broken(*given: Any) -> Any:
        if next(failures, False):
            raise error
        return forward(*given)

    engine.runner.forward = broken  # type: ignore[method-assign]
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except type(error):
            raised += 1
        check_pages(engine)
    assert raised == 1 and written(tracks) == truth_for("greedy")
    told = [[token for delta in track.outbox for token in delta.tokens] for track in tracks]
    assert told == written(tracks)


def test_one_for_which_memory_does_not_suffice_is_made_smaller() -> None:
    engine, _ = guessing(oracle())
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    forward, failures = engine.runner.forward, iter([False, False, False, True])

    def broken(*given: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("planted")
        return forward(*given)

    engine.runner.forward = broken  # type: ignore[method-assign]
    run(engine)
    assert engine.oom_backoff.num_ooms == 1 and written(tracks) == truth_for("greedy")


@pytest.mark.parametrize("moment", range(3, 7))
def test_guesses_of_a_text_that_goes_meanwhile_cost_nobody_elses(moment: int) -> None:
    """They were made, nobody has seen them, and their text is no more."""
    truth = truth_for("greedy")
    engine, executor = guessing(LeavesUnseen(DRAFTERS["oracle"](truth)), world=World(max_num_seqs=5))
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(moment):
        engine.step()
    assert engine.async_scheduler.in_flight is not None and executor.unseen
    engine.abort("1")
    check_pages(engine)
    run(engine)
    assert [text for i, text in enumerate(written(tracks)) if i != 1] == [t for i, t in enumerate(truth) if i != 1]
    assert engine.runner.pool.num_held == 0


def test_one_that_asked_for_more_rows_and_goes_meanwhile_shifts_nobodys() -> None:
    """Of a prompt whose likelihoods are wanted every row is there, also when nobody wants them any more."""
    engine, _ = guessing(NGramDrafter(), world=World(prefix_cache=False))
    add(engine, "0", PROMPTS[0], ignore_eos=True, max_tokens=30)
    for _ in range(3):
        engine.step()
    add(engine, "1", PROMPTS[1], prompt_logprobs=1)
    (late,) = add(engine, "4", PROMPTS[4])
    engine.step()
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 3
    engine.abort("1")
    run(engine)
    assert written([late]) == [truth_for("greedy")[4]]


def test_a_text_that_comes_meanwhile_is_in_the_step_after_the_next() -> None:
    engine, _ = guessing(oracle())
    add(engine, "0", PROMPTS[0], ignore_eos=True, max_tokens=40)
    for _ in range(3):
        engine.step()
    (late,) = add(engine, "1", PROMPTS[1])
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 1
    engine.step()
    assert late.seq.num_output_tokens == 0 and len(engine.async_scheduler.in_flight.scheduled) == 2
    run(engine)
    assert written([late]) == [truth_for("greedy")[1]]


class Asked(NGramDrafter):
    """Notes what it was to read, and which steps had been sent then."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.asked = fails, list[list[int]]()

    def prepare(self, seqs: list[Sequence]) -> None:
        self.asked.append([seq.id for seq in seqs])
        if self.fails:
            raise RuntimeError("planted")
        super().prepare(seqs)


def test_drafters_read_new_texts_while_the_device_does() -> None:
    engine, _ = guessing(drafter := Asked())
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS[:2])]
    run(engine)
    (late,) = add(engine, "2", PROMPTS[2])
    run(engine)
    assert drafter.asked == [[tracks[0].seq.id, tracks[1].seq.id], [late.seq.id]]
    assert written([*tracks, late]) == truth_for("greedy")[:3]


def test_one_that_cannot_read_loses_its_guesses_and_no_text() -> None:
    engine, _ = guessing(Asked(fails=True))
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    assert written(tracks) == truth_for("greedy") and engine.stats.drafter_failures


@pytest.mark.parametrize("make", [NGramDrafter, SuffixDrafter, lambda: TokenRecyclingDrafter(VOCAB)])
def test_what_is_read_before_is_guessed_as_if_it_were_read_when_it_is_asked_for(make: Any) -> None:
    """And nothing is kept of a text that has gone."""
    texts = []
    for reads in (False, True):
        engine = World().engine(drafter := make())
        tracks = [add(engine, str(i), prompt, max_tokens=40, ignore_eos=True)[0] for i, prompt in enumerate(PROMPTS)]
        if reads:
            drafter.prepare([track.seq for track in tracks])
            drafter.prepare([track.seq for track in tracks])
        run(engine)
        learns = isinstance(drafter, TokenRecyclingDrafter)  # from all texts, in the order in which it reads them
        texts.append((written(tracks), 0 if learns else engine.stats.speculation.drafted))
        kept = (getattr(drafter, name, {}) for name in ("_kept", "_read", "_unread"))
        assert not any(kept)
    assert texts[0] == texts[1]


def test_of_several_only_those_read_that_may_guess() -> None:
    first, second = Asked(), Asked()
    first.name, second.name = "first", "second"
    mix = MixDrafter([first, second], ("second",))
    engine, _ = guessing(mix)
    add(engine, "0", PROMPTS[0])
    run(engine)
    assert not first.asked and second.asked
