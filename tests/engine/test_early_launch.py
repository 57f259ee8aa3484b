"""The next step is launched right after a commit, and deltas are emitted while the device runs it."""

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
from tests.fake_async import DeviceDraftDrafter, FakeAsyncExecutor
from tests.laws.test_losslessness import DRAFTERS, truth_for
from tests.tiny import PROMPTS, VOCAB, World, add, check_pages, model_drafter, run


def drafting(drafter: Drafter, nodes: int = 3, world: World = World()) -> tuple[Engine, FakeAsyncExecutor]:
    """Return an engine that drafts in every step, on a device with async scheduling."""
    engine = world.engine(drafter)
    executor = engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
    engine.controller = FixedController(nodes)
    return engine, executor


def oracle() -> OracleDrafter:
    outputs = dict(zip(map(tuple, PROMPTS), truth_for("greedy"), strict=True))
    return OracleDrafter(outputs, VOCAB, 0.3)


def outputs_of(states: list[Any]) -> list[list[int]]:
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


def test_the_next_step_is_launched_before_deltas_are_emitted() -> None:
    engine, executor = drafting(oracle())
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    order: list[int] = []
    for state in states:
        make = state.make_delta
        state.make_delta = lambda *args, make=make: (order.append(executor.num_steps), make(*args))[1]  # type: ignore[method-assign]
    while engine.busy:
        before = executor.num_steps
        deltas = engine.step()
        if deltas and engine.busy and before > 2:
            assert executor.num_steps == before + 1 and engine.async_scheduler.in_flight is not None
            assert set(order) == {executor.num_steps}, "all deltas are made after the next launch"
        order.clear()
    assert outputs_of(states) == truth_for("greedy")
    assert not engine.stats.drafter_failures and engine.runner.pool.num_held == 0


def test_first_tokens_do_not_wait_for_a_draft() -> None:
    engine, executor = drafting(model_drafter(seed=5))
    add(engine, "0", PROMPTS[0])
    (delta,) = engine.step()
    assert delta.tokens and executor.num_steps == 1 and engine.async_scheduler.in_flight is None
    engine.step()
    add(engine, "1", PROMPTS[1])
    engine.step()
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 2
    assert [delta.request_id for delta in engine.step()] == ["0", "1"] and engine.async_scheduler.in_flight is None
    run(engine)


def test_without_async_scheduling_no_step_is_in_flight() -> None:
    engine = World().engine(oracle())
    add(engine, "0", PROMPTS[0])
    for _ in range(3):
        engine.step()
        assert engine.async_scheduler.in_flight is None
    run(engine)


@pytest.mark.parametrize("error", [RuntimeError("planted"), ValueError("planted")])
def test_a_failed_early_launch_costs_nothing_of_the_committed_step(error: Exception) -> None:
    """The next call of `step` tries again and raises."""
    engine, _ = drafting(oracle())
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    forward, failures = engine.runner.forward, iter([False, False, False, True, False, True, True])

    def broken(*args: Any) -> Any:
        if next(failures, False):
            raise error
        return forward(*args)

    engine.runner.forward = broken  # type: ignore[method-assign]
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except type(error):
            raised += 1
        check_pages(engine)
    assert raised == 1 and outputs_of(states) == truth_for("greedy")
    emitted = [[token for delta in state.outbox for token in delta.tokens] for state in states]
    assert emitted == outputs_of(states)


def test_an_early_launch_that_runs_out_of_memory_is_made_smaller() -> None:
    engine, _ = drafting(oracle())
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    forward, failures = engine.runner.forward, iter([False, False, False, True])

    def broken(*args: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("planted")
        return forward(*args)

    engine.runner.forward = broken  # type: ignore[method-assign]
    run(engine)
    assert engine.oom_backoff.num_ooms == 1 and outputs_of(states) == truth_for("greedy")


@pytest.mark.parametrize("moment", range(3, 7))
def test_aborting_a_sequence_with_device_drafts_affects_no_other(moment: int) -> None:
    """Its draft tokens are on the device, unknown to the host, when it is aborted."""
    truth = truth_for("greedy")
    engine, executor = drafting(DeviceDraftDrafter(DRAFTERS["oracle"](truth)), world=World(max_num_seqs=5))
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(moment):
        engine.step()
    assert engine.async_scheduler.in_flight is not None and executor.num_device_drafts
    engine.abort("1")
    check_pages(engine)
    run(engine)
    assert [output for i, output in enumerate(outputs_of(states)) if i != 1] == [
        t for i, t in enumerate(truth) if i != 1
    ]
    assert engine.runner.pool.num_held == 0


def test_aborting_a_request_with_prompt_logprobs_shifts_no_rows() -> None:
    """Every row of its prompt has logits in the step, also after it was aborted."""
    engine, _ = drafting(NGramDrafter(), world=World(prefix_cache=False))
    add(engine, "0", PROMPTS[0], ignore_eos=True, max_tokens=30)
    for _ in range(3):
        engine.step()
    add(engine, "1", PROMPTS[1], prompt_logprobs=1)
    (late,) = add(engine, "4", PROMPTS[4])
    engine.step()
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 3
    engine.abort("1")
    run(engine)
    assert outputs_of([late]) == [truth_for("greedy")[4]]


def test_a_new_sequence_is_in_the_step_after_the_one_in_flight() -> None:
    engine, _ = drafting(oracle())
    add(engine, "0", PROMPTS[0], ignore_eos=True, max_tokens=40)
    for _ in range(3):
        engine.step()
    (late,) = add(engine, "1", PROMPTS[1])
    assert engine.async_scheduler.in_flight is not None and len(engine.async_scheduler.in_flight.scheduled) == 1
    engine.step()
    assert late.seq.num_output_tokens == 0 and len(engine.async_scheduler.in_flight.scheduled) == 2
    run(engine)
    assert outputs_of([late]) == [truth_for("greedy")[1]]


class PreparedDrafter(NGramDrafter):
    """Records which sequences it was to prepare."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.prepared = fails, list[list[int]]()

    def prepare(self, seqs: list[Sequence]) -> None:
        self.prepared.append([seq.id for seq in seqs])
        if self.fails:
            raise RuntimeError("planted")
        super().prepare(seqs)


def test_drafters_prepare_new_prompts_while_the_device_prefills_them() -> None:
    engine, _ = drafting(drafter := PreparedDrafter())
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS[:2])]
    run(engine)
    (late,) = add(engine, "2", PROMPTS[2])
    run(engine)
    assert drafter.prepared == [[states[0].seq.id, states[1].seq.id], [late.seq.id]]
    assert outputs_of([*states, late]) == truth_for("greedy")[:3]


def test_a_drafter_that_fails_to_prepare_loses_drafts_and_no_output() -> None:
    engine, _ = drafting(PreparedDrafter(fails=True))
    states = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    assert outputs_of(states) == truth_for("greedy") and engine.stats.drafter_failures


@pytest.mark.parametrize("make", [NGramDrafter, SuffixDrafter, lambda: TokenRecyclingDrafter(VOCAB)])
def test_preparing_changes_no_draft(make: Any) -> None:
    """And no state is left of a finished sequence."""
    results = []
    for prepares in (False, True):
        engine = World().engine(drafter := make())
        states = [add(engine, str(i), prompt, max_tokens=40, ignore_eos=True)[0] for i, prompt in enumerate(PROMPTS)]
        if prepares:
            drafter.prepare([state.seq for state in states])
            drafter.prepare([state.seq for state in states])
        run(engine)
        learns = isinstance(drafter, TokenRecyclingDrafter)  # from all sequences, in the order in which it sees them
        results.append((outputs_of(states), 0 if learns else engine.stats.speculation.drafted))
        kept = (getattr(drafter, name, {}) for name in ("_indices", "_prompt_learned", "_prompt_pending"))
        assert not any(kept)
    assert results[0] == results[1]


def test_in_a_mix_only_the_drafters_of_a_request_prepare() -> None:
    first, second = PreparedDrafter(), PreparedDrafter()
    first.name, second.name = "first", "second"
    mix = MixDrafter([first, second], ("second",))
    engine, _ = drafting(mix)
    add(engine, "0", PROMPTS[0])
    run(engine)
    assert not first.prepared and second.prepared
